"""`neobert verify`: a checkpoint and its export are equal; changed models are not."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from commands import call
from safetensors.torch import load_file, save_file
from saved_model import WORDS, change_config

from checkpoint_conversion import compare
from checkpoint_conversion.compare import Comparison, build_prompts, compare_logits
from megatron_neobert.errors import ConversionError


@pytest.fixture
def model(exported, tmp_path):
    """An export of the saved model; tests may change it."""
    return shutil.copytree(exported()[0], tmp_path / "model")


def test_checkpoint_and_its_export_are_equal(saved, model):
    code, output, _ = call("verify", saved.save, model)
    assert code == 0
    assert "iter_0000030 (Megatron)" in output
    assert "model (EuroBertForMaskedLM)" in output
    assert "logits: equal within 0.0001" in output
    assert "settings: equal" in output
    assert "weights: all 16 tensors equal bit for bit\nequal" in output


def change_unused_row(folder: Path) -> None:
    """Change the embedding of a token that is not in the prompts."""
    used = set(build_prompts(len(WORDS), longest=64).tokens_bs.flatten().tolist())
    unused = next(token for token in range(len(WORDS)) if token not in used)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][unused] += 1.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


OTHER_BASE = {"rope_type": "default", "rope_theta": 5001.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: change_config(folder, rms_norm_eps=1.0001e-5), "norm_epsilon is 1e-05 and 1.0001e-05 in A and"),
        (lambda folder: change_config(folder, rope_parameters=OTHER_BASE), "rotary_base is 5000 and 5001 in A and B"),
        (change_unused_row, "1 of 16 tensors differ; largest in embedding.word_embeddings.weight, by 0."),
    ],
    ids=["epsilon", "rotary base", "unused row"],
)
def test_difference_that_logits_do_not_show_is_not_equal(saved, model, monkeypatch, change, message):
    monkeypatch.setattr(compare, "PROMPT_TOKENS", (3,))  # fewer tokens than the vocabulary, as at full size
    change(model)
    code, output, _ = call("verify", saved.save, model)
    assert code == 1
    assert "logits: equal within 0.0001" in output
    assert message in output


def test_changed_weight_is_not_equal_and_equal_within_a_larger_tolerance(saved, model, internal):
    internal["decoder.layers.1.self_attention.linear_qkv.weight"][:4] *= 1.1
    saved.write(internal)
    code, output, _ = call("verify", saved.save, model)
    assert code == 1 and "NOT equal within 0.0001" in output
    assert call("verify", saved.save, model, "--tolerance", "2")[0] == 0


def test_damaged_head_of_a_llama_folder_is_refused(exported):
    folder, _ = exported(layout="llama")
    damaged = shutil.copytree(folder, folder.with_name("damaged"))
    (damaged / "mlm_head" / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ConversionError, match=r"mlm_head/model\.safetensors: transformers cannot load it as a head"):
        compare.load_logit_model(damaged)


# --- the comparison ---


def test_comparison_covers_all_tokens_except_padding():
    first = torch.tensor([[[4.0, 0.0], [0.0, 2.0], [0.0, 0.0]]])
    second = torch.tensor([[[4.0, 0.0], [1.0, 0.5], [99.0, 0.0]]])
    comparison = compare_logits(first, second, torch.tensor([[1, 1, 0]]))
    cosine = pytest.approx(0.5 / math.sqrt(1.25))
    assert comparison == Comparison(
        2, largest_logit=4.0, max_abs=1.5, relative=1.5 / 4, cosine=cosine, argmax_agreement=0.5
    )
    assert compare_logits(first, second, torch.ones(1, 3)).max_abs == 99.0


def test_nan_is_never_within_a_tolerance():
    first = torch.ones(1, 1, 3)
    assert not compare_logits(first, first * math.nan, torch.ones(1, 1)).within(1e9)
