"""The verify command: a checkpoint and its export are equal, and two models are not."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from commands import call
from safetensors.torch import load_file, save_file
from saved_model import WORDS, change_config

from checkpoint_conversion import compare
from checkpoint_conversion.compare import build_prompts, compare_logits


@pytest.fixture
def model(exported, tmp_path):
    """The export of what `saved` holds, free to be spoilt."""
    return shutil.copytree(exported()[0], tmp_path / "model")


def test_checkpoint_and_its_export_are_equal(saved, model):
    code, shown, _ = call("verify", saved.save, model)
    assert code == 0
    assert "iter_0000030 (Megatron)" in shown
    assert "model (EuroBertForMaskedLM)" in shown
    assert "logits: equal within 0.0001" in shown
    assert "settings: equal" in shown
    assert "weights: all 16 tensors equal bit for bit\nequal" in shown


def change_unread_row(folder: Path) -> None:
    read = set(build_prompts(len(WORDS), longest=64).tokens_bs.flatten().tolist())
    unread = next(number for number in range(len(WORDS)) if number not in read)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][unread] += 1.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


OTHER_BASE = {"rope_type": "default", "rope_theta": 5001.0}


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda folder: change_config(folder, rms_norm_eps=1.0001e-5), "norm_epsilon is 1e-05 and 1.0001e-05 in A and"),
        (lambda folder: change_config(folder, rope_parameters=OTHER_BASE), "rotary_base is 5000 and 5001 in A and B"),
        (change_unread_row, "1 of 16 tensors differ; most of all embedding.word_embeddings.weight, by 0."),
    ],
    ids=["epsilon", "rotary base", "unread row"],
)
def test_what_the_logits_of_the_prompts_do_not_show_is_not_equal(saved, model, monkeypatch, change, found):
    monkeypatch.setattr(compare, "PROMPT_TOKENS", (3,))  # fewer than the vocabulary has, as at full size
    change(model)
    code, shown, _ = call("verify", saved.save, model)
    assert code == 1
    assert "logits: equal within 0.0001" in shown
    assert found in shown


def test_changed_weight_is_not_equal(saved, model, internal):
    internal["decoder.layers.1.self_attention.linear_qkv.weight"][:4] *= 1.1
    saved.write(internal)
    code, shown, _ = call("verify", saved.save, model)
    assert code == 1 and "NOT equal within 0.0001" in shown
    assert call("verify", saved.save, model, "--tolerance", "2")[0] == 0


def test_folder_without_a_model_is_a_missing_input(model, tmp_path):
    (tmp_path / "empty").mkdir()
    code, _, complaint = call("verify", model, tmp_path / "empty")
    assert code == 66 and "empty" in complaint


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
