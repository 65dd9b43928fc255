"""`neobert evaluate glue` and `neobert fetch glue`: killed, in several processes, and without a network."""

import json
import signal
import subprocess

import datasets
import psutil
import pytest
import torch
from commands import ENVIRONMENT, call, command_line, run
from unit.evaluation.glue_place import make_place

from megatron_neobert.evaluation import fetch
from megatron_neobert.evaluation.glue_tasks import TASKS, read_task

SETTINGS = ("--tasks", "rte", "--no-transfer", "--epochs", "1", "--batch-size", "8", "--learning-rate", "3e-3")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("glue"))


def arguments_of(place, output, *more):
    return ("--model", place / "model", "--data-dir", place / "glue", "--output", place / output, *SETTINGS, *more)


def results_of(place, output):
    tasks = json.loads((place / output / "model" / "glue.json").read_text())["results"]["tasks"]
    return {
        name: {key: value for key, value in task.items() if key not in ("seconds", "kept")}
        for name, task in tasks.items()
    }


@pytest.mark.slow
def test_command_killed_in_two_processes_resumes_in_one_with_the_same_results(place):
    seeds = ("--seeds", "0", "1", "2")
    command = command_line("evaluate glue", *arguments_of(place, "killed", *seeds, "--jobs", "2"))
    with subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as process:
        first = next(line for line in process.stderr if line.startswith("rte 1/3 | "))
        workers = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
        assert psutil.wait_procs(workers, timeout=600)[1] == []  # they do not outlive it
    _, output, errors = call("evaluate glue", *arguments_of(place, "killed", *seeds))
    assert "rte 3/3 | " in errors and first.split(" | ")[1] not in errors
    assert "| measured |" in output
    assert call("evaluate glue", *arguments_of(place, "whole", *seeds))[0] == 0
    assert results_of(place, "killed") == results_of(place, "whole")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--jobs", "0"), "--jobs 0 is below 1, its smallest legal value"),
        (("--seeds", "-1"), "--seeds -1 is below 0"),
        (("--device", "cuda:1"), "--device cuda:1 is not one of cpu, cuda"),  # every run sees one GPU
        (("--tasks", "snli"), "--tasks snli: GLUE's tasks are mnli"),
        pytest.param(
            ("--device", "cuda"),
            "--device cuda: torch sees no GPU here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
        (("--device", "cpu", "--dtype", "float16"), "--dtype float16 needs a GPU"),
    ],
)
def test_settings_that_cannot_be_are_refused(place, arguments, reason):
    code, _, errors = call("evaluate glue", *arguments_of(place, "refused", *arguments))
    assert code == 2 and reason in errors
    assert not (place / "refused").exists()


def test_fetching_without_a_network_says_so(tmp_path):
    environment = {**ENVIRONMENT, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    code, said, errors = run("fetch glue", "--output", tmp_path / "glue", "--tasks", "rte", env=environment)
    assert code == 66
    assert "1/1 rte: failed (" in said
    assert "1 of 1 could not be fetched (rte)" in errors and "with network" in errors.replace("\n", " ")
    code, _, errors = call("fetch glue", "--output", tmp_path / "glue", "--tasks", "snli")
    assert code == 2 and "snli" in errors


def test_fetched_splits_are_what_the_evaluation_reads(tmp_path):
    names = datasets.ClassLabel(names=["entailment", "not_entailment"])

    def split(*labels: int) -> datasets.Dataset:
        rows = {"sentence1": ['a "cat', "b"], "sentence2": ["c", "d"], "label": list(labels), "idx": [0, 1]}
        return datasets.Dataset.from_dict(rows).cast_column("label", names)

    source = datasets.DatasetDict(train=split(1, 0), validation=split(1, 0), test=split(-1, -1))
    counted = fetch.write_splits(source, tmp_path / "rte")
    assert counted == {"train": 2, "validation": 2, "test": 2}
    written = sorted(path.name for path in (tmp_path / "rte").iterdir())
    assert written == ["test.parquet", "train.parquet", "validation.parquet"]
    found = read_task(tmp_path, TASKS["rte"], "train")
    assert (found.texts, found.labels) == ([('a "cat', "c"), ("b", "d")], [1, 0])
