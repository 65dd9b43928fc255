"""Exported folders with --sentence-transformers, loaded with that library."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.specifiers import SpecifierSet
from saved_model import MODEL
from sentence_transformers import SentenceTransformer
from torch import Tensor
from transformers import AutoModel, AutoTokenizer
from unit.huggingface.tiny_neobert import FlashKernel

from checkpoint_conversion.export import write_sentence_transformers_files
from megatron_neobert.huggingface.auto_classes import register_neobert

TEXTS = ["the cat sat on a mat .", "a mat"]


@pytest.fixture(scope="module")
def folder(exported: Any) -> Path:
    return exported(sentence_transformers=True)[0]


@pytest.fixture
def model(folder: Path) -> SentenceTransformer:
    return SentenceTransformer(str(folder), device="cpu", local_files_only=True)


def encode(model: SentenceTransformer, texts: list[str]) -> Tensor:
    return model.encode(texts, convert_to_tensor=True, show_progress_bar=False)


def last_hidden_states(folder: Path, text: str) -> Tensor:
    """Return the hidden states of one text with [CLS] and [SEP], computed by transformers without padding or mask."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    backbone = AutoModel.from_pretrained(folder, trust_remote_code=False, local_files_only=True).eval()
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return backbone(ids).last_hidden_state[0]


def test_embedding_is_the_mean_over_all_tokens(folder: Path, model: SentenceTransformer):
    expected = torch.stack([last_hidden_states(folder, text).mean(dim=0) for text in TEXTS])
    torch.testing.assert_close(encode(model, TEXTS), expected, atol=1e-6, rtol=0)  # measured: equal
    without_cls = torch.stack([last_hidden_states(folder, text)[1:].mean(dim=0) for text in TEXTS])
    assert (without_cls - expected).abs().max() > 1e-2, "[CLS] must be included"


def test_texts_are_embedded_without_padding_if_flash_attention_is_there(exported: Any, monkeypatch: pytest.MonkeyPatch):
    """The option `unpad_inputs` of sentence-transformers sends document bounds to a folder with this project's code."""
    register_neobert()
    folder, _ = exported(layout="neobert", sentence_transformers=True)
    model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    expected = encode(model, TEXTS)
    kernel = FlashKernel(monkeypatch)
    model[0].auto_model.config._attn_implementation = "flash_attention_2"
    model[0].unpad_inputs = True
    torch.testing.assert_close(encode(model, TEXTS), expected, atol=1e-6, rtol=0)
    calls = [(call["starts"].tolist(), call["longest"]) for call in kernel.calls]
    assert calls == [([0, 9, 13], (9, 9))] * MODEL.num_layers


@pytest.mark.parametrize(("layout", "oldest"), [("llama", "5.3.0"), ("neobert", "4.57.3")])
def test_versions_of_transformers_that_do_not_support_the_layout_are_refused(tmp_path: Path, layout: str, oldest: str):
    write_sentence_transformers_files(tmp_path, layout, MODEL, max_seq_length=64)
    settings = json.loads((tmp_path / "config_sentence_transformers.json").read_text())
    supported = SpecifierSet(settings["requirements"]["transformers"]["specifier"])
    versions = ("4.47.1", "4.56.2", "4.57.3", "5.2.0", "5.3.0", "5.23.0")
    assert next(version for version in versions if version in supported) == oldest
