"""Modules built from the allow-list equal the modules that sentence-transformers loads itself."""

import json
from pathlib import Path

import pytest
import torch
from security import good_inputs as good
from sentence_transformers import SentenceTransformer

from megatron_neobert.errors import ConversionError, MissingInputError
from megatron_neobert.evaluation import models

TEXTS = ["a bad cab", "dead beef", "a cage of jade"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return good.write_model(tmp_path / "model")


def encode(model: SentenceTransformer) -> torch.Tensor:
    return model.encode(TEXTS, convert_to_tensor=True)


def load(folder: Path) -> SentenceTransformer:
    return models.load_sentence_transformer(folder, max_length=1024)


CHANGES = {
    "format of old versions": lambda folder: None,
    "first token": lambda folder: good.write_json(
        folder / "1_Pooling" / "config.json",
        {"word_embedding_dimension": 8, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
    ),
    "no modules.json": lambda folder: (folder / "modules.json").unlink(),
    "format of this version": lambda folder: SentenceTransformer(str(folder), device="cpu").save_pretrained(
        str(folder)
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_embeddings_and_prompts_equal_those_of_sentence_transformers(folder: Path, change):
    good.write_json(folder / "config_sentence_transformers.json", {"prompts": {"query": "a cab: "}})
    change(folder)
    expected = SentenceTransformer(str(folder), device="cpu")
    assert torch.equal(encode(load(folder)), encode(expected))
    assert load(folder).prompts["query"] == "a cab: "
    if (folder / "modules.json").exists():  # otherwise the library ignores prompts
        assert expected.prompts["query"] == "a cab: "


@pytest.mark.parametrize(
    ("path", "changes", "message"),
    [
        ("sentence_bert_config.json", {"model_args": {"use_safetensors": False}}, r"at `\$.model_args`"),
        ("1_Pooling/config.json", {"pooling_mode": "unknown"}, "pooling_mode"),
        ("config_sentence_transformers.json", {"prompts": {"query": ["a"]}}, r"at `\$.prompts"),
    ],
)
def test_loader_argument_or_invalid_setting_is_refused(folder: Path, path: str, changes, message: str):
    good.write_json(folder / path, json.loads((folder / path).read_text()) | changes)
    with pytest.raises(ConversionError, match=message):
        load(folder)


def test_missing_file_of_a_module_is_a_missing_input(folder: Path):
    (folder / "1_Pooling" / "config.json").unlink()
    with pytest.raises(MissingInputError, match=r"1_Pooling/config\.json: no such file"):
        load(folder)


@pytest.mark.parametrize(
    "types",
    [
        {"": "Transformer", "1_Pooling": "Pooling", "2_WordWeights": "WordWeights"},
        {"0_Transformer": "Transformer"},
        {"": "Transformer", "../elsewhere": "Pooling"},
    ],
    ids=str,
)
def test_module_outside_the_allow_list_or_the_folder_is_refused(folder: Path, types: dict[str, str]):
    good.write_modules(folder, types)
    with pytest.raises(ConversionError, match=r"modules\.json"):
        load(folder)
