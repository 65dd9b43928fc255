"""Models under evaluation: what identifies them, which folders are refused, and modules of sentence-transformers."""

import shutil
from pathlib import Path

import pytest
import torch
from json_files import edit_json
from safetensors.torch import load_file, save_file
from security import good_inputs as good
from sentence_transformers import SentenceTransformer
from unit.evaluation.pseudo_perplexity_models import WORDS, write_model

from megatron_neobert.errors import ConfigError, ConversionError, MissingInputError
from megatron_neobert.evaluation import models


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", "Bert")


def test_fingerprint_changes_with_weights_and_tokenizer_but_not_with_the_card_or_an_onnx_export(
    folder: Path, tmp_path: Path
):
    first = models.fingerprint(folder)
    (folder / "README.md").write_text("a card")
    (folder / "onnx").mkdir()
    shutil.copy(folder / "config.json", folder / "onnx")
    assert models.fingerprint(folder) == first
    fingerprints = {first, models.fingerprint(write_model(tmp_path / "other", "Bert", seed=1))}
    (folder / "2_Dense").mkdir()
    names = ("tokenizer.json", "modules.json", "2_Dense/config.json", "2_Dense/model.safetensors")
    for name in (*names, "config_sentence_transformers.json"):
        (folder / name).write_text("{}")
        fingerprints.add(models.fingerprint(folder))
    assert len(fingerprints) == 3 + len(names)


def test_classification_head_may_be_missing_but_the_encoder_may_not(folder: Path):
    models.load_model(folder, "AutoModelForSequenceClassification", num_labels=3).save_pretrained(folder)
    assert models.load_model(folder, "AutoModelForSequenceClassification", num_labels=5).num_labels == 5
    weights = load_file(folder / "model.safetensors")
    lost = next(name for name in weights if "attention" in name)
    del weights[lost]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ConversionError, match=f"{lost} is not there"):
        models.load_model(folder, "AutoModelForSequenceClassification", num_labels=3)


@pytest.mark.parametrize(
    "auto_class", ["AutoModel", "AutoModelForSequenceClassification", "AutoModelForTokenClassification"]
)
@pytest.mark.parametrize("kind", ["Bert", "EuroBert", "neobert"])
def test_encoder_whose_weights_have_another_shape_than_its_config_is_refused(
    tmp_path: Path, kind: str, auto_class: str
):
    folder = write_model(tmp_path / "model", kind)
    edit_json(folder / "config.json", vocab_size=len(WORDS) + 8)
    with pytest.raises(ConversionError, match=rf"embed|encoder\.weight.*the shape \({len(WORDS)}, 32\) and not"):
        models.load_model(folder, auto_class)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"text_config": 5}, "text_config is 5, but must be an object"),
        ({"max_position_embeddings": "64"}, "max_position_embeddings is '64', but must be a whole number"),
        ({"max_length": "64"}, "max_length is '64', but must be a whole number"),
        ({"norm_eps": [1e-5]}, "norm_eps is a list of length 1, but must be a number"),
        ({"rope_theta": "1e4"}, "rope_theta is '1e4', but must be a number"),
        ({"pad_token_id": True}, "pad_token_id is True, but must be a whole number"),
    ],
)
def test_value_of_a_wrong_type_is_refused_by_its_key(folder, values, message):
    edit_json(folder / "config.json", **values)
    with pytest.raises(ConversionError, match=message):
        models.load_model(folder, "AutoModel")


@pytest.mark.parametrize("values", [{"output_hidden_states": True}, {"return_dict": False}], ids=str)
@pytest.mark.parametrize("auto_class", ["AutoModelForSequenceClassification", "AutoModelForTokenClassification"])
def test_model_returns_logits_by_name_whatever_its_config_asks_for(folder, auto_class, values):
    edit_json(folder / "config.json", **values)
    output = models.load_model(folder, auto_class, num_labels=2)(input_ids=torch.tensor([[5, 6]]))
    assert list(output.keys()) == ["logits"]


@pytest.mark.parametrize("device", ["mps", "xpu", "meta", "tpu"])
def test_device_other_than_cpu_and_cuda_is_refused(device):
    with pytest.raises(ConfigError, match=f"--device {device}.*; give cpu, cuda or cuda:1"):
        models.choose_device(device)


# --- modules built from the allow-list equal those that sentence-transformers loads itself


TEXTS = ["a bad cab", "dead beef", "a cage of jade"]


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    return good.write_model(tmp_path / "model")


def encode(model: SentenceTransformer) -> torch.Tensor:
    return model.encode(TEXTS, convert_to_tensor=True)


def load(encoder: Path) -> SentenceTransformer:
    return models.load_sentence_transformer(encoder, max_length=1024)


def add_dense(encoder: Path, **settings: object) -> None:
    """Add a Dense module without weights in safetensors."""
    good.write_modules(encoder, {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense"})
    good.write_json(encoder / "2_Dense" / "config.json", settings)


def add_dense_with_weights(encoder: Path) -> None:
    add_dense(encoder, in_features=8, out_features=4, bias=False)
    save_file({"linear.weight": torch.eye(4, 8)}, encoder / "2_Dense" / "model.safetensors")


CHANGES = {
    "format of old versions": lambda encoder: None,
    "first token": lambda encoder: good.write_json(
        encoder / "1_Pooling" / "config.json",
        {"word_embedding_dimension": 8, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
    ),
    "Dense": add_dense_with_weights,
    "no modules.json": lambda encoder: (encoder / "modules.json").unlink(),
    "format of this version": lambda encoder: SentenceTransformer(str(encoder), device="cpu").save_pretrained(
        str(encoder)
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_embeddings_and_prompts_equal_those_of_sentence_transformers(encoder: Path, change):
    good.write_json(encoder / "config_sentence_transformers.json", {"prompts": {"query": "a cab: "}})
    change(encoder)
    expected = SentenceTransformer(str(encoder), device="cpu")
    assert torch.equal(encode(load(encoder)), encode(expected))
    assert load(encoder).prompts == expected.prompts


POOLING, SETTINGS = "1_Pooling/config.json", "config_sentence_transformers.json"


def edit(name: str, **changes: object):
    return lambda encoder: edit_json(encoder / name, **changes)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (edit(POOLING, pooling_mode="unknown"), ConversionError, "Invalid pooling mode"),
        (
            edit(SETTINGS, prompts={"query": ["a"]}),
            ConversionError,
            "prompts is a dict of length 1, but must be texts by name",
        ),
        (add_dense, ConversionError, r"2_Dense: the weights must be in model\.safetensors and not pickled"),
        (
            lambda encoder: add_dense(encoder, activation_function="torch.hub.load"),
            ConversionError,
            r"activation_function is 'torch\.hub\.load', not a class like",
        ),
        (lambda encoder: (encoder / POOLING).unlink(), MissingInputError, r"1_Pooling/config\.json: no such file"),
        *(
            (lambda encoder, types=types: good.write_modules(encoder, types), ConversionError, r"modules\.json")
            for types in ({"0_Transformer": "Transformer"}, {"": "Transformer", "../elsewhere": "Pooling"})
        ),
    ],
)
def test_modules_that_are_invalid_incomplete_or_outside_the_folder_are_refused(encoder: Path, change, error, message):
    change(encoder)
    with pytest.raises(error, match=message):
        load(encoder)
