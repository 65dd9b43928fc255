"""Losses of single masked tokens equal one plain forward pass per token; models that cannot be scored are refused."""

import json
import math

import numpy as np
import pytest
import torch
from unit.evaluation.pseudo_perplexity_models import ARCHITECTURES, LONGEST, plain_losses, write_model

from megatron_neobert.errors import ConfigError, ConversionError, DivergenceError
from megatron_neobert.evaluation.masked_scorer import MaskedDocument, Scorer

TEXTS = ["the cat sat on a mat .", "cat", "a mat sat on the cat on the mat . the cat ."]
NEAR = 1e-4  # nats; measured: up to 4e-6


@pytest.fixture
def scorer(tmp_path):
    return Scorer(write_model(tmp_path / "model", "Bert"))


def mask_each_token(scorer, text):
    ids_s = torch.tensor(scorer.tokenizer(text)["input_ids"], dtype=torch.int32)
    return [MaskedDocument(ids_s, position) for position in range(1, len(ids_s) - 1)]


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_losses_of_a_padded_batch_equal_a_plain_forward_pass_per_token(kind, tmp_path):
    folder = write_model(tmp_path / kind, kind)
    scorer = Scorer(folder)
    losses = scorer.score([masked for text in TEXTS for masked in mask_each_token(scorer, text)])
    assert losses == pytest.approx([loss for text in TEXTS for loss in plain_losses(folder, text)], abs=NEAR)


def test_losses_without_the_mask_or_with_the_special_tokens_differ(scorer):
    """Control: the comparison above would detect either mistake."""
    right = plain_losses(scorer.folder, TEXTS[0])
    unmasked = plain_losses(scorer.folder, TEXTS[0], with_mask=False)
    assert np.abs(np.subtract(right, unmasked)).min() > 100 * NEAR
    specials = plain_losses(scorer.folder, TEXTS[0], with_specials=True)
    assert abs(np.mean(specials) - np.mean(right)) > 100 * NEAR


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
def test_longest_input_of_learned_positions_is_scored_and_a_longer_one_is_refused(kind, tmp_path):
    folder = write_model(tmp_path / "model", kind)
    with pytest.raises(ConfigError, match=f"--max-length {LONGEST + 1}: .* has {LONGEST} learned positions"):
        Scorer(folder, max_length=LONGEST + 1)
    scorer = Scorer(folder)
    assert scorer.max_length == LONGEST
    longest = torch.full((LONGEST,), 5, dtype=torch.int32)
    assert math.isfinite(scorer.score([MaskedDocument(longest, LONGEST - 1)])[0])


def test_tokenizer_without_a_mask_token_is_refused(tmp_path):
    folder = write_model(tmp_path / "model", "EuroBert")  # a BERT's tokenizer has one by default
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        content = json.loads((folder / name).read_text())
        del content["mask_token"]
        (folder / name).write_text(json.dumps(content))
    with pytest.raises(ConversionError, match="its tokenizer has no mask token"):
        Scorer(folder)


def test_loss_that_is_not_finite_is_refused(scorer):
    with torch.no_grad():
        scorer.model.get_output_embeddings().bias.fill_(float("nan"))
    with pytest.raises(DivergenceError, match="gives nan instead of a loss in float32"):
        scorer.score(mask_each_token(scorer, "cat"))


def test_batch_that_does_not_fit_into_memory_names_its_size_and_the_flag(scorer):
    def run_out_of_memory(module, inputs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    scorer.model.register_forward_pre_hook(run_out_of_memory)
    with pytest.raises(ConfigError, match=r"7 documents of up to 9 tokens .* --batch-tokens below 63\."):
        scorer.score(mask_each_token(scorer, TEXTS[0]))
