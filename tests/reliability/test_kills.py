"""A run whose processes are killed at random moments equals an undisturbed run.

Real starts of the training command take minutes. tests/distributed/test_interruptions.py has runs that are stopped or
damaged, with forked ranks.
"""

import random
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from ranks import BASH, environment, flags_of, read_metrics, start
from reliability.states import assert_same_state
from tests_tiny import tiny_settings

ITERATIONS = 300


def start_training(corpus: Any, save: Path, *, is_async: bool = False) -> subprocess.Popen[str]:
    """Start the training command on two ranks, which resumes and often saves."""
    settings = tiny_settings(
        corpus,
        save=save,
        model={"hidden_size": 32},
        training={"train_iters": ITERATIONS, "global_batch_size": 4, "eval_iters": 200, "eval_interval": 200},
        checkpoint={"load": str(save), "save_interval": 5, "async_save": is_async},
    )
    return start([*BASH, *flags_of(settings)], environment(2))


def processes_of(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    process = psutil.Process(launcher.pid)
    return [process, *process.children(recursive=True)]


def kill_all(launcher: subprocess.Popen[str]) -> None:
    """Kill all processes, as a power failure does, and wait until they have ended."""
    for process in processes_of(launcher):
        process.kill()
    launcher.stdout.read()


def read_until(launcher: subprocess.Popen[str], text: str) -> str:
    """Return the next line of the output that contains `text`."""
    lines = []
    for line in launcher.stdout:
        lines.append(line)
        if text in line:
            return line
    raise AssertionError(f"no {text!r} in:\n{''.join(lines)}")


def wait_for_a_random_moment(launcher: subprocess.Popen[str], rng: random.Random) -> None:
    """Wait for 5 to 25 iterations of this start, and then for a random part of an iteration or a save."""
    first = int(read_until(launcher, "iteration ").split()[1].split("/")[0])
    read_until(launcher, f"iteration {first + rng.randint(5, 25)}/")
    time.sleep(rng.uniform(0, 0.1))


def stop_in_a_save(launcher: subprocess.Popen[str], save: Path) -> None:
    """Stop all processes while a checkpoint is half written, after this start has saved another one."""
    read_until(launcher, "saved ")
    while True:
        while not is_half_written(save):
            assert launcher.poll() is None, launcher.stdout.read()
            time.sleep(0.01)
        for process in processes_of(launcher):
            process.suspend()
        if is_half_written(save):
            return
        for process in processes_of(launcher):  # the save was completed; try with the next one
            process.resume()


def is_half_written(save: Path) -> bool:
    return any(save.glob(".tmp-iter_*/*.safetensors"))


@pytest.mark.slow
def test_run_killed_five_times_equals_the_undisturbed_run_bit_for_bit(tiny_corpus, tmp_path):
    rng, train = random.Random(5), partial(start_training, tiny_corpus)
    save, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"
    with train(undisturbed) as launcher:
        output = launcher.stdout.read()
    assert launcher.returncode == 0, output

    with train(save, is_async=True) as launcher:
        wait_for_a_random_moment(launcher, rng)
        kill_all(launcher)
    for is_async in (True, False):
        with train(save, is_async=is_async) as launcher:
            stop_in_a_save(launcher, save)
            kill_all(launcher)
        assert is_half_written(save)

    with train(save) as launcher:
        wait_for_a_random_moment(launcher, rng)
        (rank_1,) = (rank for rank in psutil.Process(launcher.pid).children() if rank.environ()["RANK"] == "1")
        rank_1.kill()
        output = launcher.stdout.read()
    assert launcher.returncode == 128 + signal.SIGKILL, output
    (error,) = [line for line in output.splitlines() if line.startswith("error")]
    assert "error on rank 1 (" in error and ": was ended by signal 9 (Killed). The last checkpoint" in error
    assert "Traceback" not in output

    with train(save, is_async=True) as launcher:
        wait_for_a_random_moment(launcher, rng)
        launcher.kill()
        launcher.stdout.read()  # until the ranks have ended by themselves
    assert max(read_metrics(save)) < ITERATIONS

    with train(save) as launcher:
        output = launcher.stdout.read()
    assert launcher.returncode == 0, output
    assert_same_state(save / f"iter_{ITERATIONS:07d}", undisturbed / f"iter_{ITERATIONS:07d}")
    assert read_metrics(save) == read_metrics(undisturbed)
    assert [*save.glob(".*"), *save.glob("*damaged*")] == []
