"""The benchmark of loading: what it counts, and the arithmetic of its table. Nothing here depends on the time."""

import importlib.util
import json
from statistics import median

import pytest
from commands import import_tool, run, run_forked

HAS_DALI = importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.dali") is not None
OURS = "this project, in process"
PADDED = "transformers, padded lists"


@pytest.fixture
def tool():
    return import_tool("benchmark_loader")


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    """Of one short run over 300 documents, mean 640 tokens, in rows of 256."""
    output = tmp_path_factory.mktemp("benchmark_loader") / "figures.json"
    small = ("--documents", 300, "--seq-length", 256, "--batch-size", 8, "--rounds", 2, "--seconds", 0.05)
    code, printed, said = run("benchmark_loader", *small, "--output", output)
    assert code == 0, said
    return {"printed": printed, **json.loads(output.read_text())}


def rows_of(figures, name):
    return next(row for row in figures["table"] if row["loader"] == name)


@pytest.mark.slow
def test_every_loader_has_a_row_whose_figures_follow_from_its_runs(figures):
    names = [OURS, "this project, 1 worker"]
    names += ["this project, DALI, in process", "this project, DALI, 1 worker"] if HAS_DALI else []
    names += [PADDED, "transformers, padded tensors", "transformers, full rows", "megatron.core BERT"]
    assert [row["loader"] for row in figures["table"]] == names
    runs = {name: [run for run in figures["runs"] if run["loader"] == name] for name in names}
    for row in figures["table"]:
        own, ours = runs[row["loader"]], runs[OURS]
        assert row["rows/cpu-s"] == pytest.approx(median(run["rows"] / run["cpu_seconds"] for run in own))
        speeds = [[run["real_tokens"] / run["cpu_seconds"] for run in group] for group in (ours, own)]
        assert row["real tokens/cpu-s"] == pytest.approx(median(speeds[1]))
        assert row["x tokens"] == pytest.approx(median(one / other for one, other in zip(*speeds, strict=True)))
        used = sum(run["real_tokens"] for run in own) / sum(run["slots"] for run in own)
        assert row["% unused"] == pytest.approx(100 * (1 - used), abs=1e-9)
        assert row["loader"] in figures["printed"]


@pytest.mark.slow
def test_batches_are_those_that_were_asked_for(figures):
    for run_ in figures["runs"]:
        assert run_["rows"] % 8 == 0 and run_["rows"] > 0
        assert run_["real_tokens"] <= run_["slots"] <= run_["rows"] * 256
    assert rows_of(figures, "transformers, full rows")["% unused"] == 0
    assert 0 < rows_of(figures, OURS)["% unused"] < rows_of(figures, PADDED)["% unused"]


def test_ratios_are_taken_within_a_round_and_the_median_counts(tool):
    """Rounds 1 to 3 at speeds 10, 20, 40 against 1, 4, 2 rows a second: 10, 5 and 20 times as fast."""
    seconds = {OURS: (1 / 10, 1 / 20, 1 / 40), "other": (1, 1 / 4, 1 / 2)}
    runs = [
        tool.Run(name, rows=1, slots=100, real_tokens=99 if name == OURS else 33, cpu_seconds=of[turn], wall_seconds=9)
        for turn in range(3)
        for name, of in seconds.items()
    ]
    ours, other = tool.summarise(runs)
    assert (ours["x rows"], ours["x tokens"]) == (1, 1)
    assert other["x rows"] == pytest.approx(10)
    assert other["x tokens"] == pytest.approx(10 * 99 / 33)
    assert (other["rows/cpu-s"], other["real tokens/cpu-s"]) == (2, 66)
    assert (ours["% unused"], other["% unused"]) == (pytest.approx(1), pytest.approx(67))


def test_a_corpus_without_its_tokenizer_is_refused():
    ended = run_forked("benchmark_loader", "--data-path", "corpus")
    assert ended.refused(2) and "--data-path and --tokenizer-model belong together" in ended.output
