"""Modules of sentence-transformers are built from an allow-list and equal those of the library's own loading."""

import json
from pathlib import Path

import pytest
import torch
from security import good_inputs as good
from sentence_transformers import SentenceTransformer

from megatron_neobert.errors import ConversionError
from megatron_neobert.evaluation import models

TEXTS = ["a bad cab", "dead beef", "a cage of jade"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return good.write_model(tmp_path / "model")


def encode(model: SentenceTransformer) -> torch.Tensor:
    return model.encode(TEXTS, convert_to_tensor=True)


def load(folder: Path) -> SentenceTransformer:
    return models.load_sentence_transformer(folder, max_length=1024)


def add_layer_norm(folder: Path) -> None:
    from sentence_transformers.sentence_transformer.modules import LayerNorm

    good.write_modules(folder, {"": "Transformer", "1_Pooling": "Pooling", "2_LayerNorm": "LayerNorm"})
    (folder / "2_LayerNorm").mkdir()
    norm = LayerNorm(8)
    torch.nn.init.normal_(norm.norm.weight, generator=torch.Generator().manual_seed(0))
    norm.save(str(folder / "2_LayerNorm"))


CHANGES = {
    "as old versions write it": lambda folder: None,
    "cls": lambda folder: good.write_json(
        folder / "1_Pooling" / "config.json",
        {"word_embedding_dimension": 8, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
    ),
    "two modes": lambda folder: good.write_json(
        folder / "1_Pooling" / "config.json",
        {"embedding_dimension": 8, "pooling_mode": ["max", "mean"], "include_prompt": True},
    ),
    "Dense": good.add_dense,
    "Dense without activation": lambda folder: good.add_dense(
        folder, activation_function="torch.nn.modules.linear.Identity"
    ),
    "LayerNorm": add_layer_norm,
    "no modules.json": lambda folder: (folder / "modules.json").unlink(),
    "as this version writes it": lambda folder: SentenceTransformer(str(folder), device="cpu").save_pretrained(
        str(folder)
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_embeddings_equal_those_of_the_librarys_own_loading(folder: Path, change):
    change(folder)
    expected = encode(SentenceTransformer(str(folder), device="cpu"))
    assert torch.equal(encode(load(folder)), expected)


def test_control_another_pooling_gives_other_embeddings(folder: Path):
    before = encode(load(folder))
    CHANGES["cls"](folder)
    assert (encode(load(folder)) - before).abs().max() > 0.01


def test_prompts_of_the_folder_are_kept(folder: Path):
    good.write_json(folder / "config_sentence_transformers.json", {"prompts": {"query": "find: "}})
    assert load(folder).prompts["query"] == "find: "


@pytest.mark.parametrize(
    ("path", "changes", "said"),
    [
        ("sentence_bert_config.json", {"model_args": {"use_safetensors": False}}, r"at `\$.model_args`"),
        (
            "sentence_bert_config.json",
            {"processor_kwargs": {"use_fast": False}},
            r"at `\$.processor_kwargs`",
        ),
        ("sentence_bert_config.json", {"backend": "onnx"}, "unknown field `backend`"),
        ("1_Pooling/config.json", {"pooling_mode": "own"}, "pooling_mode"),
        ("2_Dense/config.json", {"activation_function": "subprocess.Popen"}, "only classes of torch.nn are used"),
        ("2_Dense/config.json", {"activation_function": "torch.nn.modules.activation.torch"}, "only classes of"),
        ("2_Dense/config.json", {"in_features": 10**9}, "and config.json asks for"),
    ],
)
def test_setting_that_is_passed_to_a_loader_or_does_not_fit_is_refused(folder: Path, path: str, changes, said: str):
    good.add_dense(folder)
    good.write_json(folder / path, json.loads((folder / path).read_text()) | changes)
    with pytest.raises(ConversionError, match=said):
        load(folder)


@pytest.mark.parametrize(
    "types",
    [
        {"": "Transformer", "1_Pooling": "Pooling", "2_WordWeights": "WordWeights"},
        {"": "Router"},
        {"0_Transformer": "Transformer"},
        {"": "Transformer", "../elsewhere": "Pooling"},
        {"": "Transformer", "1_Pooling/inner": "Pooling"},
    ],
    ids=str,
)
def test_module_outside_the_allow_list_or_the_folder_is_refused(folder: Path, types: dict[str, str]):
    good.write_modules(folder, types)
    with pytest.raises(ConversionError, match=r"modules\.json"):
        load(folder)
