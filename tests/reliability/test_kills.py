"""A run whose processes are killed at random moments equals an undisturbed run."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from distributed.ranks import read_metrics
from reliability.conftest import ITERATIONS, Start
from reliability.states import assert_same_state, names_in
from reliability.training_process import Training

SYNC, ASYNC = ("--save-interval", 5), ("--save-interval", 5, "--async-save")


def wait_for_a_random_moment(training: Training, rng: random.Random) -> None:
    """Wait for 5 to 25 iterations of this start, and then for a random part of an iteration or a save."""
    first = int(training.wait_for("iteration ").split()[1].split("/")[0])
    training.wait_for(f"iteration {first + rng.randint(5, 25)}/")
    time.sleep(rng.uniform(0, 0.1))


def stop_in_a_save(training: Training, save: Path) -> None:
    """Stop all processes while a checkpoint is half written, after this start has saved another one."""
    training.wait_for("saved ")
    while True:
        training.wait_until(lambda: is_half_written(save))
        training.send_to_all(signal.SIGSTOP)
        if is_half_written(save):
            return
        training.send_to_all(signal.SIGCONT)  # the save was completed; try with the next one


def is_half_written(save: Path) -> bool:
    return any(save.glob(".tmp-iter_*/*.safetensors"))


@pytest.mark.slow
def test_run_killed_five_times_equals_the_undisturbed_run_bit_for_bit(start: Start, tmp_path, undisturbed):
    rng, save = random.Random(5), tmp_path

    with start(save, *ASYNC) as training:  # all processes, as in a power failure
        wait_for_a_random_moment(training, rng)
        training.kill()
        assert training.finish() == -signal.SIGKILL, training.output
    for options in (ASYNC, SYNC):  # all processes during a save
        with start(save, *options) as training:
            stop_in_a_save(training, save)
            training.kill()
        assert is_half_written(save)

    with start(save, *SYNC) as training:  # one rank
        training.wait_for("training ")
        rank_1 = training.rank(1)
        wait_for_a_random_moment(training, rng)
        os.kill(rank_1, signal.SIGKILL)
        assert training.finish() == 128 + signal.SIGKILL, training.output
    (error,) = [line for line in training.lines if line.startswith("error")]
    assert "error on rank 1 (" in error and ": was ended by signal 9 (Killed). The last checkpoint" in error
    assert "Traceback" not in training.output

    with start(save, *ASYNC) as training:  # the launcher, whose ranks must end by themselves
        wait_for_a_random_moment(training, rng)
        os.kill(training.process.pid, signal.SIGKILL)
        training.finish()
    assert training.processes() == []
    assert max(read_metrics(save)) < ITERATIONS

    with start(save) as training:
        assert training.finish() == 0, training.output
    assert_same_state(save / f"iter_{ITERATIONS:07d}", undisturbed / f"iter_{ITERATIONS:07d}")
    assert read_metrics(save) == read_metrics(undisturbed)
    assert [name for name in names_in(save) if name.startswith(".")] == []
    assert "damaged" not in " ".join(names_in(save))
