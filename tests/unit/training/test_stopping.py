"""What a stop signal does to a rank and to a launcher that wait in C++, where Python calls no handler."""

import signal
import subprocess
import sys
import time

import pytest
from torch.distributed import TCPStore

from megatron_neobert.config import TrainingConfig
from megatron_neobert.training import stopping

WAIT_FOR_RANK_1 = """
import torch
store = torch.distributed.TCPStore("127.0.0.1", {port}, is_master=False, wait_for_workers=False)
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=2)
"""
RANK = "from megatron_neobert.training import stopping; stopping.install_signal_handlers()"
LAUNCHER = "from megatron_neobert import launch; launch._install_signal_handlers()"


def end_while_waiting(prepare: str, number: signal.Signals) -> tuple[int, str]:
    """Exit code and stderr of a process that gets a signal while gloo waits for a rank that never comes."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with subprocess.Popen(
        [sys.executable, "-c", prepare + WAIT_FOR_RANK_1.format(port=store.port)], stderr=subprocess.PIPE, text=True
    ) as process:
        while store.num_keys() == 0 and process.poll() is None:  # its address, the last thing before the wait
            time.sleep(0.05)
        process.send_signal(number)
        try:
            _, said = process.communicate(timeout=20)
        finally:
            process.kill()
    return process.returncode, said


@pytest.mark.parametrize("number", stopping.STOP_SIGNALS, ids=lambda number: number.name)
def test_rank_that_waits_for_another_ends_with_75_at_a_stop_signal(number):
    code, said = end_while_waiting(RANK, number)
    assert (code, said) == (75, f"rank 0: stopped by {number.name} before the first iteration\n")


def test_launcher_that_waits_for_another_in_torchrun_ends_with_75_at_a_stop_signal():
    code, said = end_while_waiting(LAUNCHER, signal.SIGTERM)
    assert (code, said) == (75, "stopped by SIGTERM while no rank was running\n")


def test_signal_after_the_process_group_stands_is_remembered():
    prepare = f"{RANK}; stopping.remember_signals(); import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    ask = "from megatron_neobert.config import TrainingConfig as T; print(stopping.stop_code_of_this_rank(T()))"
    finished = subprocess.run([sys.executable, "-c", f"{prepare}; {ask}"], capture_output=True, text=True, check=True)
    reason = stopping.reason_to_stop(TrainingConfig(), iteration=1, agreed_code=int(finished.stdout))
    assert reason == "a signal asked for it"
