"""The sweep: turns, memory that ends, and going on after a kill. Nothing is timed."""

import ctypes
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from throughput_subjects import Module, subject_of, variant_of

from megatron_neobert.errors import ConfigError, DataError
from megatron_neobert.evaluation.throughput import models
from megatron_neobert.evaluation.throughput.run import Sweep, measure, open_log, summarise

CPU = torch.device("cpu")
SETTINGS = {"steps": 3, "lengths": [1, 2]}


def sweep_of(**changes):
    settings = {"lengths": (8,), "batch_sizes": (1,), "steps": 3, "warmup": 1, "distribution": "full", "seed": 0}
    return Sweep(**{**settings, "max_tokens": None, **changes})


def run(subjects, sweep, path):
    variants = {variant_of(subject): subject for subject in subjects}
    log = open_log(path, SETTINGS)
    return measure(variants, sweep, device=CPU, log=log, on_group=lambda rows: None)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "steps.jsonl"


def test_models_take_turns_and_none_always_comes_first(path):
    calls = []
    run([subject_of(Module(name, calls), name) for name in "ab"], sweep_of(), path)
    before = ["a", "a", "b", "b"]  # each once to see its kernels, once to warm up
    assert calls == [*before, "a", "b", "b", "a", "a", "b"]


def test_heap_is_trimmed_before_the_warm_up_and_never_before_a_timed_step(path, monkeypatch):
    calls, library = [], ctypes.CDLL(None)
    watched = SimpleNamespace(malloc_trim=lambda pad: calls.append("trim") or library.malloc_trim(pad))
    monkeypatch.setattr(models.ctypes, "CDLL", lambda name: watched)
    run([subject_of(Module("a", calls), "a")], sweep_of(warmup=2), path)
    assert calls == ["a", "trim", "a", "a", *["a"] * 3]  # kernels; memory and warm-up; timed


def test_a_model_out_of_memory_takes_no_part_in_larger_batches_and_the_others_go_on(path):
    calls = []
    subjects = [subject_of(Module("small", calls, most_rows=2), "small"), subject_of(Module("large", calls), "large")]
    rows = run(subjects, sweep_of(batch_sizes=(4, 1, 2, 8), lengths=(8, 16)), path)
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


def test_an_ended_run_goes_on_and_measures_nothing_twice(path):
    calls = []
    subjects = [subject_of(Module("a", calls, most_rows=2), "a")]
    whole = run(subjects, sweep_of(batch_sizes=(1, 2, 4, 8)), path)
    lines = path.read_text().splitlines(keepends=True)
    assert len(lines) == 5  # the settings, and batches of 1, 2, 4 (out of memory) and 8 (nobody)
    path.write_text("".join(lines[:3]) + lines[3][:20])  # killed while the third group was written
    calls.clear()
    again = run(subjects, sweep_of(batch_sizes=(1, 2, 4, 8)), path)
    assert again[:2] == whole[:2] and len(again) == len(whole)
    assert calls == ["a"]  # of the batch of 4, the first call of which found no memory
    calls.clear()
    assert run(subjects, sweep_of(batch_sizes=(1, 2, 4, 8)), path) == again
    assert calls == []


def test_measurements_under_other_settings_are_refused_with_both_values(path):
    open_log(path, SETTINGS)
    with pytest.raises(ConfigError, match=r"settings \(steps was 3 and is now 4\)"):
        open_log(path, {**SETTINGS, "steps": 4})
    open_log(path, {**SETTINGS, "lengths": (1, 2)})  # a tuple is what a list was


def test_a_log_that_is_none_is_refused(path):
    path.write_text("[1]\n")
    with pytest.raises(DataError, match=r"steps\.jsonl"):
        open_log(path, SETTINGS)


def test_batches_over_the_limit_of_tokens_are_left_out():
    sweep = sweep_of(lengths=(8, 16), batch_sizes=(4, 1, 2), max_tokens=32)
    assert list(sweep.groups()) == [(8, 1), (8, 2), (8, 4), (16, 1), (16, 2)]


def test_speed_is_tokens_of_documents_by_seconds_and_its_quartiles_are_numpys(path):
    sweep = sweep_of(batch_sizes=(5,), lengths=(1000,), distribution="web", steps=6)
    (row,) = run([subject_of(Module("a", []), "a")], sweep, path)
    assert row["tokens"] < row["slots"] and row["slots"] % 5 == 0
    summary = summarise(row)
    speeds = [row["tokens"] / seconds for seconds in row["seconds"]]
    expected = np.percentile(speeds, [25, 50, 75])
    names = ("lower_quartile", "tokens_per_second", "upper_quartile")
    assert [summary[name] for name in names] == pytest.approx(list(expected))
    assert summary["steps"] == 6 and "seconds" not in summary
    json.dumps(summary)
