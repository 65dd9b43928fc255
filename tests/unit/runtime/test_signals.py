"""Stop signals, the file STOP and the time limit; also while a process waits in C++ and Python calls no handler."""

import os
import signal
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import Mock

import processes
import pytest
import torch
from torch.distributed import TCPStore

from megatron_neobert.config.schema import CheckpointConfig, Settings, TrainingConfig
from megatron_neobert.runtime import signals


def rank_in_a_group() -> None:
    signals.install_signal_handlers()
    signals.finish_iteration_at_signals()


def wait_for_rank_1(prepare: Callable[[], None], port: int) -> None:
    prepare()
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=2)


def end_while_waiting(prepare: Callable[[], None], *numbers: signal.Signals) -> tuple[int | None, str]:
    """Send signals to a process whose gloo waits for a rank that never joins. Return its exit code and output.

    The process calls `prepare` first. It prints a line at each signal, and the next signal is sent after this line.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    reader, writer = os.pipe()
    call = processes._Call(wait_for_rank_1, (prepare, store.port), dict(os.environ), (writer, writer))
    processes.use_server()
    process = get_context("forkserver").Process(target=call)
    process.start()
    os.close(writer)
    # gloo stores its address just before it waits.
    while store.num_keys() == 0 and process.is_alive():
        time.sleep(0.05)
    with os.fdopen(reader) as output:
        lines = []
        for number in numbers:
            os.kill(process.pid, number)
            lines.append(output.readline())
        lines.append(output.read())
    process.join()
    return process.exitcode, "".join(lines)


@pytest.mark.parametrize("number", signals.STOP_SIGNALS, ids=lambda number: number.name)
def test_stop_signal_ends_a_rank_that_waits_for_another_rank_with_75(number):
    ended = end_while_waiting(signals.install_signal_handlers, number)
    assert ended == (75, f"rank 0: stopped by {number.name} before the first iteration\n")


def test_stop_signal_ends_a_launcher_that_waits_for_another_node_with_75():
    ended = end_while_waiting(signals.forward_stop_signals, signal.SIGTERM)
    assert ended == (75, "stopped by SIGTERM while no rank was running\n")


def test_second_interrupt_aborts_a_rank_that_waits_for_another_rank():
    first = "stopping after this iteration, then saving if there is --save; Ctrl-C again stops at once without saving\n"
    ended = end_while_waiting(rank_in_a_group, signal.SIGINT, signal.SIGINT)
    assert ended == (130, f"{first}rank 0: aborted\n")


@pytest.mark.parametrize(
    ("local_rank", "launcher", "announces"),
    [("0", "none", True), ("1", "none", False), ("0", signals.LAUNCHER_ID, False)],
    ids=["first rank of torchrun", "another rank of torchrun", "launcher of this project"],
)
def test_one_ctrl_c_is_announced_by_one_rank_or_by_the_launcher(monkeypatch, local_rank, launcher, announces):
    """The test above has the announcement of a single rank."""
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", launcher)
    monkeypatch.setattr(signals, "_announce_stop", announce := Mock())
    monkeypatch.setattr(signals, "_signals_received", [])
    monkeypatch.setattr(signals._group_is_formed, "is_set", lambda: True)
    signals._handle(signal.SIGINT)
    assert announce.called == announces


def receive_sigterm_and_one_interrupt() -> None:
    rank_in_a_group()
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
    while len(signals._signals_received) < 2:
        time.sleep(0.01)
    assert reason_of(signals.requested_stop(Settings())) == "a stop signal was received"


def test_sigterm_and_one_interrupt_request_a_stop_and_do_not_abort():
    """A rank receives both for one Ctrl-C: from the terminal, and as SIGTERM from its launcher."""
    processes.run_on_ranks(receive_sigterm_and_one_interrupt, world_size=1)


def saving_to(folder: Path) -> Settings:
    return Settings(checkpoint=CheckpointConfig(save=str(folder)))


def reason_of(code: int, *, iteration: int = 1) -> str | None:
    return signals.reason_to_stop(TrainingConfig(), iteration=iteration, agreed_code=code)


def test_stop_file_and_time_limit_are_requests_to_stop(tmp_path, monkeypatch):
    """Only rank 0 checks the file, and the limit is ignored before the first iteration of a start."""
    settings = saving_to(tmp_path).with_section("training", exit_duration_in_mins=0.0)
    assert reason_of(signals.requested_stop(saving_to(tmp_path))) is None
    assert reason_of(signals.requested_stop(settings)) == "--exit-duration-in-mins is reached"
    assert reason_of(signals.requested_stop(settings, has_trained=False)) is None
    (tmp_path / "STOP").touch()
    code = signals.requested_stop(saving_to(tmp_path))
    assert reason_of(code) == "the file STOP exists in --save"
    assert reason_of(code, iteration=TrainingConfig().train_iters) is None, "the last iteration"
    monkeypatch.setenv("RANK", "1")
    assert reason_of(signals.requested_stop(saving_to(tmp_path))) is None
