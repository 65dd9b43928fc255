"""A whole evaluation: what is run, what is kept, what is run again, and what is refused before anything is."""

import dataclasses
import fcntl
import json
import shutil
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest
from unit.evaluation.glue_place import POINT, build_evaluation, build_run, make_place

from megatron_neobert.errors import ConfigError, ConversionError, MissingInputError, OutputError
from megatron_neobert.evaluation.fine_tuning.pool import share_out
from megatron_neobert.evaluation.fine_tuning.settings import Grid
from megatron_neobert.evaluation.fine_tuning.study import RUN, TaskStudy
from megatron_neobert.evaluation.fine_tuning.trainer import MODEL, Outcome
from megatron_neobert.evaluation.glue.predictions import to_answers, write_submission, zip_submission
from megatron_neobert.evaluation.glue.run import best_model, evaluate
from megatron_neobert.evaluation.glue.tasks import TASKS
from megatron_neobert.evaluation.records import read_record

pytestmark = pytest.mark.filterwarnings("ignore:.*rows, the benchmark:UserWarning")
GRID = Grid(batch_sizes=(8,), learning_rates=(3e-3, 1e-12), weight_decays=(1e-5,))


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


def scores_of(evaluation):
    tasks = read_record(evaluation.folder / "glue.json")["results"]["tasks"]
    return {task: result | {"seconds": 0.0} for task, result in tasks.items()}


def test_interrupted_evaluation_goes_on_and_ends_with_the_same_results(place):
    whole = build_evaluation(place, "rte", output="whole", grids={"rte": GRID}, seeds=(0, 1))
    evaluate(whole, Recorder())
    broken = dataclasses.replace(whole, output=place / "broken")
    first, second = Recorder(runs=2), Recorder()
    with pytest.raises(KeyboardInterrupt):
        evaluate(broken, first)
    (broken.task_folder("rte") / "runs" / second_run_name(first)).mkdir(parents=True)  # of the run that was killed
    evaluate(broken, second)
    assert len(first.runs) == len(second.runs) == 2
    assert {point for _, point in first.runs + second.runs} == set(GRID.points([0, 1]))
    assert scores_of(broken) == scores_of(whole)
    third = Recorder()
    evaluate(broken, third)
    assert third.runs == []
    assert list((broken.task_folder("rte") / "runs").iterdir()) == []  # the losers' weights are gone


def second_run_name(first: Recorder) -> str:
    done = {point for _, point in first.runs}
    return next(point.name for point in GRID.points([0, 1]) if point not in done)


def test_more_seeds_run_only_what_is_new(place):
    evaluation = build_evaluation(place, "rte", output="seeds")
    evaluate(evaluation, Recorder())
    more = Recorder()
    evaluate(dataclasses.replace(evaluation, seeds=(0, 5)), more)
    kept = read_record(evaluation.folder / "glue.json")["results"]["tasks"]["rte"]["kept"]
    assert kept == (best_model(evaluation, "rte") / RUN).read_text().strip() != ""
    assert [point.seed for _, point in more.runs] == [5]
    assert scores_of(evaluation)["rte"]["seeds"] == [0, 5]


@pytest.mark.slow
def test_tasks_that_follow_start_from_the_best_mnli_model(place):
    evaluation = build_evaluation(place, "stsb", "mnli", output="transfer", transfer_from="mnli")
    recorder = Recorder()
    evaluate(evaluation, recorder)
    assert [task for task, _ in recorder.runs] == ["mnli", "stsb"]
    record = read_record(evaluation.folder / "glue.json")
    assert record["settings"]["stsb"]["start"] == str(best_model(evaluation, "mnli"))
    assert [record["results"]["tasks"][task]["from_mnli"] for task in ("mnli", "stsb")] == [False, True]
    assert record["results"]["missing"] == ["qnli", "qqp", "rte", "sst2", "mrpc", "cola"]
    later = dataclasses.replace(evaluation, grids={"rte": GRID})  # MNLI is there, from the command before
    evaluate(later, Recorder())
    assert set(read_record(evaluation.folder / "glue.json")["results"]["tasks"]) == {"mnli", "rte", "stsb"}


def test_transfer_without_an_mnli_model_is_refused_with_the_ways_out(place):
    evaluation = build_evaluation(place, "rte", "sst2", output="none", transfer_from="mnli")
    with pytest.raises(ConfigError, match=r"--tasks rte: .* MNLI has not been run .*--no-transfer"):
        evaluate(evaluation, Recorder())
    assert not evaluation.folder.exists()


def test_other_settings_are_not_mixed_into_the_same_results(place):
    evaluation = build_evaluation(place, "sst2", output="settings")
    evaluate(evaluation, Recorder())
    other = dataclasses.replace(evaluation, protocol=dataclasses.replace(evaluation.protocol, epochs=2))
    with pytest.raises(ConfigError, match=r"other settings \(epochs was 1 and is now 2\)"):
        evaluate(other, Recorder())


def test_second_command_on_the_same_task_is_refused(place):
    evaluation = build_evaluation(place, "sst2", output="locked")
    folder = evaluation.task_folder("sst2")
    folder.mkdir(parents=True)
    with (folder / "lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(OutputError, match="another command"):
            evaluate(evaluation, Recorder())


def test_missing_data_and_unsuitable_models_are_refused_before_anything_is_run(place, tmp_path):
    recorder = Recorder()
    with pytest.raises(MissingInputError, match="no folder QNLI or qnli"):
        evaluate(build_evaluation(place, "rte", "qnli"), recorder)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard-of"}))
    with pytest.raises(ConversionError, match="cannot load it"):
        evaluate(build_evaluation(place, "rte", model=tmp_path), recorder)
    data = tmp_path / "glue"
    shutil.copytree(place / "glue", data)
    (data / "RTE" / "test.csv").unlink()
    with pytest.raises(MissingInputError, match=r"has no test\.parquet, test\.jsonl or test\.csv"):
        evaluate(build_evaluation(place, "sst2", "rte", data_dir=data, predict=True), recorder)
    assert recorder.runs == []


def test_failed_run_is_named_while_another_is_still_going_on(place, tmp_path):
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
    assert (going.folder / MODEL).is_dir()


def outcome(average: float) -> Outcome:
    return Outcome(scores={"accuracy": average}, average=average, best_step=1, steps=1, seconds=0.0)


def test_only_the_best_weights_stay_whatever_a_kill_leaves(tmp_path):
    study = TaskStudy(tmp_path, "rte", {})
    for seed, average in enumerate([0.5, 0.8, 0.6]):
        point = dataclasses.replace(POINT, seed=seed)
        weights = study.run_folder(point) / MODEL
        weights.mkdir(parents=True)
        (weights / "weights").write_text(str(seed))
        if seed < 2:
            study.enter(point, outcome(average))
    assert (tmp_path / "best" / "weights").read_text() == "1"
    assert study.kept == dataclasses.replace(POINT, seed=1).name
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [point.name]
    reopened = TaskStudy(tmp_path, "rte", {})
    assert list(reopened.outcomes) == [dataclasses.replace(POINT, seed=seed) for seed in (0, 1)]


def test_submission_has_the_servers_files_words_and_order(place):
    evaluation = build_evaluation(place, "mnli", "rte", output="submission")
    evaluate(evaluation, Recorder())
    ax = place / "glue" / "AX"
    ax.mkdir(exist_ok=True)
    (ax / "test.csv").write_text("premise,hypothesis\ncat,mat\ncat cat,mat\n")
    written = []
    for task in ("mnli", "rte"):
        weights = best_model(evaluation, task)
        with pytest.warns(UserWarning, match="rows, the benchmark"):
            written += write_submission(task, weights, place / "glue", place / "answers", evaluation.protocol)
    assert [path.name for path in written] == ["MNLI-m.tsv", "MNLI-mm.tsv", "AX.tsv", "RTE.tsv"]
    for path, rows, task in zip(written, (12, 12, 2, 12), ("mnli", "mnli", "mnli", "rte"), strict=True):
        lines = [line.split("\t") for line in path.read_text().splitlines()]
        assert lines[0] == ["index", "prediction"]
        assert [line[0] for line in lines[1:]] == [str(number) for number in range(rows)]
        assert {line[1] for line in lines[1:]} <= set(TASKS[task].labels)
    (place / "answers" / "QNLI.tsv").write_text("of an earlier command")
    path, missing = zip_submission(place / "answers", written)
    assert missing == ["QNLI.tsv", "QQP.tsv", "SST-2.tsv", "MRPC.tsv", "CoLA.tsv", "STS-B.tsv", "WNLI.tsv"]
    with zipfile.ZipFile(path) as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == {
            file.name: file.read_bytes() for file in written
        }


def test_scores_for_the_server_stay_within_0_and_5():
    import numpy as np

    assert to_answers(TASKS["stsb"], np.array([[-0.2], [2.34567], [7.0]])) == ["0.000", "2.346", "5.000"]
    assert to_answers(TASKS["qnli"], np.array([[1.0, 0.0], [0.0, 1.0]])) == ["entailment", "not_entailment"]
    assert to_answers(TASKS["wnli"], np.array([[1.0, 0.0], [0.0, 1.0]])) == ["0", "1"]
