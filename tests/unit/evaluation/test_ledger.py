"""The ledger of finished work, and the models under evaluation: what identifies them, and how they are loaded."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from json_files import edit_json
from safetensors.torch import load_file, save_file
from security import good_inputs as good
from sentence_transformers import SentenceTransformer
from unit.evaluation.pseudo_perplexity_models import WORDS, write_model

from megatron_neobert.errors import ConversionError, DataError, MissingInputError, OutputError
from megatron_neobert.evaluation import models
from megatron_neobert.evaluation.ledger import LEDGER, open_ledger

UNIT = {"model": "abc", "data": {"train": "def"}, "lengths": (8, 16), "rate": 1e-5}


def test_result_is_found_for_an_equal_unit_only_and_read_back_as_written(tmp_path):
    with open_ledger(tmp_path) as ledger:
        assert ledger.find(UNIT) is None
        written = ledger.add(UNIT, {"score": 1 / 3, "kinds": (1, 2)})
    with open_ledger(tmp_path) as read:
        assert read.find(json.loads(json.dumps(UNIT))) == written == {"score": 1 / 3, "kinds": [1, 2]}
    for changed in ({"model": "abd"}, {"data": {"train": "deg"}}, {"lengths": (8,)}, {"rate": 2e-5}, {"more": None}):
        assert read.find({**UNIT, **changed}) is None


def test_incomplete_last_line_is_removed_before_the_next_line(tmp_path):
    with open_ledger(tmp_path) as ledger:
        ledger.add({"task": "a"}, {})
    path = tmp_path / LEDGER
    path.write_bytes(path.read_bytes() + b'{"key": ')
    with open_ledger(tmp_path) as ledger:
        ledger.add({"task": "b"}, {})
        ledger.add({"task": "c"}, {})
    with open_ledger(tmp_path) as ledger:
        assert [line["unit"]["task"] for line in ledger.lines.values()] == ["a", "b", "c"]


@pytest.mark.parametrize("line", ["[1]", '{"key": "a"}', "no JSON", '{"key": "a", "unit": 1, "result": {}}'])
def test_complete_line_that_is_not_an_entry_is_refused_with_its_number(tmp_path, line):
    (tmp_path / LEDGER).write_text(line + "\n")
    with pytest.raises(DataError, match=r"ledger\.jsonl, line 1: not an entry of a ledger"), open_ledger(tmp_path):
        pass


def test_ledger_that_is_open_is_not_opened_again(tmp_path):
    # A lock belongs to the open file, so a second one in this process is like one of another process.
    refusal = pytest.raises(OutputError, match="another command is writing these results")
    with open_ledger(tmp_path), refusal, open_ledger(tmp_path):
        pass


# --- models: what identifies them, and which weights may be missing from their folders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", "Bert")


def remove_weight(folder: Path, name: str) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights[name]
    save_file(weights, folder / "model.safetensors")


def test_fingerprint_changes_with_weights_and_tokenizer_but_not_with_the_card_or_an_onnx_export(
    folder: Path, tmp_path: Path
):
    first = models.fingerprint(folder)
    (folder / "README.md").write_text("a card")
    (folder / "onnx").mkdir()
    shutil.copy(folder / "config.json", folder / "onnx")
    assert models.fingerprint(folder) == first
    fingerprints = {first, models.fingerprint(write_model(tmp_path / "other", "Bert", seed=1))}
    (folder / "1_Pooling").mkdir()
    names = ("tokenizer.json", "modules.json", "1_Pooling/config.json", "config_sentence_transformers.json")
    for name, content in zip(names, ("{}", '[{"path": "1_Pooling"}]', "{}", "{}"), strict=True):
        (folder / name).write_text(content)
        fingerprints.add(models.fingerprint(folder))
    assert len(fingerprints) == 2 + len(names)


def test_missing_masked_language_model_head_is_refused(tmp_path: Path):
    folder = write_model(tmp_path / "model", "EuroBert")
    remove_weight(folder, "lm_head.weight")
    refusal = r"lm_head\.weight is not there; AutoModelForMaskedLM would have random weights there"
    with pytest.raises(ConversionError, match=refusal):
        models.load_model(folder, "AutoModelForMaskedLM")
    assert models.load_model(folder, "AutoModel") is not None


def test_classification_head_may_be_missing_but_the_encoder_may_not(folder: Path):
    models.load_model(folder, "AutoModelForSequenceClassification", num_labels=3).save_pretrained(folder)
    assert models.load_model(folder, "AutoModelForSequenceClassification", num_labels=5).num_labels == 5
    lost = next(name for name in load_file(folder / "model.safetensors") if "attention" in name)
    remove_weight(folder, lost)
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


# --- modules built from the allow-list equal those that sentence-transformers loads itself


TEXTS = ["a bad cab", "dead beef", "a cage of jade"]


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    return good.write_model(tmp_path / "model")


def encode(model: SentenceTransformer) -> torch.Tensor:
    return model.encode(TEXTS, convert_to_tensor=True)


def load(encoder: Path) -> SentenceTransformer:
    return models.load_sentence_transformer(encoder, max_length=1024)


CHANGES = {
    "format of old versions": lambda encoder: None,
    "first token": lambda encoder: good.write_json(
        encoder / "1_Pooling" / "config.json",
        {"word_embedding_dimension": 8, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
    ),
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
