"""The benchmarks: counts match the files, tools that do other work are refused, and tables add up. Nothing is timed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import call, run
from json_files import read_json
from tests_tiny import made_up_texts
from unit.evaluation.embedding_inputs import make_encoder

from benchmarks import benchmark_loader, benchmark_preprocessing, benchmark_step
from benchmarks.benchmark_preprocessing import Measured
from benchmarks.published_scores import TASK
from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer
from megatron_neobert.errors import DataError


def measure(folder: Path, script: str, *flags: object) -> tuple[dict[str, Any], str]:
    """Run a benchmark, and return the figures that it writes and what it prints."""
    code, printed, errors = run(f"benchmarks/{script}.py", *flags, "--output", folder / "figures.json")
    assert code == 0, errors
    return read_json(folder / "figures.json"), printed


# --- preprocessing


# One document is empty, and one has the names of special tokens.
TEXTS = [*map(str.capitalize, made_up_texts(78)), "", "The [MASK] of [SEP] is [CLS], naïve."]


@pytest.fixture
def inputs(tiny_corpus, tmp_path) -> tuple[object, ...]:
    """Write two files of 40 documents, and return the flags that name them."""
    for number in range(2):
        pq.write_table(pa.table({"content": TEXTS[40 * number :][:40]}), tmp_path / f"{number}.parquet")
    return "--input", tmp_path / "*.parquet", "--tokenizer-model", tiny_corpus.tokenizer


def test_tools_that_wrote_the_same_ids_are_compared(inputs, tiny_corpus, tmp_path):
    flags = ("--tools", "ours-fast", "ours-plain", "--rounds", 1)
    figures, printed = measure(tmp_path, "benchmark_preprocessing", *inputs, *flags)
    expected = len(load_tokenizer(tiny_corpus.tokenizer).encode_batch(TEXTS).ids)
    assert figures["corpus"] == {"documents": 80, "text_bytes": sum(len(text.encode()) for text in TEXTS)}
    assert figures["tokens"] == expected
    assert [(row["tool"], row["workers"]) for row in figures["table"]] == [("ours-fast", 1), ("ours-plain", 1)]
    for row, ran in zip(figures["table"], figures["runs"], strict=True):
        assert row["MB/s"] == pytest.approx(figures["corpus"]["text_bytes"] / 1e6 / ran["wall_seconds"])
        assert row["x datatrove"] is None
        assert ran["cpu_seconds"] > 0
        assert ran["peak_bytes"] > 10**7  # an interpreter with two libraries
    assert len({ran["ids_sha256"] for ran in figures["runs"]}) == 1
    assert f"all wrote {expected:,} tokens; the same ids: ours-fast, ours-plain" in printed


def test_a_tool_that_writes_another_number_of_tokens_is_refused(inputs, tmp_path, monkeypatch):
    """Negative control of all comparisons."""
    run = Measured("", 1, wall_seconds=1.0, cpu_seconds=1.0, peak_bytes=0, documents=80, tokens=0, ids_sha256=None)
    monkeypatch.setattr(benchmark_preprocessing, "measure", lambda tool, *_: replace(run, tool=tool, tokens=len(tool)))
    flags = ("--tools", "ours-fast", "ours-plain", "--output", tmp_path / "figures.json")
    code, output, errors = call("benchmarks/benchmark_preprocessing.py", *inputs, *flags)
    assert code == DataError.exit_code
    assert "different numbers of tokens: ours-fast (1 worker) 9, ours-plain (1 worker) 10" in errors
    assert "MB/s" not in output and not (tmp_path / "figures.json").exists()


@pytest.mark.slow
def test_all_layouts_train_on_the_same_tokens_and_get_the_same_loss(tmp_path):
    """Two steps with packed sequences of 64 tokens, and two with 128."""
    layouts = ["packed", "padded", "reference"]
    model = ("--num-layers", 2, "--hidden-size", 32, "--num-attention-heads", 2, "--vocab-size", 200)
    batches = ("--micro-batch-tokens", 256, "--global-batch-tokens", 512, "--median-tokens", 30)
    figures, _ = measure(tmp_path, "benchmark_step", *model, *batches, "--seq-length", 64, 128, "--rounds", 2)
    assert [(row["row"], row["layout"]) for row in figures["table"]] == [
        (n, name) for n in (64, 128) for name in layouts
    ]
    steps = figures["steps"]
    assert [step["layout"] for step in steps] == layouts * 4  # two rounds at each of two lengths
    for packed, padded, reference in zip(steps[::3], steps[1::3], steps[2::3], strict=True):
        assert packed["tokens"] == padded["tokens"] == reference["tokens"]
        assert packed["capacity"] == 512 < padded["capacity"] == reference["capacity"]
        # Measured 1.3e-7 (fp32, losses about 5.7, November 2026); other documents give other losses.
        assert packed["loss"] == pytest.approx(reference["loss"], rel=1e-6)
        assert padded["loss"] == pytest.approx(reference["loss"], rel=1e-6)
    assert len({round(step["loss"], 4) for step in steps}) == 4


def test_the_table_has_medians_of_the_steps_and_the_loss_gap_compares_steps_of_the_same_round():
    layouts = (
        ("packed", 8, 2.0, (2.0, 4.0)),
        ("padded", 24, 6.0, (2.0, 4.4)),
        ("reference", 24, 12.0, (2.0, 4.0)),
    )
    rounds = [
        {
            layout: benchmark_step.Timing(8, layout, 6, capacity, 3e12, seconds, losses[number], peak_bytes=0)
            for layout, capacity, seconds, losses in layouts
        }
        for number in range(2)
    ]
    table = benchmark_step.summarise(rounds, peak_tflops=3)
    assert [row["TFLOP/s"] for row in table] == [1.5, 0.5, 0.25]
    assert [row["% MFU"] for row in table] == [50, pytest.approx(100 / 6), pytest.approx(25 / 3)]
    assert [row["packed is faster by"] for row in table] == [1, 3, 6]
    assert [row["% unused"] for row in table] == [25, 75, 75]
    assert benchmark_step.largest_loss_gap(rounds) == pytest.approx(0.1)


def test_a_packed_step_is_timed_without_other_layouts_and_profiled(tmp_path):
    model = ("--num-layers", 1, "--hidden-size", 32, "--num-attention-heads", 2, "--vocab-size", 200)
    batches = ("--micro-batch-tokens", 128, "--global-batch-tokens", 128, "--median-tokens", 30, "--seq-length", 64)
    flags = ("--layouts", "packed", "--rounds", 1, "--profile", "--recompute-granularity", "full")
    figures, _ = measure(tmp_path, "benchmark_step", *model, *batches, *flags)
    assert [(row["row"], row["layout"]) for row in figures["table"]] == [(64, "packed")]
    assert figures["machine"]["kernels"].startswith("kernels on the CPU in float32: local layers")
    assert figures["waits"] is None and figures["profile"][0]["ms"] >= figures["profile"][1]["ms"] > 0
    assert "--recompute-granularity" in figures["arguments"]["flags of a run"]


@pytest.mark.slow
def test_every_class_is_timed_forward_and_in_training_on_both_kinds_of_lengths(tmp_path):
    small = ("--num-layers", 1, "--hidden-size", 64, "--rounds", 1)
    figures, _ = measure(tmp_path, "benchmark_padding", *small)
    table = figures["table"]
    assert [row["lengths"] for row in table] == ["RefinedWeb"] * 5 + ["GLUE"] * 5
    assert [row["x training"] for row in table if row["class"] == "neobert, padded"] == [1, 1]
    assert all(row["forward, tokens/s"] > 0 and row["training, tokens/s"] > 0 for row in table)


@pytest.mark.slow
def test_every_loader_prepares_batches_of_the_requested_size(tmp_path):
    """300 documents with a mean of 640 tokens, in rows of 256."""
    small = ("--documents", 300, "--seq-length", 256, "--batch-size", 8, "--rounds", 2, "--seconds", 0.05)
    figures, _ = measure(tmp_path, "benchmark_loader", *small)
    ours, padded, full = benchmark_loader.OURS, "transformers, padded", "transformers, full rows"
    dali = ["this project, DALI, in process", "this project, DALI, 1 worker"]
    table = {row["loader"]: row for row in figures["table"]}
    assert list(table) == [ours, "this project, 1 worker", *dali, padded, full]
    assert all(0 < turn["real_tokens"] <= turn["capacity"] for turn in figures["turns"])
    assert table[full]["% unused"] == 0 < table[ours]["% unused"] < table[padded]["% unused"]


@pytest.mark.slow
def test_the_checkpoint_benchmark_prints_what_each_rank_writes_reads_and_hashes(tmp_path):
    options = ["--ranks", "1", "2", "--num-layers", "1", "--hidden-size", "64", "--rounds", "1"]
    code, output, complaints = run("benchmarks/benchmark_checkpoint.py", *options, "--folder", tmp_path)
    assert code == 0, complaints
    header, alone, of_two = [line.split(" | ") for line in output.splitlines() if " | " in line]
    for name in ("written MiB", "read MiB", "hashed MiB"):
        column = [cell.strip() for cell in header].index(name)
        # Each of two ranks has half of the state.
        assert float(of_two[column]) == pytest.approx(float(alone[column]) / 2, rel=0.1), name
    assert list(tmp_path.iterdir()) == []


# --- published scores


def test_another_model_than_the_published_one_does_not_repeat_its_score(tmp_path):
    model = make_encoder(tmp_path / "random_weights")
    categories = [f"category {number}" for number in range(9)]
    for split in ("train", "test"):
        rows = [f'"{word}, {category}",{category}\n' for category in categories for word in ("one", "two", "three")]
        (tmp_path / f"{split}.csv").write_text("text,category\n" + "".join(rows))
    other = tmp_path / "results" / "other_model" / "mteb.json"
    other.parent.mkdir(parents=True)
    other.write_text("{}")
    flags = ("--model", model, "--data", tmp_path, "--output", tmp_path / "results")
    code, output, errors = run("benchmarks/published_scores.py", *flags)
    assert code == 1, errors
    score = read_json(tmp_path / "results" / "random_weights" / "mteb.json")["results"]["tasks"][TASK]["score"]
    assert output.endswith(f"{TASK}: published 80.04, measured {score:.2f}\n")
