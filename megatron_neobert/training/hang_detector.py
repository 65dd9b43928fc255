"""Hang detector: ends a run that makes no progress, with exit code 69, and reports the rank at fault.

In each rank, one thread writes a heartbeat to the store once a second. Another thread ends the process when the main
thread has made no progress for --distributed-timeout-minutes, or for some seconds after another rank has ended or
fallen silent.
"""

import contextlib
import faulthandler
import os
import threading
import time
from functools import partial
from typing import Any

import torch

from megatron_neobert.config.schema import ParallelConfig
from megatron_neobert.errors import EXIT_UNAVAILABLE
from megatron_neobert.runtime import signals
from megatron_neobert.runtime.distributed import is_lost_connection, pending_collective
from megatron_neobert.runtime.store import connect_to_store
from megatron_neobert.text import listed, visible
from megatron_neobert.training.heartbeats import ANSWER_SECONDS, HAS_ENDED, LOST_ANOTHER, Heartbeats

_TICK_SECONDS = 1.0  # between heartbeats, and between checks
_FAREWELL_SECONDS = 5.0  # time for the rank that failed first to end first


class HangDetector:
    """A context manager that watches the training loop of this rank.

    Needs the process group and torchrun's environment variables. Inside the block, the main thread must call `mark` and
    `tick`.
    """

    def __init__(self, parallel: ParallelConfig) -> None:
        self._limit_seconds = 60.0 * parallel.distributed_timeout_minutes
        # A separate connection, because the main thread may block the connection of the process group.
        store = connect_to_store("heartbeats", timeout_seconds=ANSWER_SECONDS)
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.heartbeats = Heartbeats(store, rank=rank, ranks=ranks)
        self._position = "iteration 0 (loading)"
        self._progress = 0
        self._leaving = threading.Event()

    def mark(self, activity: str, iteration: int) -> None:
        """Record what the run does next. All ranks must make the same calls."""
        self._position = f"iteration {iteration} ({activity})"
        self._progress += 1

    def tick(self) -> None:
        """Record progress within an activity that may exceed the time limit. All ranks must make the same calls."""
        self._progress += 1

    def __enter__(self) -> "HangDetector":
        faulthandler.enable()  # prints the Python stack if a library crashes
        for target in (self._beat, self._watch):
            threading.Thread(target=target, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """End this process with exit code 69 if it lost another rank. Report any other error to the other ranks."""
        reason = (str(error).splitlines() or [""])[0][:200]
        if isinstance(error, Exception) and is_lost_connection(error):
            self._end_run(reason)
        self._leaving.set()  # stop the heartbeat thread, which would overwrite the report
        if isinstance(error, Exception):
            signals.call_with_timeout(ANSWER_SECONDS, partial(self._write, f"{type(error).__name__}: {reason}"))

    def _beat(self) -> None:
        # If the store does not answer, the machine with the store is lost, and the next collective fails.
        with contextlib.suppress(torch.distributed.DistError):
            while not self._leaving.is_set():
                self._write()
                self._leaving.wait(_TICK_SECONDS)

    def _watch(self) -> None:
        progress, waited_seconds, checked = self._progress, 0.0, time.monotonic()
        while not self._leaving.wait(_TICK_SECONDS):
            # Time in which the process was suspended does not count, hence the limit of five ticks.
            waited_seconds += min(time.monotonic() - checked, 5 * _TICK_SECONDS)
            checked = time.monotonic()
            is_rank_lost = signals.call_with_timeout(ANSWER_SECONDS, self.heartbeats.is_rank_lost)
            if self._progress != progress:
                progress, waited_seconds = self._progress, 0.0
            elif waited_seconds >= self._limit_seconds:
                self._end_run(is_hang=True)
            elif is_rank_lost and waited_seconds >= _FAREWELL_SECONDS:
                self._end_run()

    def _end_run(self, error: str = "", *, is_hang: bool = False) -> None:
        """Report the rank at fault and exit with code 69. Without `error`, return if the run has made progress.

        Args:
            error: Message of the exception that ends this rank.
            is_hang: The time limit has passed.
        """
        progress, suspects = self._progress, self.heartbeats.find_suspects(self._progress)
        if not error and (self._progress != progress or self._leaving.is_set()):
            return
        self._leaving.set()
        name = self.heartbeats.name
        cause = listed(f"{suspect} {reason}" for suspect, reason in suspects.items())
        cause = cause or error or "all heartbeats are alike"
        text, remedy = f"error: {name} lost another rank in {self._position}", ""
        if is_hang and not any(reason.startswith(HAS_ENDED) for reason in suspects.values()):
            collective = signals.call_with_timeout(ANSWER_SECONDS, pending_collective)
            position = f"{self._position}, collective {collective}" if collective else self._position
            text = f"error: no progress for {self._limit_seconds / 60:g} min on {name} in {position}"
            remedy = ", or raise --distributed-timeout-minutes"
        text += f": {cause}. The last checkpoint is untouched: start again with the same command{remedy}.\n"
        # One rank of each machine reports, so that each log has the message once. Only the rank at fault prints stacks.
        if signals.call_with_timeout(ANSWER_SECONDS, self.heartbeats.count_report) in (1, None):
            signals.write_to_stderr(visible(text, keep="\n"))
        if not suspects or name in suspects:
            # Written by a C thread, because the reader of our output may hang.
            faulthandler.dump_traceback_later(0.1)
        received = signals.count_signals()
        signals.call_with_timeout(ANSWER_SECONDS, partial(self._write, LOST_ANOTHER))
        # torchrun reports the rank of its machine that ends first and then sends signals to the others, so wait for a
        # rank at fault on this machine to end.
        until = time.monotonic() + _FAREWELL_SECONDS
        while time.monotonic() < until and signals.count_signals() == received:
            time.sleep(0.1)
        os._exit(EXIT_UNAVAILABLE)  # a regular exit would wait for threads that hang

    def _write(self, ended: str = "") -> None:
        self.heartbeats.write(self._position, self._progress, ended)
