"""Whole GLUE evaluations, and the formats of their rows: what is executed, kept and refused."""

import dataclasses
import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import datasets
import pytest
from json_files import read_json, write_jsonl
from unit.evaluation.glue_inputs import build_options, write_inputs
from unit.evaluation.pseudo_perplexity_models import write_model

from megatron_neobert.errors import ConfigError, DataError, MissingInputError
from megatron_neobert.evaluation import sweep
from megatron_neobert.evaluation.fine_tune import fine_tune
from megatron_neobert.evaluation.glue import TASKS, read_task, run_glue
from megatron_neobert.evaluation.ledger import LEDGER, open_ledger
from megatron_neobert.evaluation.models import fingerprint
from megatron_neobert.evaluation.sweep import last_sweep
from megatron_neobert.runtime.own_files import create_folder

pytestmark = pytest.mark.filterwarnings("ignore:.*rows, the benchmark:UserWarning")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("glue"))


def run(options, *, interrupt_after: int | None = None) -> list:
    """Evaluate, and return task and point of every run; with `interrupt_after`, interrupt after that many runs."""
    runs = []

    def record(_, run, outcome) -> None:
        runs.append((run.task.name, run.point))
        if len(runs) == interrupt_after:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "show_progress", record)
        with pytest.raises(KeyboardInterrupt) if interrupt_after else nullcontext():
            run_glue(options)
    return runs


def folder_of(options):
    return options.output / "model"


def record_of(options):
    return read_json(folder_of(options) / "glue.json")


def scores_of(options):
    tasks = record_of(options)["results"]["tasks"]
    return {task: result | {"seconds": 0.0, "kept": None, "origin": None} for task, result in tasks.items()}


def lines_of(options, task):
    with open_ledger(folder_of(options) / "glue" / task) as ledger:
        return ledger.lines


def weights_of(options, task):
    folder = folder_of(options)
    return Path(last_sweep(folder, "glue", task, fingerprint(options.model))["kept"])


def test_interrupted_evaluation_resumes_with_the_same_results_and_best_weights_and_takes_more_seeds(inputs):
    whole = build_options(inputs, "rte", output="whole", seeds=(0, 1), learning_rate=(3e-3, 1e-12))
    assert len(run(whole)) == 4
    interrupted = dataclasses.replace(whole, output=inputs / "interrupted")
    first, second = run(interrupted, interrupt_after=2), run(interrupted)
    assert len(first) == len(second) == 2 and not set(first) & set(second)
    assert scores_of(interrupted) == scores_of(whole)
    contents = [(weights_of(options, "rte") / "model.safetensors").read_bytes() for options in (whole, interrupted)]
    assert contents[0] == contents[1]
    assert run(interrupted) == []
    runs = folder_of(interrupted) / "glue" / "rte" / "runs"
    assert [path.name for path in runs.iterdir()] == [weights_of(interrupted, "rte").parent.name], "only the best run"
    more_seeds = dataclasses.replace(interrupted, seeds=(0, 1, 5))
    assert [point.seed for _, point in run(more_seeds)] == [5, 5], "one run per learning rate"
    assert scores_of(more_seeds)["rte"]["seeds"] == [0, 1, 5]
    lines = lines_of(more_seeds, "rte")
    averages = [line["result"]["average"] for line in lines.values()]
    assert lines[weights_of(more_seeds, "rte").parent.name]["result"]["average"] == max(averages)


def test_other_settings_are_measured_separately_and_leave_earlier_weights_and_origin(inputs):
    options = build_options(inputs, "sst2", output="settings")
    changed = dataclasses.replace(options, epochs=2)
    assert len(run(options)) == 1
    path = folder_of(options) / "glue" / "sst2" / LEDGER
    machine = json.loads(path.read_text().splitlines()[-1])["origin"]["machine"]
    path.write_text(path.read_text().replace(machine, "another machine"))
    scores, weights = scores_of(options), weights_of(options, "sst2")
    assert len(run(changed)) == 1
    assert record_of(changed)["settings"]["sst2"]["protocol"]["epochs"] == 2
    assert record_of(changed)["machine"] == machine
    assert run(options) == []
    assert scores_of(options) == scores
    assert record_of(options)["machine"] == "another machine"
    assert weights_of(options, "sst2") == weights and (weights / "model.safetensors").is_file()
    shutil.rmtree(weights)
    assert run(options) == [], "the user may remove weights"
    assert record_of(options)["results"]["tasks"]["sst2"]["kept"] is None


def test_narrower_grid_keeps_the_weights_of_the_best_point_outside_of_it(inputs):
    rates = (3e-3, 1e-12)
    options = build_options(inputs, "sst2", output="narrower", learning_rate=rates)
    assert len(run(options)) == 2
    weights = weights_of(options, "sst2")
    best = lines_of(options, "sst2")[weights.parent.name]["unit"]["point"]["learning_rate"]
    assert run(dataclasses.replace(options, learning_rate=tuple({*rates} - {best}))) == []
    assert weights_of(options, "sst2") == weights
    assert record_of(options)["results"]["tasks"]["sst2"]["kept"] == str(weights)


def test_record_has_results_of_earlier_commands_but_not_of_other_weights(inputs, tmp_path):
    options = dataclasses.replace(
        build_options(inputs, "rte"), model=shutil.copytree(inputs / "model", tmp_path / "model"), output=tmp_path / "a"
    )
    run(options)
    run(dataclasses.replace(options, tasks=("sst2",)))
    record = record_of(options)
    assert record["settings"].keys() == record["results"]["tasks"].keys() == {"rte", "sst2"}
    moved = dataclasses.replace(options, output=(tmp_path / "a").rename(tmp_path / "b"))
    assert run(moved) == []
    assert all(
        Path(task["kept"]).is_relative_to(tmp_path / "b") for task in record_of(moved)["results"]["tasks"].values()
    )
    write_model(options.model, "Bert", seed=1)
    run(moved)
    assert record_of(moved)["settings"].keys() == record_of(moved)["results"]["tasks"].keys() == {"rte"}


def test_run_of_a_model_that_has_changed_since_the_sweep_began_is_not_recorded(inputs, tmp_path, monkeypatch):
    model = shutil.copytree(inputs / "model", tmp_path / "model")
    options = dataclasses.replace(build_options(inputs, "rte", seeds=(0, 1)), model=model, output=tmp_path / "output")
    monkeypatch.setattr(sweep, "show_progress", lambda *_: write_model(model, "Bert", seed=1))
    with pytest.raises(DataError, match="model has changed during the sweep"):
        run_glue(options)
    assert len(lines_of(options, "rte")) == 1


def test_folder_of_a_run_in_another_worker_is_not_deleted_when_a_run_ends(inputs, monkeypatch):
    still_there = []

    def run_side_by_side(runs, *, jobs):
        first, second = runs
        create_folder(second.folder)
        yield first, fine_tune(first)
        still_there.append(second.folder.is_dir())
        yield second, fine_tune(second)

    monkeypatch.setattr(sweep, "run_all", run_side_by_side)
    run_glue(build_options(inputs, "rte", output="workers", seeds=(0, 1)))
    assert still_there == [True]


@pytest.mark.slow
def test_transfer_starts_from_the_best_weights_of_the_last_finished_mnli_sweep(inputs):
    options = build_options(inputs, "stsb", "mnli", output="transfer", no_transfer=False)
    assert [task for task, _ in run(options)] == ["mnli", "stsb"]
    record, best = record_of(options), weights_of(options, "mnli")
    assert record["settings"]["stsb"]["start"] == str(best)
    best_fingerprint = fingerprint(best)
    unfinished = dataclasses.replace(options, tasks=("mnli",), seeds=(1, 2, 3), learning_rate=(3e-3, 1e-2))
    run(unfinished, interrupt_after=5)  # of six
    later = dataclasses.replace(options, tasks=("rte",), learning_rate=(3e-3, 1e-12))
    assert len(run(later)) == 2
    lines = lines_of(options, "rte").values()
    assert {line["unit"]["start"] for line in lines} == {best_fingerprint}
    assert set(record_of(options)["results"]["tasks"]) == {"mnli", "rte", "stsb"}
    shutil.rmtree(weights_of(options, "mnli"))
    with pytest.raises(MissingInputError, match="mnli: the best weights are gone"):
        run(dataclasses.replace(later, epochs=2))


def test_transfer_without_a_finished_mnli_sweep_is_refused_with_the_remedies(inputs):
    options = build_options(inputs, "rte", "sst2", output="none", no_transfer=False)
    run(dataclasses.replace(options, tasks=("mnli",), seeds=(0, 1)), interrupt_after=1)
    with pytest.raises(ConfigError, match=r"--tasks: .* no sweep of MNLI is finished .*--no-transfer"):
        run_glue(options)


# --- reading


COLUMNS = {
    "sentence1": ['a "cat", sat', "12"],
    "sentence2": ["one\nline", "off\x85\u2028."],
    "label": [1, 0],
    "idx": [0, 1],
}


def write(folder: Path, name: str, content: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(content, encoding="utf-8", newline="")


def write_parquet(folder: Path) -> None:
    for number, row in enumerate(datasets.Dataset.from_dict(COLUMNS)):
        datasets.Dataset.from_list([row]).to_parquet(str(folder / f"train-0000{number}-of-00002.parquet"))


LINES = '"a ""cat"", sat","one\nline",not_entailment\r\n12,off\x85\u2028.,entailment\r\n'
FORMATS = {
    "parquet": write_parquet,
    "jsonl": lambda folder: write_jsonl(folder / "train.jsonl", datasets.Dataset.from_dict(COLUMNS).to_list()),
    "csv": lambda folder: write(folder, "train.csv", f"\ufeffsentence1,sentence2,label\r\n{LINES}"),
    "saved": lambda folder: datasets.DatasetDict({"train": datasets.Dataset.from_dict(COLUMNS)}).save_to_disk(folder),
}


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("name", ["RTE", "rte"])
def test_every_format_gives_the_same_rows(tmp_path, format_, name):
    (tmp_path / name).mkdir()
    FORMATS[format_](tmp_path / name)
    split = read_task(tmp_path, TASKS["rte"], "train")
    assert (split.texts, split.labels) == ([COLUMNS["sentence1"], COLUMNS["sentence2"]], [1, 0])


@pytest.mark.parametrize(
    ("task", "content", "message"),
    [
        ("sst2", "sentence,label\ncat,2\n", r"2 is not a label of SST-2 \(0, 1\)"),
        ("sst2", "text,label\ncat,1\n", "train has the columns text, label, but no sentence"),
        ("sst2", "sentence,label\ncat,1\nmat\n", "Expected 2 columns, got 1: mat"),
        ("sst2", "sentence,label\n", "train has no rows"),
        ("stsb", "sentence1,sentence2,label\na,b,high\n", "'high' is not a score of STS-B"),
    ],
)
def test_file_with_other_columns_or_labels_is_refused(tmp_path, task, content, message):
    write(tmp_path, f"{TASKS[task].title}/train.csv", content)
    with pytest.raises(DataError, match=message):
        read_task(tmp_path, TASKS[task], "train")


def test_texts_stay_texts_and_scores_become_numbers(tmp_path):
    write(tmp_path, "STS-B/train.csv", "sentence1,sentence2,label\n1912,b,3.800\n")
    split = read_task(tmp_path, TASKS["stsb"], "train")
    assert (split.texts, split.labels) == ([["1912"], ["b"]], [3.8])


def test_missing_task_or_split_is_reported_with_the_download_command(tmp_path):
    with pytest.raises(MissingInputError, match=r"no folder QNLI or qnli.*hf download"):
        read_task(tmp_path, TASKS["qnli"], "train")
    write(tmp_path, "QNLI/train.tsv", "index\tquestion\tsentence\tlabel\n")
    with pytest.raises(
        MissingInputError, match=r"no train\.parquet, .* or train\.csv.*hf download.*TSV files are not read"
    ):
        read_task(tmp_path, TASKS["qnli"], "train")


def test_number_of_rows_that_differs_from_the_benchmarks_is_a_warning(tmp_path):
    write(tmp_path, "RTE/train.csv", "sentence1,sentence2,label\na,b,1\n")
    with pytest.warns(UserWarning, match="RTE train has 1 rows, the benchmark 2,490"):
        read_task(tmp_path, TASKS["rte"], "train")
