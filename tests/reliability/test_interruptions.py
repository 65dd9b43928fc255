"""A run that is stopped three times, each time in another way, equals an undisturbed run."""

import os
import re
import signal
from pathlib import Path
from typing import NamedTuple

import pytest
from distributed.ranks import read_metrics
from reliability.conftest import EVAL_INTERVAL, ITERATIONS, LAUNCH_FAULTY, Start
from reliability.states import assert_same_state

pytestmark = pytest.mark.slow

LAST = f"iter_{ITERATIONS:07d}"


class Ended(NamedTuple):
    """End of one start."""

    code: int
    output: str
    iteration: int  # of the newest checkpoint


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("interrupted")


@pytest.fixture(scope="module")
def starts(start: Start, run: Path) -> dict[str, Ended]:
    """Start one run four times: stop it three times, then let it train to its end."""
    ended = {}

    def end(name: str, training) -> None:
        code = training.finish()
        ended[name] = Ended(code, training.output, int((run / "latest_checkpointed_iteration.txt").read_text()))

    limit = ("--exit-duration-in-mins", 60)
    with start(run, *limit, command=LAUNCH_FAULTY, FAULTS="clock_ahead:1:7") as training:
        end("time limit", training)
    with start(run, "--async-save", "--save-interval", 5) as training:
        training.wait_for("training ")
        rank_0 = training.rank(0)
        training.wait_for("in the background")
        os.kill(rank_0, signal.SIGUSR1)
        end("background save", training)
    with start(run) as training:
        training.wait_for("training ")
        rank_1 = training.rank(1)
        training.wait_for(f"iteration {EVAL_INTERVAL}/")
        os.kill(rank_1, signal.SIGTERM)
        end("validation", training)
    with start(run) as training:
        end("to the end", training)
    return ended


def test_time_limit_reached_on_one_rank_stops_all_ranks_after_the_same_saved_iteration(starts):
    code, output, iteration = starts["time limit"]
    assert (code, iteration) == (75, 7), output
    assert f"stopped after iteration 7 of {ITERATIONS}: --exit-duration-in-mins" in output


def test_signal_to_one_rank_during_a_background_save_completes_it_and_saves_again(starts):
    code, output, iteration = starts["background save"]
    assert code == 75, output
    saved = [int(number) for number in re.findall(r"saved .*/iter_(\d+)", output)]
    first = int(re.search(r"saving .*/iter_(\d+) in the background", output)[1])
    assert (saved[0], saved[-1]) == (first, iteration)
    assert first < iteration
    assert f"stopped after iteration {iteration} of {ITERATIONS}: a stop signal was received" in output


def test_signal_to_one_rank_stops_the_run_during_validation(starts):
    code, output, iteration = starts["validation"]
    assert (code, iteration) == (75, EVAL_INTERVAL), output
    assert f"stopped after iteration {EVAL_INTERVAL} of {ITERATIONS}: a stop signal was received" in output
    assert "validation loss" not in output


def test_interrupted_validation_is_repeated_and_the_validation_curve_is_complete(starts, run, undisturbed):
    output = starts["to the end"].output
    assert output.index(f"iteration {EVAL_INTERVAL}/{ITERATIONS} | validation loss") < output.index(
        f"iteration {EVAL_INTERVAL + 1}/"
    )
    expected = read_metrics(undisturbed, "validation_loss")
    assert sorted(expected) == [EVAL_INTERVAL, ITERATIONS]
    assert read_metrics(run, "validation_loss") == expected


def test_run_stopped_three_times_equals_the_undisturbed_run_bit_for_bit(starts, run, undisturbed):
    assert starts["to the end"].code == 0, starts["to the end"].output
    assert_same_state(run / LAST, undisturbed / LAST)
    for key in ("loss", "grad_norm", "consumed_tokens"):
        assert read_metrics(run, key) == read_metrics(undisturbed, key), key


def test_states_one_save_interval_apart_are_not_equal(undisturbed):
    """Negative control of the comparisons in this folder."""
    with pytest.raises(AssertionError):
        assert_same_state(undisturbed / "iter_0000250", undisturbed / LAST)
