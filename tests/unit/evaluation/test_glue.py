"""A whole evaluation: what is run, what is kept, what is run again, and what is refused before anything is."""

import dataclasses
import json
import shutil
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest
from unit.evaluation.glue_place import POINT, build_options, build_run, make_place

from megatron_neobert.errors import ConfigError, ConversionError, MissingInputError, OutputError
from megatron_neobert.evaluation.fine_tune import WEIGHTS, share_out
from megatron_neobert.evaluation.glue import evaluate, write_submission
from megatron_neobert.evaluation.glue_tasks import TASKS, to_answers
from megatron_neobert.evaluation.ledger import Ledger, open_ledger, read_record
from megatron_neobert.evaluation.models import fingerprint
from megatron_neobert.evaluation.sweep import BEST, best_weights, last_sweep

pytestmark = pytest.mark.filterwarnings("ignore:.*rows, the benchmark:UserWarning")
GRID = {"learning_rate": (3e-3, 1e-12)}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("glue"))


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


def scores_of(options):
    tasks = read_record(folder_of(options) / "glue.json")["results"]["tasks"]
    return {task: result | {"seconds": 0.0} for task, result in tasks.items()}


def kept_seed(options, task):
    """Seed of the run whose weights are kept, from the ledger; and the folder of the weights, by its content."""
    ledger = Ledger(folder_of(options) / "glue" / task)
    return ledger.lines[last_sweep(ledger)["result"]["kept"]]["unit"]["point"]["seed"]


def test_interrupted_evaluation_resumes_and_ends_with_the_same_results_and_weights(place):
    whole = build_options(place, "rte", output="whole", seeds=(0, 1), **GRID)
    assert len(run(whole)) == 4
    broken = dataclasses.replace(whole, output=place / "broken")
    first = run(broken, 2)
    task = folder_of(broken) / "glue" / "rte"
    (task / "runs" / "of a run that was killed").mkdir(parents=True)
    assert not (task / BEST).exists(), "the sweep is not finished"
    second = run(broken)
    assert len(first) == len(second) == 2 and not set(first) & set(second)
    assert scores_of(broken) == scores_of(whole)
    weights = [folder_of(options) / "glue" / "rte" / BEST / "model.safetensors" for options in (whole, broken)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert run(broken) == []
    assert [path.name for path in (task / "runs").iterdir()] == ["of a run that was killed"]  # no loser's weights


def test_evaluation_is_extended_by_seeds_and_keeps_the_best_weights(place):
    options = build_options(place, "rte", output="seeds")
    run(options)
    assert [point.seed for _, point in run(dataclasses.replace(options, seeds=(0, 5)))] == [5]
    result = scores_of(options)["rte"]
    assert result["seeds"] == [0, 5]
    assert result["kept"].endswith(f"seed{kept_seed(options, 'rte')}")


def test_other_settings_are_measured_beside_the_earlier_ones_which_are_not_measured_again(place):
    options = build_options(place, "sst2", output="settings")
    other = dataclasses.replace(options, epochs=2)
    assert len(run(options)) == 1
    first = scores_of(options)
    assert len(run(other)) == 1
    assert read_record(folder_of(other) / "glue.json")["settings"]["sst2"]["protocol"]["epochs"] == 2
    assert run(options) == []
    assert {name: value for name, value in scores_of(options)["sst2"].items() if name != "kept"} == {
        name: value for name, value in first["sst2"].items() if name != "kept"
    }


def test_changed_data_of_the_same_number_of_rows_is_measured_again(place, tmp_path):
    shutil.copytree(place / "glue", tmp_path / "glue")
    shutil.copytree(place / "model", tmp_path / "model")
    options = build_options(tmp_path, "sst2")
    assert len(run(options)) == 1
    assert run(options) == []
    path = tmp_path / "glue" / "SST-2" / "train.csv"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], *reversed(lines[1:])]) + "\n")
    from megatron_neobert.evaluation import glue

    glue._read.cache_clear()  # as in another process
    assert len(run(options)) == 1


@pytest.mark.slow
def test_tasks_that_follow_start_from_the_best_model_of_a_finished_mnli_sweep(place):
    options = build_options(place, "stsb", "mnli", output="transfer", no_transfer=False)
    assert [task for task, _ in run(options)] == ["mnli", "stsb"]
    record, folder = read_record(folder_of(options) / "glue.json"), folder_of(options) / "glue"
    best = best_weights(Ledger(folder / "mnli"), fingerprint(place / "model"))
    assert record["settings"]["stsb"]["start"] == str(best) == str(folder / "mnli" / BEST)
    assert [record["settings"][task]["from_mnli"] for task in ("mnli", "stsb")] == [False, True]
    assert record["results"]["missing"] == ["qnli", "qqp", "rte", "sst2", "mrpc", "cola"]
    before = fingerprint(best)
    more = dataclasses.replace(options, tasks=("mnli",), seeds=(1, 2, 3), learning_rate=(3e-3, 1e-2))
    run(more, 5)  # of six
    later = dataclasses.replace(options, tasks=("rte",), learning_rate=(3e-3, 1e-12))
    assert len(run(later)) == 2
    started = last_sweep(Ledger(folder / "rte"))["unit"]["start"]
    assert started == before, "the best run of the unfinished sweep is not taken"
    assert set(read_record(folder_of(options) / "glue.json")["results"]["tasks"]) == {"mnli", "rte", "stsb"}


def test_transfer_without_a_finished_mnli_sweep_is_refused_with_the_ways_out(place):
    options = build_options(place, "rte", "sst2", output="none", no_transfer=False)
    run(dataclasses.replace(options, tasks=("mnli",), seeds=(0, 1)), 1)
    with pytest.raises(ConfigError, match=r"--tasks rte: .* no sweep of MNLI is finished .*--no-transfer"):
        evaluate(options, Recorder())


def test_second_command_on_the_same_task_is_refused(place):
    options = build_options(place, "sst2", output="locked")
    with open_ledger(folder_of(options) / "glue" / "sst2"), pytest.raises(OutputError, match="another command"):
        evaluate(options, Recorder())


def test_missing_data_and_unsuitable_models_are_refused_before_anything_is_run(place, tmp_path):
    recorder = Recorder()
    with pytest.raises(MissingInputError, match="no folder QNLI or qnli"):
        evaluate(build_options(place, "rte", "qnli"), recorder)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard-of"}))
    with pytest.raises(ConversionError, match="cannot load it"):
        evaluate(build_options(place, "rte", model=tmp_path), recorder)
    data = tmp_path / "glue"
    shutil.copytree(place / "glue", data)
    (data / "RTE" / "test.csv").unlink()
    with pytest.raises(MissingInputError, match=r"has no test\.parquet, test\.jsonl or test\.csv"):
        evaluate(build_options(place, "sst2", "rte", data_dir=data, predict=True), recorder)
    assert recorder.runs == []


def test_failed_run_is_named_while_another_is_still_running(place, tmp_path):
    failing = build_run(place, "rte", start=tmp_path / "gone")
    going = build_run(place, "rte", point=dataclasses.replace(POINT, seed=1))
    never = build_run(place, "rte", point=dataclasses.replace(POINT, seed=2))
    with (
        ThreadPoolExecutor(2) as pool,
        pytest.warns(UserWarning, match=r"rte batch8\S+seed0 failed \(.*gone.*\).* and the 1 that are running"),
        pytest.raises(MissingInputError, match="gone"),
    ):
        list(share_out([failing, going, never], pool, 2))
    assert not never.folder.exists()
    assert (going.folder / WEIGHTS).is_dir()


def test_weights_reach_their_place_though_a_kill_came_right_after_the_sweep_was_entered(place):
    options = build_options(place, "sst2", output="moved")
    run(options)
    ledger = Ledger(folder_of(options) / "glue" / "sst2")
    task, kept = ledger.path.parent, last_sweep(ledger)["result"]["kept"]
    (task / "runs" / kept).mkdir(parents=True)
    (task / BEST).rename(task / "runs" / kept / WEIGHTS)
    assert run(options) == []
    assert (best_weights(Ledger(task), fingerprint(place / "model")) / "model.safetensors").is_file()


def test_submission_has_the_servers_files_words_and_order(place):
    options = build_options(place, "mnli", "rte", output="submission")
    ax = place / "glue" / "AX"
    ax.mkdir(exist_ok=True)
    (ax / "test.csv").write_text("premise,hypothesis\ncat,mat\ncat cat,mat\n")
    folder = evaluate(options, Recorder())
    answers = folder / "glue" / "submission"
    answers.mkdir()
    (answers / "QNLI.tsv").write_text("of an earlier command")
    path, missing = write_submission(folder, options)
    assert missing == ["QNLI.tsv", "QQP.tsv", "SST-2.tsv", "MRPC.tsv", "CoLA.tsv", "STS-B.tsv", "WNLI.tsv"]
    with zipfile.ZipFile(path) as archive:
        written = {name: archive.read(name).decode() for name in archive.namelist()}
    assert list(written) == ["MNLI-m.tsv", "MNLI-mm.tsv", "RTE.tsv", "AX.tsv"]
    for (name, text), rows in zip(written.items(), (12, 12, 12, 2), strict=True):
        lines = [line.split("\t") for line in text.splitlines()]
        assert lines[0] == ["index", "prediction"]
        assert [line[0] for line in lines[1:]] == [str(number) for number in range(rows)]
        assert {line[1] for line in lines[1:]} <= set(TASKS["rte" if name == "RTE.tsv" else "mnli"].labels)


def test_scores_for_the_server_stay_within_0_and_5():
    import numpy as np

    assert to_answers(TASKS["stsb"], np.array([[-0.2], [2.34567], [7.0]])) == ["0.000", "2.346", "5.000"]
    assert to_answers(TASKS["qnli"], np.array([[1.0, 0.0], [0.0, 1.0]])) == ["entailment", "not_entailment"]
    assert to_answers(TASKS["wnli"], np.array([[1.0, 0.0], [0.0, 1.0]])) == ["0", "1"]
