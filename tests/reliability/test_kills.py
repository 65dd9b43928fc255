"""A run whose processes are killed at random instants becomes the run that nothing happened to."""

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


def wait_for_a_random_instant(training: Training, rng: random.Random) -> None:
    """Some iterations after the first one of this start, and at any point of an iteration or a save."""
    first = int(training.wait_for("iteration ").split()[1].split("/")[0])
    training.wait_for(f"iteration {first + rng.randint(5, 25)}/")
    time.sleep(rng.uniform(0, 0.1))  # nothing is awaited: the instant shall be random


def stop_in_a_save(training: Training, save: Path) -> None:
    """All processes stand still, and a checkpoint is half written; a complete one of this start exists."""
    training.wait_for("saved ")
    while True:
        training.wait_until(lambda: is_half_written(save))
        training.send_to_all(signal.SIGSTOP)
        if is_half_written(save):
            return
        training.send_to_all(signal.SIGCONT)  # it was completed meanwhile: the next one, then


def is_half_written(save: Path) -> bool:
    return any(save.glob(".tmp-iter_*/*.safetensors"))


@pytest.mark.slow
def test_a_run_killed_five_times_ends_bit_for_bit_like_one_that_was_not(start: Start, tmp_path, undisturbed):
    rng, save = random.Random(5), tmp_path

    with start(save, *ASYNC) as training:  # all processes, as by a power cut
        wait_for_a_random_instant(training, rng)
        training.kill()
        assert training.finish() == -signal.SIGKILL, training.output
    for options in (ASYNC, SYNC):  # the same, with a half-written checkpoint for certain
        with start(save, *options) as training:
            stop_in_a_save(training, save)
            training.kill()
        assert is_half_written(save)

    with start(save, *SYNC) as training:  # one rank
        training.wait_for("training ")
        rank_1 = training.rank(1)
        wait_for_a_random_instant(training, rng)
        os.kill(rank_1, signal.SIGKILL)
        assert training.finish() == 128 + signal.SIGKILL, training.output
    assert "rank 1 was ended by signal 9" in training.output
    assert "Traceback" not in training.output

    with start(save, *ASYNC) as training:  # the launcher: its ranks end by themselves
        wait_for_a_random_instant(training, rng)
        os.kill(training.process.pid, signal.SIGKILL)
        training.finish()
    assert training.pids() == []
    assert max(read_metrics(save)) < ITERATIONS

    with start(save) as training:
        assert training.finish() == 0, training.output
    assert_same_state(save / f"iter_{ITERATIONS:07d}", undisturbed / f"iter_{ITERATIONS:07d}")
    assert read_metrics(save) == read_metrics(undisturbed)
    assert [name for name in names_in(save) if name.startswith(".")] == []
    assert "damaged" not in " ".join(names_in(save))
