"""The verify command: a checkpoint and its export are equal, and two models are not."""

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from saved_model import WORDS, SavedModel
from torch import Tensor

from checkpoint_conversion import comparison, verify
from checkpoint_conversion.comparison import LogitModel, build_prompts, compare_logits
from checkpoint_conversion.convert import ExportOptions, export
from checkpoint_conversion.megatron_io import read_checkpoint
from megatron_neobert.errors import ConversionError, MissingInputError


@pytest.fixture
def exported(saved: SavedModel, tmp_path: Path) -> Path:
    checkpoint = read_checkpoint(saved.save)
    export(checkpoint, tmp_path / "model", tokenizer=checkpoint.tokenizer, options=ExportOptions())
    return tmp_path / "model"


def run_verify(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["verify.py", *map(str, arguments)])
    return verify.main()


def test_checkpoint_and_its_export_are_equal(
    saved: SavedModel, exported: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert run_verify(monkeypatch, saved.save, exported) == 0
    shown = capsys.readouterr().out
    assert "iter_0000030 (Megatron)" in shown
    assert "model (EuroBertForMaskedLM)" in shown
    assert "logits: equal within 0.0001" in shown
    assert "settings: equal" in shown
    assert "weights: all 16 tensors equal bit for bit\nequal" in shown


def change_epsilon(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1.0001e-5}))


def change_rotary_base(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 5001.0
    (folder / "config.json").write_text(json.dumps(config))


def change_unread_row(folder: Path) -> None:
    read = set(build_prompts(len(WORDS), longest=64).tokens_bs.flatten().tolist())
    unread = next(number for number in range(len(WORDS)) if number not in read)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][unread] += 1.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (change_epsilon, "norm_epsilon is 1e-05 and 1.0001e-05 in A and B"),
        (change_rotary_base, "rotary_base is 5000 and 5001 in A and B"),
        (change_unread_row, "1 of 16 tensors differ; most of all embedding.word_embeddings.weight, by 0."),
    ],
)
def test_what_the_logits_of_the_prompts_do_not_show_is_not_equal(
    saved: SavedModel,
    exported: Path,
    change: Callable[[Path], None],
    found: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(comparison, "PROMPT_TOKENS", (3,))  # fewer than the vocabulary has, as at full size
    change(exported)
    assert run_verify(monkeypatch, saved.save, exported) == 1
    shown = capsys.readouterr().out
    assert "logits: equal within 0.0001" in shown
    assert found in shown


def test_changed_weight_is_not_equal(
    saved: SavedModel,
    exported: Path,
    internal: dict[str, Tensor],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    internal["decoder.layers.1.self_attention.linear_qkv.weight"][:4] *= 1.1
    saved.write(internal)
    assert run_verify(monkeypatch, saved.save, exported) == 1
    assert "NOT equal within 0.0001" in capsys.readouterr().out
    assert run_verify(monkeypatch, saved.save, exported, "--tolerance", "2") == 0


def test_models_of_other_vocabularies_are_refused_with_both_sizes(exported: Path, monkeypatch: pytest.MonkeyPatch):
    load = verify.load_side

    def load_smaller(folder: Path) -> LogitModel:
        side = load(folder)
        return replace(side, vocab_size=12) if folder.name == "smaller" else side

    (exported.parent / "smaller").symlink_to(exported)
    monkeypatch.setattr(verify, "load_side", load_smaller)
    with pytest.raises(ConversionError, match=r"predicts 13 tokens and .* 12; only models of one vocabulary"):
        run_verify(monkeypatch, exported, exported.parent / "smaller")


def test_folder_without_a_model_is_a_missing_input(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "empty").mkdir()
    for folder in ("empty", "nowhere"):
        with pytest.raises(MissingInputError, match=folder):
            run_verify(monkeypatch, exported, tmp_path / folder)


@pytest.mark.parametrize("damage", ["a weight left out", "a truncated file", "another kind of model"])
def test_damaged_export_is_refused(exported: Path, damage: str, monkeypatch: pytest.MonkeyPatch):
    weights = exported / "model.safetensors"
    if damage == "a weight left out":
        tensors = load_file(weights)
        del tensors["lm_head.bias"]
        save_file(tensors, weights, metadata={"format": "pt"})
    elif damage == "a truncated file":
        weights.write_bytes(weights.read_bytes()[:-100])
    else:
        (exported / "config.json").write_text('{"model_type": "nothing"}')
    with pytest.raises(ConversionError, match=r"lm_head\.bias|not a safetensors file|cannot load it"):
        run_verify(monkeypatch, exported, exported)


# --- the comparison ---


def test_figures_follow_from_the_logits():
    first = torch.tensor([[[4.0, 0.0], [0.0, 2.0]]])
    second = torch.tensor([[[4.0, 0.0], [1.0, 0.5]]])
    comparison = compare_logits(first, second, torch.ones(1, 2))
    assert comparison.tokens == 2
    assert comparison.largest_logit == 4.0
    assert comparison.max_abs == 1.5
    assert comparison.relative == 1.5 / 4.0
    assert comparison.cosine == pytest.approx(0.5 / math.sqrt(1.25))
    assert comparison.argmax_agreement == 0.5


def test_padding_is_left_out():
    first = torch.zeros(1, 2, 3)
    first[0, 0, 0] = 1.0
    second = first.clone()
    second[0, 1] = 100.0
    assert compare_logits(first, second, torch.tensor([[1, 0]])).max_abs == 0.0
    assert compare_logits(first, second, torch.tensor([[1, 1]])).max_abs == 100.0


def test_logits_that_are_not_numbers_are_never_within_a_tolerance():
    first = torch.ones(1, 1, 3)
    assert not compare_logits(first, first * math.nan, torch.ones(1, 1)).within(1e9)


@pytest.mark.parametrize("longest", [4096, 50])
def test_prompts_are_padded_the_same_every_time_and_never_too_long(longest: int):
    first, second = (build_prompts(300, longest=longest) for _ in range(2))
    assert torch.equal(first.tokens_bs, second.tokens_bs)
    lengths = first.attention_mask_bs.sum(1)
    assert lengths.tolist() == [min(tokens, longest) for tokens in (7, 23, 64, 128)]
    assert first.tokens_bs.min() >= 0
    assert first.tokens_bs.max() < 300
