"""A whole evaluation: what is run, what is kept, what is run again, and what is refused before anything is."""

import dataclasses
import json
import shutil

import pytest
from unit.evaluation.glue_inputs import build_options, write_inputs

from megatron_neobert.errors import ConfigError, MissingInputError
from megatron_neobert.evaluation import glue
from megatron_neobert.evaluation.glue import evaluate
from megatron_neobert.evaluation.ledger import LEDGER, Ledger, read_record
from megatron_neobert.evaluation.models import fingerprint
from megatron_neobert.evaluation.sweep import best_weights, last_sweep

pytestmark = pytest.mark.filterwarnings("ignore:.*rows, the benchmark:UserWarning")
GRID = {"learning_rate": (3e-3, 1e-12)}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("glue"))


class Recorder:
    """Progress, and on request an interruption after some runs."""

    def __init__(self, runs: int | None = None) -> None:
        self.left, self.runs = runs, []

    def __call__(self, task, done, total, run, outcome) -> None:
        if run is not None:
            self.runs.append((task, run.point))
            if len(self.runs) == self.left:
                raise KeyboardInterrupt


def run(options, runs: int | None = None) -> list:
    """Task and point of everything that is run before the end, or the interruption after some runs."""
    recorder = Recorder(runs)
    if runs is None:
        evaluate(options, recorder)
    else:
        with pytest.raises(KeyboardInterrupt):
            evaluate(options, recorder)
    return recorder.runs


def folder_of(options):
    return options.output / "model"


def record_of(options):
    return read_record(folder_of(options) / "glue.json")


def scores_of(options):
    tasks = record_of(options)["results"]["tasks"]
    return {task: result | {"seconds": 0.0, "kept": None} for task, result in tasks.items()}


def weights_of(options, task):
    ledger = Ledger(folder_of(options) / "glue" / task)
    return best_weights(ledger, last_sweep(ledger, fingerprint(options.model)))


def test_interrupted_evaluation_resumes_and_ends_with_the_same_results_and_weights(place):
    whole = build_options(place, "rte", output="whole", seeds=(0, 1), **GRID)
    assert len(run(whole)) == 4
    broken = dataclasses.replace(whole, output=place / "broken")
    first = run(broken, 2)
    second = run(broken)
    assert len(first) == len(second) == 2 and not set(first) & set(second)
    assert scores_of(broken) == scores_of(whole)
    contents = [(weights_of(options, "rte") / "model.safetensors").read_bytes() for options in (whole, broken)]
    assert contents[0] == contents[1]
    assert run(broken) == []
    runs = folder_of(broken) / "glue" / "rte" / "runs"
    assert [path.name for path in runs.iterdir()] == [weights_of(broken, "rte").parent.name], "no loser's weights"


def test_evaluation_is_extended_by_seeds_and_keeps_the_best_weights(place):
    options = build_options(place, "rte", output="seeds")
    run(options)
    assert [point.seed for _, point in run(dataclasses.replace(options, seeds=(0, 5)))] == [5]
    assert scores_of(options)["rte"]["seeds"] == [0, 5]
    averages = {
        line["unit"]["point"]["seed"]: line["result"]["average"]
        for line in Ledger(folder_of(options) / "glue" / "rte").lines.values()
        if "point" in line["unit"]
    }
    ledger = Ledger(folder_of(options) / "glue" / "rte")
    kept = ledger.lines[weights_of(options, "rte").parent.name]
    assert kept["result"]["average"] == max(averages.values())


def test_other_settings_are_measured_beside_the_earlier_ones_whose_weights_and_origin_stay(place):
    options = build_options(place, "sst2", output="settings")
    other = dataclasses.replace(options, epochs=2)
    assert len(run(options)) == 1
    path = folder_of(options) / "glue" / "sst2" / LEDGER
    before = json.loads(path.read_text().splitlines()[-1])["origin"]["machine"]
    path.write_text(path.read_text().replace(before, "another machine"))
    first, weights = scores_of(options), weights_of(options, "sst2")
    assert len(run(other)) == 1
    assert record_of(other)["settings"]["sst2"]["protocol"]["epochs"] == 2
    assert record_of(other)["machine"] == before
    assert run(options) == []
    assert scores_of(options) == first
    assert record_of(options)["machine"] == "another machine"
    assert weights_of(options, "sst2") == weights and (weights / "model.safetensors").is_file()
    shutil.rmtree(weights)
    assert run(options) == [], "who needs no weights may remove them"
    assert record_of(options)["results"]["tasks"]["sst2"]["kept"] is None


def test_changed_data_of_the_same_number_of_rows_is_measured_again(place, tmp_path):
    shutil.copytree(place / "glue", tmp_path / "glue")
    shutil.copytree(place / "model", tmp_path / "model")
    options = build_options(tmp_path, "sst2")
    assert len(run(options)) == 1
    path = tmp_path / "glue" / "SST-2" / "train.csv"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], *reversed(lines[1:])]) + "\n")
    glue._read.cache_clear()  # as in another process
    assert len(run(options)) == 1


@pytest.mark.slow
def test_tasks_that_follow_start_from_the_best_model_of_a_finished_mnli_sweep(place):
    options = build_options(place, "stsb", "mnli", output="transfer", no_transfer=False)
    assert [task for task, _ in run(options)] == ["mnli", "stsb"]
    record, best = record_of(options), weights_of(options, "mnli")
    assert record["settings"]["stsb"]["start"] == str(best)
    assert [record["settings"][task]["from_mnli"] for task in ("mnli", "stsb")] == [False, True]
    assert record["results"]["missing"] == ["qnli", "qqp", "rte", "sst2", "mrpc", "cola"]
    before = fingerprint(best)
    more = dataclasses.replace(options, tasks=("mnli",), seeds=(1, 2, 3), learning_rate=(3e-3, 1e-2))
    run(more, 5)  # of six
    later = dataclasses.replace(options, tasks=("rte",), learning_rate=(3e-3, 1e-12))
    assert len(run(later)) == 2
    started = last_sweep(Ledger(folder_of(options) / "glue" / "rte"), fingerprint(options.model))["unit"]["start"]
    assert started == before, "the best run of the unfinished sweep is not taken"
    assert set(record_of(options)["results"]["tasks"]) == {"mnli", "rte", "stsb"}
    shutil.rmtree(weights_of(options, "mnli"))
    with pytest.raises(MissingInputError, match="mnli: the best weights are gone"):
        run(dataclasses.replace(later, epochs=2))


def test_transfer_without_a_finished_mnli_sweep_is_refused_with_the_ways_out(place):
    options = build_options(place, "rte", "sst2", output="none", no_transfer=False)
    run(dataclasses.replace(options, tasks=("mnli",), seeds=(0, 1)), 1)
    with pytest.raises(ConfigError, match=r"--tasks: .* no sweep of MNLI is finished .*--no-transfer"):
        evaluate(options, Recorder())
