"""Which models can compute what; steps; and batches, of which only tokens of documents count."""

import math
import statistics
from types import SimpleNamespace

import pytest
import torch
from throughput_subjects import POSITIONS, build_bert, subject_of
from unit.huggingface.tiny_neobert import build_model

from megatron_neobert.evaluation.throughput_steps import (
    FORWARD,
    TRAINING,
    build_batch,
    draw_lengths,
    has_memory_for,
    make_step,
    prepare,
    why_not,
)

CPU = torch.device("cpu")


def step_of(model, passes=FORWARD, length=POSITIONS):
    labels = passes == TRAINING
    inputs = build_batch([length, length], layout="padded", labels=labels, config=model.config, seed=0, device=CPU)
    prepare(subject_of(model), passes)
    return make_step(subject_of(model), inputs, passes)


def test_only_a_model_that_keeps_documents_apart_is_measured_packed():
    assert why_not(subject_of(build_model()), "packed") is None
    assert "cu_seqlens" in why_not(subject_of(build_bert()), "packed")
    assert why_not(subject_of(build_bert()), "padded") is None


def test_flash_attention_is_not_asked_to_compute_in_float32():
    model = build_bert()
    model.config._attn_implementation = "flash_attention_2"
    assert "bfloat16" in why_not(subject_of(model), "padded")


def test_a_training_step_has_gradients_and_a_forward_has_none():
    model = build_bert()
    step_of(model)()
    assert all(parameter.grad is None for parameter in model.parameters())
    step_of(model, TRAINING)()
    assert model.training
    assert model.bert.embeddings.word_embeddings.weight.grad.abs().sum() > 0


def _drop(tensor):
    del tensor


def test_running_out_of_memory_is_an_answer_and_any_other_error_is_raised():
    assert not has_memory_for(lambda: _drop(torch.empty(1 << 50, dtype=torch.uint8)), CPU)
    assert has_memory_for(lambda: _drop(torch.empty(1)), CPU)
    with pytest.raises(RuntimeError, match="must match"):
        has_memory_for(lambda: _drop(torch.empty(2) + torch.empty(3)), CPU)


CONFIG = SimpleNamespace(vocab_size=101, pad_token_id=0)
LENGTHS = [5, 2, 9]


def build(layout: str, config=CONFIG, lengths=LENGTHS, labels=True):
    return build_batch(lengths, layout=layout, labels=labels, config=config, seed=0, device="cpu")


def test_padded_and_packed_batches_have_the_same_loss_and_without_their_starts_documents_have_another():
    model = build_model()
    padded, packed = (build(layout, model.config) for layout in ("padded", "packed"))
    assert (padded["input_ids"].numel(), packed["input_ids"].numel()) == (3 * 9, 5 + 2 + 9)
    with torch.no_grad():
        expected, found = model(**padded).loss.item(), model(**packed).loss.item()
        joined = model(input_ids=packed["input_ids"], labels=packed["labels"]).loss.item()
    assert found == pytest.approx(expected, rel=1e-5)  # measured 1e-7
    assert joined != pytest.approx(expected, rel=1e-3)


def test_documents_contain_every_token_but_the_padding():
    batch = build("padded", SimpleNamespace(vocab_size=4, pad_token_id=1), [1000], labels=False)
    assert set(batch["input_ids"].flatten().tolist()) == {0, 2, 3}
    assert "labels" not in batch


def test_a_fifth_of_the_tokens_is_predicted_and_at_least_one():
    labels = build("packed", lengths=[100_000])["labels"]
    share = (labels != -100).float().mean().item()
    assert share == pytest.approx(0.2, abs=5 * math.sqrt(0.2 * 0.8 / 100_000))
    assert (build("packed", lengths=[1])["labels"] != -100).all()


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
