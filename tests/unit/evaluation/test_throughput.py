"""The sweep: turns, memory that ends, and going on after a kill. Nothing is timed."""

import json

import numpy as np
import pytest
import torch
from throughput_subjects import Module, subject_of, variant_of

from megatron_neobert.evaluation.ledger import LEDGER, open_ledger
from megatron_neobert.evaluation.options import ThroughputOptions
from megatron_neobert.evaluation.throughput import measure, summarise

CPU = torch.device("cpu")


def run(subjects, folder, *, lengths=(8,), batch_sizes=(1,), **changes):
    variants = {variant_of(subject): subject for subject in subjects}
    given = {"steps": 3, "warmup": 1, "lengths_distribution": "full", **changes}
    options = ThroughputOptions(model=(), output=folder, **given)
    groups = [(length, size) for length in lengths for size in sorted(batch_sizes)]
    with open_ledger(folder) as ledger:
        return measure(variants, options, groups, unit=given, device=CPU, ledger=ledger)


def test_models_take_turns_and_none_always_comes_first(tmp_path):
    calls = []
    run([subject_of(Module(name, calls), name) for name in "ab"], tmp_path)
    before = ["a", "b"]  # to warm up
    assert calls == [*before, "a", "b", "b", "a", "a", "b"]


def test_a_model_out_of_memory_takes_no_part_in_larger_batches_and_the_others_go_on(tmp_path):
    calls = []
    subjects = [subject_of(Module("small", calls, most_rows=2), "small"), subject_of(Module("large", calls), "large")]
    rows = run(subjects, tmp_path, batch_sizes=(4, 1, 2, 8), lengths=(8, 16))
    outcomes = {(row["model"], row["length"], row["batch_size"]): row["outcome"] for row in rows}
    for length in (8, 16):  # which begins anew
        assert [outcomes.get(("small", length, size)) for size in (1, 2, 4, 8)] == [
            "measured",
            "measured",
            "out of memory",
            None,
        ]
        assert [outcomes.get(("large", length, size)) for size in (1, 2, 4, 8)] == ["measured"] * 4
    failed = next(row for row in rows if row["outcome"] == "out of memory")
    assert failed["seconds"] == [] and failed["peak_bytes"] is None


def test_an_ended_run_resumes_and_measures_nothing_twice(tmp_path):
    calls = []
    subjects = [subject_of(Module("a", calls, most_rows=2), "a")]
    whole = run(subjects, tmp_path, batch_sizes=(1, 2, 4, 8))
    path = tmp_path / LEDGER
    lines = path.read_text().splitlines(keepends=True)
    assert len(lines) == 4  # batches of 1, 2, 4 (out of memory) and 8 (no model is left)
    path.write_text("".join(lines[:2]) + lines[2][:20])  # killed while the third group was written
    calls.clear()
    again = run(subjects, tmp_path, batch_sizes=(1, 2, 4, 8))
    assert again[:2] == whole[:2] and len(again) == len(whole)
    assert calls == ["a"]  # of the batch of 4, the first call of which found no memory
    calls.clear()
    assert run(subjects, tmp_path, batch_sizes=(1, 2, 4, 8)) == again
    assert calls == []
    assert len(run(subjects, tmp_path, batch_sizes=(1,), steps=4)[0]["seconds"]) == 4  # other settings, another unit


def test_speed_is_tokens_of_documents_by_seconds_and_its_quartiles_are_numpys(tmp_path):
    subject = subject_of(Module("a", []), "a")
    (row,) = run([subject], tmp_path, batch_sizes=(5,), lengths=(1000,), lengths_distribution="web", steps=6)
    assert row["tokens"] < row["slots"] and row["slots"] % 5 == 0
    summary = summarise(row)
    speeds = [row["tokens"] / seconds for seconds in row["seconds"]]
    expected = np.percentile(speeds, [25, 50, 75])
    names = ("lower_quartile", "tokens_per_second", "upper_quartile")
    assert [summary[name] for name in names] == pytest.approx(list(expected))
    assert summary["steps"] == 6 and "seconds" not in summary
    json.dumps(summary)
