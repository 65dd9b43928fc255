"""Speeds: tokens by seconds, memory that ends, and resuming. Nothing is timed."""

import json

import pytest
import torch
from unit.evaluation.pseudo_perplexity_models import write_model
from unit.huggingface.tiny_neobert import build_model

from megatron_neobert.evaluation import throughput
from megatron_neobert.evaluation.ledger import LEDGER
from megatron_neobert.evaluation.options import ThroughputOptions
from megatron_neobert.evaluation.report import fastest, speed_cell
from megatron_neobert.evaluation.throughput import evaluate, measure

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "bert", "Bert")


def options_of(folder, output, **changes):
    given = {"lengths": (8,), "batch_sizes": (4, 1, 2, 8), "steps": 3, "warmup": 1, "device": "cpu", **changes}
    return ThroughputOptions(model=(folder,), output=output, **given)


def test_memory_that_ends_leaves_out_larger_batches_and_is_tried_again_by_the_next_start(folder, tmp_path, monkeypatch):
    run_steps, tried, most_rows = throughput._run_steps, [], 2

    def run_out(model, options, *, length, batch_size, device):
        tried.append((batch_size, length))
        if batch_size > most_rows:
            torch.empty(1 << 50, dtype=torch.uint8)
        return run_steps(model, options, length=length, batch_size=batch_size, device=device)

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
        measure(model, options, length=8, batch_size=2, device=CPU)


def test_speeds_are_tokens_by_seconds(folder, tmp_path, monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: next(clock))  # every step takes a second
    found = measure(build_model(), options_of(folder, tmp_path), length=100, batch_size=5, device=CPU)
    assert found == {"tokens_per_second": [500] * 3, "peak_bytes": None}


def test_fastest_batch_size_stands_for_a_length_and_its_cell_says_where_memory_ended():
    speeds = {(512, 1): 100.0, (512, 2): 150.0, (512, 4): 120.0, (512, 8): None, (1024, 1): None}
    rows = [
        {
            "length": length,
            "batch_size": size,
            "measured": speed and {"tokens_per_second": [speed - 10, speed, speed + 10], "peak_bytes": 1 << 29},
        }
        for (length, size), speed in speeds.items()
    ]
    cells = {length: speed_cell(row["batch_size"], row["measured"]) for length, row in fastest(rows).items()}
    assert cells == {512: "150 (140 to 160), batch 2, 512.0 MiB", 1024: "out of memory (batch 1)"}
