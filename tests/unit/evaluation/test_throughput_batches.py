"""Batches: the same documents in every layout, and only their tokens count."""

import math
import statistics
from types import SimpleNamespace

import pytest
import torch
from unit.huggingface.tiny_neobert import build_model

from megatron_neobert.evaluation.throughput.models import build_batch, draw_lengths

CONFIG = SimpleNamespace(vocab_size=101, pad_token_id=0)
LENGTHS = [5, 2, 9]


def build(layout: str, config=CONFIG, lengths=LENGTHS, labels=True):
    return build_batch(lengths, layout=layout, labels=labels, config=config, seed=0, device="cpu")


def test_padded_and_packed_batches_hold_the_same_documents_and_padding_is_not_counted():
    padded, packed = build("padded"), build("packed")
    assert (padded.tokens, padded.slots) == (16, 3 * 9)
    assert (packed.tokens, packed.slots) == (16, 16)
    real = padded.inputs["attention_mask"].bool()
    assert real.sum(1).tolist() == LENGTHS
    for name in ("input_ids", "labels"):
        assert padded.inputs[name][real].tolist() == packed.inputs[name][0].tolist()
    assert packed.inputs["cu_seqlens"].tolist() == [0, 5, 7, 16]
    assert packed.inputs["max_seqlen"] == 9
    assert (padded.inputs["labels"][~real] == -100).all()


def test_padded_and_packed_batches_have_the_same_loss_and_without_their_starts_documents_have_another():
    model = build_model()
    padded, packed = (build(layout, model.config).inputs for layout in ("padded", "packed"))
    with torch.no_grad():
        expected, found = model(**padded).loss.item(), model(**packed).loss.item()
        joined = model(input_ids=packed["input_ids"], labels=packed["labels"]).loss.item()
    assert found == pytest.approx(expected, rel=1e-5)  # measured 1e-7
    assert joined != pytest.approx(expected, rel=1e-3)


def test_documents_contain_every_token_but_the_padding():
    batch = build("padded", SimpleNamespace(vocab_size=4, pad_token_id=1), [1000], labels=False)
    assert set(batch.inputs["input_ids"].flatten().tolist()) == {0, 2, 3}
    assert "labels" not in batch.inputs


def test_a_fifth_of_the_tokens_is_predicted_and_at_least_one():
    labels = build("packed", lengths=[100_000]).inputs["labels"]
    share = (labels != -100).float().mean().item()
    assert share == pytest.approx(0.2, abs=5 * math.sqrt(0.2 * 0.8 / 100_000))
    assert (build("packed", lengths=[1]).inputs["labels"] != -100).all()


def test_web_lengths_are_log_normal_with_the_median_and_mean_of_refinedweb():
    lengths = draw_lengths(50_000, longest=1 << 30, distribution="web", seed=0)
    assert statistics.median(lengths) == pytest.approx(368, rel=0.02)
    assert statistics.fmean(lengths) == pytest.approx(640, rel=0.03)


def test_web_lengths_are_cut_and_a_larger_batch_begins_with_the_smaller_one():
    few, many = (draw_lengths(count, longest=300, distribution="web", seed=1) for count in (4, 64))
    assert many[:4] == few
    assert max(many) == 300 and min(many) < 300
    assert draw_lengths(64, longest=300, distribution="web", seed=2) != many
    assert draw_lengths(3, longest=300, distribution="full", seed=1) == [300, 300, 300]
