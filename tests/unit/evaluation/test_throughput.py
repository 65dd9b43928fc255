"""Speeds: batches, of which only tokens of documents count, memory that ends, and resuming. Nothing is timed."""

import json
import statistics
from types import SimpleNamespace

import pytest
import torch
from unit.evaluation.pseudo_perplexity_models import LONGEST, write_model
from unit.huggingface.tiny_neobert import build_model

from megatron_neobert.evaluation import throughput
from megatron_neobert.evaluation.ledger import LEDGER
from megatron_neobert.evaluation.options import ThroughputOptions
from megatron_neobert.evaluation.throughput import build_batch, draw_lengths, evaluate, find_gaps, measure

CPU = torch.device("cpu")
CONFIG = SimpleNamespace(vocab_size=101, pad_token_id=0)
LENGTHS = [5, 2, 9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "bert", "Bert")


def options_of(folder, output, **changes):
    given = {"lengths": (8,), "batch_sizes": (4, 1, 2, 8), "steps": 3, "warmup": 1, "device": "cpu", **changes}
    return ThroughputOptions(model=(folder,), output=output, **given)


def test_memory_that_ends_leaves_out_larger_batches_and_is_tried_again_by_the_next_start(folder, tmp_path, monkeypatch):
    run_steps, tried, most_rows = throughput._run_steps, [], 2

    def run_out(model, inputs, *args, **kwargs):
        tried.append(inputs["input_ids"].shape)
        if len(inputs["input_ids"]) > most_rows:
            torch.empty(1 << 50, dtype=torch.uint8)
        return run_steps(model, inputs, *args, **kwargs)

    monkeypatch.setattr(throughput, "_run_steps", run_out)
    options = options_of(folder, tmp_path, lengths=(8, 16))
    evaluate(options)
    assert tried == [(size, length) for length in (8, 16) for size in (1, 2, 4)]
    rows = json.loads((tmp_path / "bert" / "throughput.json").read_text())["results"]["rows"]
    assert [row["measured"] is None for row in rows] == [False, False, True] * 2
    assert "out of memory" not in (tmp_path / "bert" / "throughput" / LEDGER).read_text()
    tried.clear()
    evaluate(options)
    assert tried == [(4, 8), (4, 16)]
    most_rows = 8
    evaluate(options)
    tried.clear()
    evaluate(options)
    assert tried == [], "what is measured is not measured again"
    evaluate(options_of(folder, tmp_path, batch_sizes=(1,), steps=4))
    assert tried == [(1, 8)], "other settings are another unit"


def test_other_errors_than_those_of_memory_are_raised(folder):
    model, options = build_model(), options_of(folder, folder)
    model.config.vocab_size = 10_000  # ids beyond the embedding
    with pytest.raises((IndexError, RuntimeError)):
        measure(model, options, "padded", "forward", length=8, batch_size=2, device=CPU)


def test_speeds_are_tokens_of_documents_by_seconds(folder, tmp_path, monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: next(clock))  # every step takes a second
    model = build_model()
    options = options_of(folder, tmp_path, lengths_distribution="web")
    found = measure(model, options, "padded", "forward+backward", length=1000, batch_size=5, device=CPU)
    tokens = sum(draw_lengths(5, longest=1000, distribution="web", seed=0))
    assert tokens < 5000 and found == {"tokens": tokens, "tokens_per_second": [tokens] * 3, "peak_bytes": None}
    assert model.training
    measure(model, options, "padded", "forward", length=8, batch_size=1, device=CPU)
    assert not model.training


def test_what_a_model_cannot_compute_is_named(folder):
    bert = throughput.load_model(folder, "AutoModel")
    asked = {"attention": "sdpa", "dtype": "float32"}
    gaps = find_gaps(bert, ["padded", "packed"], [LONGEST, LONGEST + 1], **asked)
    assert set(gaps) == {"packed", f"{LONGEST + 1}"} and "cu_seqlens" in gaps["packed"]
    assert find_gaps(build_model(), ["packed"], [1 << 20], **asked) == {}
    assert "bfloat16" in find_gaps(bert, ["padded"], [8], attention="flash_attention_2", dtype="float32")["padded"]


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


def test_web_lengths_are_log_normal_with_the_median_and_mean_of_refinedweb_and_truncated():
    lengths = draw_lengths(50_000, longest=1 << 30, distribution="web", seed=0)
    assert statistics.median(lengths) == pytest.approx(368, rel=0.02)
    assert statistics.fmean(lengths) == pytest.approx(640, rel=0.03)
    few, many = (draw_lengths(count, longest=300, distribution="web", seed=1) for count in (4, 64))
    assert many[:4] == few, "a larger batch begins with the smaller one"
    assert max(many) == 300 and min(many) < 300
