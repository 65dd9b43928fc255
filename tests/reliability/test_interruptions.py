"""A run that is stopped again and again, each time in another way, becomes the run that was never stopped."""

import os
import re
import signal
from pathlib import Path
from typing import NamedTuple

import pytest
from distributed.ranks import read_metrics
from reliability.conftest import EVAL_INTERVAL, ITERATIONS, LAUNCH_FAULTY, Start
from reliability.states import assert_same_state, names_in, progress_of

LAST = f"iter_{ITERATIONS:07d}"


class Ended(NamedTuple):
    """How one start of several ended."""

    code: int
    output: str
    iteration: int  # of the newest checkpoint then


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("interrupted")


@pytest.fixture(scope="module")
def starts(start: Start, run: Path) -> dict[str, Ended]:
    """The starts of one run: it is stopped three times and then trains to its end."""
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


@pytest.mark.slow
def test_all_ranks_end_with_the_same_weights(undisturbed):
    hashes = dict(re.findall(r"weights of rank (\d): (\w+)", (undisturbed / "output.txt").read_text()))
    assert sorted(hashes) == ["0", "1"]
    assert hashes["0"] == hashes["1"]


@pytest.mark.slow
def test_the_time_limit_on_the_clock_of_one_rank_stops_all_of_them_after_the_same_saved_iteration(starts):
    code, output, iteration = starts["time limit"]
    assert (code, iteration) == (75, 7), output
    assert f"stopped after iteration 7 of {ITERATIONS}: --exit-duration-in-mins" in output


@pytest.mark.slow
def test_a_signal_to_one_rank_while_a_checkpoint_is_written_in_the_background_completes_it_and_saves_again(starts):
    code, output, iteration = starts["background save"]
    assert code == 75, output
    saved = [int(number) for number in re.findall(r"saved .*/iter_(\d+)", output)]
    first = int(re.search(r"saving .*/iter_(\d+) in the background", output)[1])
    assert (saved[0], saved[-1]) == (first, iteration)
    assert first < iteration
    assert f"stopped after iteration {iteration} of {ITERATIONS}: a signal asked for it" in output


@pytest.mark.slow
def test_a_signal_to_one_rank_during_validation_stops_without_waiting_for_its_end(starts):
    code, output, iteration = starts["validation"]
    assert (code, iteration) == (75, EVAL_INTERVAL), output
    assert f"stopped after iteration {EVAL_INTERVAL} of {ITERATIONS}: a signal asked for it" in output
    assert "validation loss" not in output


@pytest.mark.slow
def test_an_interrupted_validation_is_made_up_for_and_the_curve_has_every_point(starts, run, undisturbed):
    output = starts["to the end"].output
    assert output.index(f"iteration {EVAL_INTERVAL}/{ITERATIONS} | validation loss") < output.index(
        f"iteration {EVAL_INTERVAL + 1}/"
    )
    expected = read_metrics(undisturbed, "validation_loss")
    assert sorted(expected) == [EVAL_INTERVAL, ITERATIONS]
    assert read_metrics(run, "validation_loss") == expected


@pytest.mark.slow
def test_a_run_that_was_stopped_three_times_ends_bit_for_bit_like_one_that_was_not(starts, run, undisturbed):
    assert starts["to the end"].code == 0, starts["to the end"].output
    assert_same_state(run / LAST, undisturbed / LAST)
    for key in ("loss", "grad_norm", "consumed_tokens"):
        assert read_metrics(run, key) == read_metrics(undisturbed, key), key


@pytest.mark.slow
def test_states_that_differ_by_one_save_interval_are_told_apart(undisturbed):
    """The control of every comparison here."""
    with pytest.raises(AssertionError):
        assert_same_state(undisturbed / "iter_0000250", undisturbed / LAST)


@pytest.mark.slow
def test_a_signal_during_imports_ends_the_run_with_75_before_anything_is_written(start, tmp_path):
    with start(tmp_path) as training:
        training.wait_until(lambda: imports_torch(training, rank=1))
        os.kill(training.rank(1), signal.SIGTERM)
        assert training.finish() == 75, training.output
    assert "rank 1: stopped by SIGTERM before the first iteration" in training.output
    assert "Traceback" not in training.output
    assert names_in(tmp_path) == set()


def imports_torch(training, *, rank: int) -> bool:
    """Whether that process exists and has got as far as loading torch's library, which takes it seconds."""
    try:
        return "libtorch_cpu" in Path(f"/proc/{training.rank(rank)}/maps").read_text()
    except (StopIteration, OSError):
        return False


@pytest.mark.slow
def test_files_save_now_and_stop_a_run_that_does_not_start_again_while_stop_is_there(start, tmp_path):
    endless = ("--train-iters", 100_000, "--save-interval", 100_000, "--eval-iters", 0)
    with start(tmp_path, *endless) as training:
        training.wait_for("iteration 1/")
        (tmp_path / "SAVE_NOW").touch()
        saved = training.wait_for("saved ")
        training.wait_until(lambda: not (tmp_path / "SAVE_NOW").exists())
        (tmp_path / "STOP").touch()
        assert training.finish() == 75, training.output
    (first, last) = re.findall(r"saved .*/(iter_\d+)", training.output)
    assert first in saved
    assert names_in(tmp_path) == {first, last, "STOP", "latest_checkpointed_iteration.txt"}
    assert progress_of(tmp_path / last)["iteration"] > progress_of(tmp_path / first)["iteration"]

    with start(tmp_path, *endless) as training:
        assert training.finish() == 2, training.output
    assert f"{tmp_path / 'STOP'}" in training.output
    assert training.output.startswith("error: ")
    assert len(training.lines) == 1
