"""Runs that are stopped, or whose newest checkpoints are damaged, end with the state of an undisturbed run."""

import errno
import os
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ranks import read_metrics, train_on_ranks
from reliability.states import assert_same_state
from tests_tiny import ITERATIONS

from megatron_neobert.checkpoint import folder
from megatron_neobert.checkpoint import save as saver
from megatron_neobert.checkpoint.folder import iteration_folder, list_checkpoints
from megatron_neobert.runtime import signals
from megatron_neobert.training import loop


def on_rank_1(name: str, act: Callable[[], None], *, before_iteration: int) -> None:
    """Let rank 1 call `act` before a function of the training loop, in its first call at this iteration or later."""
    signals.install_signal_handlers()
    function, calls = getattr(loop, name), []

    def act_once(run: Any, *arguments: Any) -> Any:
        if os.environ["RANK"] == "1" and run.state.iteration + 1 >= before_iteration and not calls:
            calls.append(act())
        return function(run, *arguments)

    setattr(loop, name, act_once)


def reach_the_time_limit() -> None:
    def set_clock_ahead() -> None:
        signals._started_seconds -= 3600

    on_rank_1("train_step", set_clock_ahead, before_iteration=2)


def receive_a_signal_in_a_background_save() -> None:
    """Rank 1 writes its files of iteration 3 once it has received the signal, in the step of iteration 4."""
    on_rank_1("train_step", lambda: os.kill(os.getpid(), signal.SIGUSR1), before_iteration=4)
    write = saver._write

    def write_later(*arguments: Any) -> Any:
        while os.environ["RANK"] == "1" and not signals._signals_received:
            time.sleep(0.001)
        return write(*arguments)

    saver._write = write_later


def receive_a_signal_in_validation() -> None:
    on_rank_1("validation_step", lambda: os.kill(os.getpid(), signal.SIGTERM), before_iteration=6)


def test_run_stopped_three_times_equals_the_undisturbed_run_bit_for_bit(settings, capfd):
    """One rank sees each reason to stop, and all ranks stop after the same iteration."""
    whole, run = (
        settings(name, training={"eval_interval": 5, "exit_duration_in_mins": 60}) for name in ("whole", "run")
    )
    run = run.with_section("checkpoint", save_interval=3, async_save=True)
    train_on_ranks(whole, world_size=2)
    stops = {
        reach_the_time_limit: (2, "--exit-duration-in-mins is reached"),
        receive_a_signal_in_a_background_save: (4, "a stop signal was received"),
        receive_a_signal_in_validation: (5, "a stop signal was received"),
    }
    for prepare, (iteration, reason) in stops.items():
        capfd.readouterr()
        train_on_ranks(run, world_size=2, prepare=prepare)
        output = capfd.readouterr().out
        assert f"stopped after iteration {iteration} of {ITERATIONS}: {reason}" in output
        saved = re.findall(r"saved .*/iter_0*(\d+)", output)
        assert saved == (["3", "4"] if iteration == 4 else [str(iteration)])
        assert "validation loss" not in output
    train_on_ranks(run, world_size=2)
    output = capfd.readouterr().out
    assert output.index("iteration 5/6 | validation loss") < output.index("iteration 6/6 | loss"), "it is repeated"
    last, expected = (iteration_folder(Path(str(each.checkpoint.save)), ITERATIONS) for each in (run, whole))
    assert_same_state(last, expected)
    for key in ("loss", "grad_norm", "consumed_tokens", "validation_loss"):
        assert read_metrics(last.parent, key) == read_metrics(expected.parent, key), key


def fail_to_read(file: Path) -> None:
    """Let a file of a checkpoint have a read error."""
    read = folder.sha256_of

    def read_or_fail(path: Path) -> str:
        if path == file:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return read(path)

    folder.sha256_of = read_or_fail


def test_damaged_checkpoints_are_named_and_renamed_and_the_run_resumes_from_an_older_one(settings, capfd):
    whole, run = (settings(name).with_section("checkpoint", save_interval=1) for name in ("whole", "run"))
    train_on_ranks(whole, world_size=2)
    train_on_ranks(run.with_section("training", exit_interval=5), world_size=2)
    save = Path(run.checkpoint.save)
    unreadable, truncated = (min(each.glob("*.safetensors")) for each in list_checkpoints(save)[:2])
    size = truncated.stat().st_size
    os.truncate(truncated, size // 2)
    capfd.readouterr()
    train_on_ranks(run, world_size=2, prepare=partial(fail_to_read, unreadable))
    output = capfd.readouterr().out
    assert f"warning: skipped an unreadable checkpoint: [Errno 5] Input/output error: '{unreadable}'\n" in output
    (warning,) = re.findall("warning: skipped a damaged checkpoint: (.*)", output)
    assert warning.startswith(f"{truncated}: {size // 2} bytes, expected {size};")
    assert warning.endswith("It is now iter_0000004.damaged.")
    assert f"from {save}/iter_0000003" in output
    assert (save / "iter_0000004.damaged").is_dir() and (save / "iter_0000004").is_dir()
    last, expected = (iteration_folder(Path(each.checkpoint.save), ITERATIONS) for each in (run, whole))
    assert_same_state(last, expected)
    with pytest.raises(AssertionError):  # the control
        assert_same_state(iteration_folder(save, ITERATIONS - 1), expected)
