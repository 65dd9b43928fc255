"""Losses of single masked tokens, against one plain forward for each; and the models that are refused."""

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


def rows_of(scorer, text):
    ids_s = np.array(scorer.tokenizer(text)["input_ids"], dtype=np.int32)
    return [Row(ids_s, position) for position in range(1, len(ids_s) - 1)]


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_losses_equal_a_plain_forward_per_token(kind, tmp_path):
    folder = write_model(tmp_path / kind, kind)
    scorer = Scorer(folder)
    rows = [row for text in TEXTS for row in rows_of(scorer, text)]
    losses = scorer.score(rows)
    assert losses == pytest.approx([loss for text in TEXTS for loss in plain_losses(folder, text)], abs=NEAR)


def test_losses_without_the_mask_or_with_the_special_tokens_are_others(tmp_path):
    """The comparison above would see either mistake."""
    folder = write_model(tmp_path / "model", "Bert")
    right = plain_losses(folder, TEXTS[0])
    unmasked = plain_losses(folder, TEXTS[0], with_mask=False)
    assert np.abs(np.subtract(right, unmasked)).min() > 100 * NEAR
    specials = plain_losses(folder, TEXTS[0], with_specials=True)
    assert abs(np.mean(specials) - np.mean(right)) > 100 * NEAR


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
def test_rows_beyond_the_learned_positions_are_refused_and_the_longest_one_is_scored(kind, tmp_path):
    scorer = Scorer(write_model(tmp_path / "model", kind))
    assert scorer.max_length == LONGEST
    with pytest.raises(ConfigError, match=f"--max-length {LONGEST + 1}: .* has {LONGEST} learned positions"):
        scorer.check_length(LONGEST + 1)
    longest = np.full(LONGEST, 5, dtype=np.int32)
    assert math.isfinite(scorer.score([Row(longest, LONGEST - 1)])[0])


def test_tokenizer_without_a_mask_token_is_refused(tmp_path):
    folder = write_model(tmp_path / "model", "EuroBert")  # a BERT's tokenizer has one by default
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        content = json.loads((folder / name).read_text())
        del content["mask_token"]
        (folder / name).write_text(json.dumps(content))
    with pytest.raises(ConversionError, match="its tokenizer has no mask token"):
        Scorer(folder)


def test_loss_that_is_no_number_is_refused(tmp_path):
    scorer = Scorer(write_model(tmp_path / "model", "Bert"))
    with torch.no_grad():
        scorer.model.get_output_embeddings().bias.fill_(float("nan"))
    with pytest.raises(DivergenceError, match="gives nan instead of a loss in float32"):
        scorer.score(rows_of(scorer, "cat"))


def test_batch_that_does_not_fit_into_memory_names_its_size_and_the_flag(tmp_path):
    scorer = Scorer(write_model(tmp_path / "model", "Bert"))

    def run_out(module, inputs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    scorer.model.register_forward_pre_hook(run_out)
    with pytest.raises(ConfigError, match=r"7 rows of up to 9 tokens .* --batch-tokens below 63\."):
        scorer.score(rows_of(scorer, TEXTS[0]))
