"""`neobert evaluate glue` resumes after a kill, runs in several processes, and refuses impossible settings."""

import signal
import subprocess

import psutil
import pytest
from commands import ENVIRONMENT, call, command_line
from json_files import read_json
from unit.evaluation.glue_inputs import write_inputs

SETTINGS = ("--tasks", "rte", "--no-transfer", "--epochs", "1", "--batch-size", "8", "--learning-rate", "3e-3")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("glue"))


def arguments_of(inputs, output, *more):
    return ("--model", inputs / "model", "--data-dir", inputs / "glue", "--output", inputs / output, *SETTINGS, *more)


def results_of(inputs, output):
    tasks = read_json(inputs / output / "model" / "glue.json")["results"]["tasks"]
    ignored = {"seconds": None, "kept": None}
    return {name: task | ignored for name, task in tasks.items()}


@pytest.mark.slow
def test_command_with_two_workers_that_is_killed_resumes_with_one_and_has_the_same_results(inputs):
    seeds = ("--seeds", "0", "1", "2")
    command = command_line("evaluate glue", *arguments_of(inputs, "killed", *seeds, "--jobs", "2"))
    with subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as process:
        first = next(line for line in process.stderr if line.startswith("rte 1/3 | "))
        workers = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
        assert psutil.wait_procs(workers, timeout=600)[1] == [], "workers end with their parent"
    _, output, errors = call("evaluate glue", *arguments_of(inputs, "killed", *seeds))
    assert "rte 3/3 | " in errors and first.split(" | ")[1] not in errors
    assert "| measured |" in output
    assert call("evaluate glue", *arguments_of(inputs, "whole", *seeds))[0] == 0
    assert results_of(inputs, "killed") == results_of(inputs, "whole")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--device", "cuda:1"), "--device cuda:1 is not one of cpu, cuda"),  # each run sees one GPU
        (("--device", "cpu", "--dtype", "float16"), "--dtype float16 needs a GPU"),
    ],
)
def test_impossible_settings_are_refused_before_anything_is_written(inputs, arguments, reason):
    code, _, errors = call("evaluate glue", *arguments_of(inputs, "refused", *arguments))
    assert code == 2 and reason in errors
    assert not (inputs / "refused").exists()
