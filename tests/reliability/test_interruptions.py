"""A run that is stopped three times, each time in another way, equals an undisturbed run."""

import os
import re
import signal

import pytest
from distributed.ranks import read_metrics
from reliability.conftest import EVAL_INTERVAL, ITERATIONS, LAUNCH_FAULTY
from reliability.states import assert_same_state

pytestmark = pytest.mark.slow

LAST = f"iter_{ITERATIONS:07d}"


def test_run_stopped_three_times_equals_the_undisturbed_run_bit_for_bit(start, tmp_path, undisturbed):
    def newest() -> int:
        return int((tmp_path / "latest_checkpointed_iteration.txt").read_text())

    def stopped(reason: str) -> str:
        return f"stopped after iteration {newest()} of {ITERATIONS}: {reason}"

    # The time limit is reached on one rank, and all ranks stop after the same iteration.
    limit = ("--exit-duration-in-mins", 60)
    with start(tmp_path, *limit, command=LAUNCH_FAULTY, FAULTS="clock_ahead:1:7") as training:
        assert training.finish() == 75, training.output
    assert newest() == 7
    assert stopped("--exit-duration-in-mins") in training.output

    # A signal to one rank during a background save: that save is completed, and the run saves again.
    with start(tmp_path, "--async-save", "--save-interval", 5) as training:
        training.wait_for("training ")
        rank_0 = training.rank(0)
        training.wait_for("in the background")
        os.kill(rank_0, signal.SIGUSR1)
        assert training.finish() == 75, training.output
    saved = [int(number) for number in re.findall(r"saved .*/iter_(\d+)", training.output)]
    first = int(re.search(r"saving .*/iter_(\d+) in the background", training.output)[1])
    assert (saved[0], saved[-1]) == (first, newest())
    assert first < newest()
    assert stopped("a stop signal was received") in training.output

    # A signal to one rank during validation, which is repeated after the next start.
    with start(tmp_path) as training:
        training.wait_for("training ")
        rank_1 = training.rank(1)
        training.wait_for(f"iteration {EVAL_INTERVAL}/")
        os.kill(rank_1, signal.SIGTERM)
        assert training.finish() == 75, training.output
    assert newest() == EVAL_INTERVAL
    assert stopped("a stop signal was received") in training.output
    assert "validation loss" not in training.output

    with start(tmp_path) as training:
        assert training.finish() == 0, training.output
    validation = training.output.index(f"iteration {EVAL_INTERVAL}/{ITERATIONS} | validation loss")
    assert validation < training.output.index(f"iteration {EVAL_INTERVAL + 1}/")
    assert_same_state(tmp_path / LAST, undisturbed / LAST)
    for key in ("loss", "grad_norm", "consumed_tokens", "validation_loss"):
        assert read_metrics(tmp_path, key) == read_metrics(undisturbed, key), key


def test_states_one_save_interval_apart_are_not_equal(undisturbed):
    """Negative control of the comparisons in this folder."""
    with pytest.raises(AssertionError):
        assert_same_state(undisturbed / "iter_0000250", undisturbed / LAST)
