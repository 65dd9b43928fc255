"""Hang detector: ends a run that makes no progress, with exit code 69, and reports the rank at fault.

In each rank, one thread writes a heartbeat to the store once a second. Another thread ends the process when the main
thread has made no progress for --distributed-timeout-minutes, or for some seconds after another rank has ended with an
error.
"""

import contextlib
import faulthandler
import json
import os
import socket
import threading
import time
from functools import partial
from typing import Any, NamedTuple

import torch

from megatron_neobert.config.schema import ParallelConfig
from megatron_neobert.errors import EXIT_UNAVAILABLE
from megatron_neobert.runtime import signals
from megatron_neobert.runtime.distributed import is_lost_connection, pending_collective
from megatron_neobert.runtime.store import connect_to_store
from megatron_neobert.text import listed, parse_json, visible

_TICK_SECONDS = 1.0  # between heartbeats, and between checks
_SILENCE_SECONDS = 3.0  # a living rank writes a heartbeat in this time
_ANSWER_SECONDS = 10.0  # for the store, or the reader of our output, which may hang, too
_FAREWELL_SECONDS = 5.0  # time for the rank that failed first to end first
_LOST_ANOTHER = "it lost another rank"  # reason of a rank that ended because another rank did


class Heartbeat(NamedTuple):
    """Latest state of a rank. Has no time stamps, because clocks of different machines differ."""

    name: str  # rank and host
    position: str  # such as "iteration 5 (training)"
    progress: int  # calls of `mark` and `tick`, which are the same on all ranks
    number: int  # number of this heartbeat
    ended: str = ""  # reason why the rank has ended


class HangDetector:
    """A context manager that watches the training loop of this rank.

    Needs the process group and torchrun's environment variables. Inside the block, the main thread must call `mark` and
    `tick`.
    """

    def __init__(self, parallel: ParallelConfig) -> None:
        self._limit_seconds = 60.0 * parallel.distributed_timeout_minutes
        self._rank, self._ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self._name = f"rank {self._rank} ({socket.gethostname()})"
        # A separate connection, because the main thread may block the connection of the process group.
        self._store = connect_to_store("heartbeats", timeout_seconds=_ANSWER_SECONDS)
        self._position = "iteration 0 (loading)"
        self._progress = self._number = 0
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
            signals.call_with_timeout(_ANSWER_SECONDS, partial(self._write, f"{type(error).__name__}: {reason}"))

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
            another_ended = signals.call_with_timeout(_ANSWER_SECONDS, partial(self._store.check, ["ended"]))
            if self._progress != progress:
                progress, waited_seconds = self._progress, 0.0
            elif waited_seconds >= (_FAREWELL_SECONDS if another_ended else self._limit_seconds):
                self._end_run()

    def _end_run(self, error: str = "") -> None:
        """Report the rank at fault and exit with code 69. Without `error`, return if the run has made progress."""
        progress, suspects = self._progress, self._find_suspects()
        if not error and (self._progress != progress or self._leaving.is_set()):
            return
        self._leaving.set()
        cause = listed(f"{beat.name} {reason}" for beat, reason in suspects) or error or "all heartbeats are alike"
        text, remedy = f"error: {self._name} lost another rank in {self._position}", ""
        if not error and not any(beat.ended for beat, _ in suspects):
            collective = signals.call_with_timeout(_ANSWER_SECONDS, pending_collective)
            position = f"{self._position}, collective {collective}" if collective else self._position
            text = f"error: no progress for {self._limit_seconds / 60:g} min on {self._name} in {position}"
            remedy = ", or raise --distributed-timeout-minutes"
        text += f": {cause}. The last checkpoint is untouched: start again with the same command{remedy}.\n"
        # One rank of each machine reports, so that each log has the message once. Only the rank at fault prints stacks.
        count = partial(self._store.add, f"reports/{socket.gethostname()}", 1)
        if signals.call_with_timeout(_ANSWER_SECONDS, count) in (1, None):
            signals.write_to_stderr(visible(text, keep="\n"))
        if not suspects or any(beat.name == self._name for beat, _ in suspects):
            # Written by a C thread, because the reader of our output may hang.
            faulthandler.dump_traceback_later(0.1)
        received = signals.count_signals()
        signals.call_with_timeout(_ANSWER_SECONDS, partial(self._write, _LOST_ANOTHER))
        # torchrun reports the rank that ends first and then sends signals to the other ranks, so wait for the rank at
        # fault to end.
        until = time.monotonic() + (_FAREWELL_SECONDS if self._ranks > 1 else 1.0)
        while time.monotonic() < until and signals.count_signals() == received:
            time.sleep(0.1)
        os._exit(EXIT_UNAVAILABLE)  # a regular exit would wait for threads that hang

    def _find_suspects(self) -> list[tuple[Heartbeat, str]]:
        """Return the ranks at fault and the reasons. These ranks have failed or are silent, or else are behind others.

        A rank is silent if it writes no heartbeat for 3 seconds. The result is empty if all ranks are alike, or if the
        store does not answer.
        """
        numbers = {beat.name: beat.number for beat in signals.call_with_timeout(_ANSWER_SECONDS, self._read) or []}
        time.sleep(_SILENCE_SECONDS)
        beats: list[Heartbeat] = signals.call_with_timeout(_ANSWER_SECONDS, self._read) or []
        ended = [(beat, f"has ended: {beat.ended}") for beat in beats if beat.ended not in ("", _LOST_ANOTHER)]
        silent = [beat for beat in beats if not beat.ended and numbers.get(beat.name) == beat.number]
        if ended or silent:
            return ended + [(beat, f"does not answer, last heartbeat in {beat.position}") for beat in silent]
        # Ranks that ended because of another rank are included: they show how far the run had come.
        progress = [beat.progress for beat in beats]
        return [
            (beat, f"is behind in {beat.position}") for beat in beats if beat.progress == min(progress) < max(progress)
        ]

    def _write(self, ended: str = "") -> None:
        self._number += 1
        heartbeat = Heartbeat(self._name, self._position, self._progress, self._number, ended)
        self._store.set(f"rank/{self._rank}", json.dumps(heartbeat))
        if ended not in ("", _LOST_ANOTHER):
            self._store.set("ended", str(self._rank))

    def _read(self) -> list[Heartbeat]:
        """Return the latest heartbeat of each rank that has written one."""
        keys = [key for rank in range(self._ranks) if self._store.check([key := f"rank/{rank}"])]
        return [Heartbeat(*parse_json(text)) for text in self._store.multi_get(keys)]
