"""Stop signals, also while a rank or a launcher waits in C++, where Python calls no handler; and the two stop files."""

import errno
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from megatron_neobert.config.schema import CheckpointConfig, Settings, TrainingConfig
from megatron_neobert.runtime import signals

WAIT_FOR_RANK_1 = """
import torch
store = torch.distributed.TCPStore("127.0.0.1", {port}, is_master=False, wait_for_workers=False)
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=2)
"""
RANK = "from megatron_neobert.runtime import signals; signals.install_signal_handlers()"
REMEMBERING_RANK = f"{RANK}; signals.remember_signals()"
LAUNCHER = "from megatron_neobert.runtime import signals; signals.pass_on_stop_signals()"


def end_while_waiting(prepare: str, *numbers: signal.Signals, answers: Sequence[str] = ()) -> tuple[int, str]:
    """Exit code and last words of a process that gets signals while gloo waits for a rank that never comes.

    Args:
        answers: What it says to every signal but the last.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with subprocess.Popen(
        [sys.executable, "-c", prepare + WAIT_FOR_RANK_1.format(port=store.port)], stderr=subprocess.PIPE, text=True
    ) as process:
        while store.num_keys() == 0 and process.poll() is None:  # its address, the last thing before the wait
            time.sleep(0.05)
        assert process.stderr is not None
        for number, answer in zip(numbers, [*answers, None], strict=True):
            process.send_signal(number)
            while answer is not None and answer not in process.stderr.readline():
                assert process.poll() is None
        try:
            _, said = process.communicate(timeout=600)
        finally:
            process.kill()
    return process.returncode, said


@pytest.mark.parametrize("number", signals.STOP_SIGNALS, ids=lambda number: number.name)
def test_rank_that_waits_for_another_ends_with_75_at_a_stop_signal(number):
    code, said = end_while_waiting(RANK, number)
    assert (code, said) == (75, f"rank 0: stopped by {number.name} before the first iteration\n")


def test_launcher_that_waits_for_another_in_torchrun_ends_with_75_at_a_stop_signal():
    code, said = end_while_waiting(LAUNCHER, signal.SIGTERM)
    assert (code, said) == (75, "stopped by SIGTERM while no rank was running\n")


def test_second_interrupt_aborts_a_rank_that_waits_for_another():
    code, said = end_while_waiting(
        REMEMBERING_RANK,
        signal.SIGINT,
        signal.SIGINT,
        answers=["stopping after this iteration, with a checkpoint; Ctrl-C again aborts at once, without one"],
    )
    assert (code, said) == (130, "rank 0: aborted\n")


def test_one_interrupt_that_comes_with_another_signal_does_not_abort():
    """As when a launcher passes on as SIGTERM a Ctrl-C that the rank has received itself."""
    send = "import os, signal, time; [os.kill(os.getpid(), n) for n in (signal.SIGTERM, signal.SIGINT)]"
    wait = "\nwhile len(signals._signals_answered) < 2: time.sleep(0.01)"
    command = [sys.executable, "-c", f"{REMEMBERING_RANK}; {send}{wait}"]
    assert subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode == 0


@pytest.fixture(autouse=True)
def _no_look_of_an_earlier_test(monkeypatch) -> None:
    monkeypatch.setattr(signals, "_files", signals._Files(folder=Path()))


def saving_to(folder: Path) -> Settings:
    return Settings(checkpoint=CheckpointConfig(save=str(folder)))


def reason_of(code: int, *, iteration: int = 1) -> str | None:
    return signals.reason_to_stop(TrainingConfig(), iteration=iteration, agreed_code=code)


def test_signal_after_the_process_group_stands_is_remembered():
    prepare = f"{RANK}; signals.remember_signals(); import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    ask = "from megatron_neobert.config.schema import Settings; print(signals.requests_of_this_rank(Settings())[0])"
    finished = subprocess.run([sys.executable, "-c", f"{prepare}; {ask}"], capture_output=True, text=True, check=True)
    assert reason_of(int(finished.stdout)) == "a signal asked for it"


def test_nothing_is_requested_without_signal_limit_and_file(tmp_path):
    assert signals.requests_of_this_rank(saving_to(tmp_path)) == (0, 0)
    assert reason_of(0) is None


def test_stop_file_and_time_limit_are_requests_to_stop(tmp_path):
    settings = saving_to(tmp_path).with_section("training", exit_duration_in_mins=0.0)
    code, _ = signals.requests_of_this_rank(settings)
    assert reason_of(code) == "--exit-duration-in-mins is over"
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "STOP").touch()
    code, _ = signals.requests_of_this_rank(saving_to(tmp_path / "second"))
    assert reason_of(code) == "the file STOP in --save asked for it"
    assert reason_of(code, iteration=TrainingConfig().train_iters) is None, "the run has ended by itself"


def test_files_are_seen_by_rank_0_alone(tmp_path, monkeypatch):
    for name in ("STOP", "SAVE_NOW"):
        (tmp_path / name).touch()
    monkeypatch.setenv("RANK", "1")
    assert signals.requests_of_this_rank(saving_to(tmp_path)) == (0, 0)


def test_save_request_stays_until_its_checkpoint_is_there_and_is_not_made_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(signals, "_SECONDS_BETWEEN_LOOKS", 0.0)
    settings, request = saving_to(tmp_path), tmp_path / "SAVE_NOW"
    request.touch()
    assert signals.requests_of_this_rank(settings) == (0, 1)
    signals.take_save_request()
    assert signals.requests_of_this_rank(settings) == (0, 0), "the checkpoint is being written"
    assert request.exists()
    signals.fulfil_save_request(tmp_path)
    assert not request.exists()
    request.touch()
    assert signals.requests_of_this_rank(settings) == (0, 1)


def test_save_that_nobody_asked_for_leaves_a_request_that_comes_meanwhile(tmp_path, monkeypatch):
    monkeypatch.setattr(signals, "_SECONDS_BETWEEN_LOOKS", 0.0)
    settings, request = saving_to(tmp_path), tmp_path / "SAVE_NOW"
    assert signals.requests_of_this_rank(settings) == (0, 0)
    signals.take_save_request()
    request.touch()
    signals.fulfil_save_request(tmp_path)
    assert signals.requests_of_this_rank(settings) == (0, 1)


def test_file_system_that_does_not_answer_asks_for_nothing(tmp_path, monkeypatch):
    def fail(path: Path, **_: object) -> bool:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Path, "exists", fail)
    assert signals.requests_of_this_rank(saving_to(tmp_path)) == (0, 0)


def test_time_limit_does_not_count_before_the_first_iteration_of_a_start(tmp_path):
    settings = saving_to(tmp_path).with_section("training", exit_duration_in_mins=0.0)
    assert signals.requests_of_this_rank(settings, has_trained=False) == (0, 0)
