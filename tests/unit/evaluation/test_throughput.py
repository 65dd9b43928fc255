"""Speeds are tokens per second, full memory ends a length, and a second start resumes. Nothing is timed."""

import json

import torch
from unit.evaluation.pseudo_perplexity_models import write_model
from unit.huggingface.tiny_neobert import build_model

from megatron_neobert.evaluation import throughput
from megatron_neobert.evaluation.ledger import LEDGER
from megatron_neobert.evaluation.options import ThroughputOptions
from megatron_neobert.evaluation.report import fastest, speed_cell
from megatron_neobert.evaluation.throughput import measure_batch, run_throughput


def options_of(folder, output, **changes):
    defaults = {"lengths": (8,), "batch_sizes": (4, 1, 2, 8), "steps": 3, "warmup": 1, "device": "cpu"}
    return ThroughputOptions(model=(folder,), output=output, **{**defaults, **changes})


def test_larger_batches_are_skipped_when_memory_is_full_and_tried_again_by_the_next_start(tmp_path, monkeypatch):
    run_steps, tried, most_documents = throughput._run_steps, [], 2

    def run_out_of_memory(model, options, *, length, batch_size):
        tried.append((batch_size, length))
        if batch_size > most_documents:
            torch.empty(1 << 50, dtype=torch.uint8)
        return run_steps(model, options, length=length, batch_size=batch_size)

    monkeypatch.setattr(throughput, "_run_steps", run_out_of_memory)
    folder = write_model(tmp_path / "bert", "Bert")
    options = options_of(folder, tmp_path, lengths=(8, 16))
    run_throughput(options)
    assert tried == [(size, length) for length in (8, 16) for size in (1, 2, 4)]
    rows = json.loads((tmp_path / "bert" / "throughput.json").read_text())["results"]["rows"]
    assert [row["measured"] is None for row in rows] == [False, False, True] * 2
    assert "out of memory" not in (tmp_path / "bert" / "throughput" / LEDGER).read_text()
    tried.clear()
    run_throughput(options)
    assert tried == [(4, 8), (4, 16)]
    most_documents = 8
    run_throughput(options)
    tried.clear()
    run_throughput(options)
    assert tried == [], "finished units are not measured again"
    run_throughput(options_of(folder, tmp_path, batch_sizes=(1,), steps=4))
    assert tried == [(1, 8)], "other settings are another unit"


def test_speed_is_tokens_per_second(tmp_path, monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: next(clock))  # every step takes a second
    measured = measure_batch(build_model(), options_of(tmp_path, tmp_path), length=100, batch_size=5)
    assert measured == {"tokens_per_second": [500] * 3, "peak_bytes": None}


def test_cell_of_a_length_has_its_fastest_batch_size_or_the_smallest_that_did_not_fit():
    speeds = {(512, 1): 100.0, (512, 2): 150.0, (512, 4): 120.0, (512, 8): None, (1024, 1): None, (1024, 2): None}
    rows = [
        {
            "length": length,
            "batch_size": size,
            "measured": speed and {"tokens_per_second": [speed - 10, speed, speed + 10], "peak_bytes": 1 << 29},
        }
        for (length, size), speed in speeds.items()
    ]
    cells = {length: speed_cell(row) for length, row in fastest(rows).items()}
    assert cells == {512: "150 (140 to 160), batch 2, 512.0 MiB", 1024: "out of memory (batch 1)"}
