"""Ends a run that makes no progress with 69, and names the rank that holds it up.

A thread of each rank writes a heartbeat to the store by which the ranks found each other, once a second. Another thread
ends the process when the main thread has made no progress for --distributed-timeout-minutes, or for some seconds after
another rank has written that it ended.
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

_TICK_SECONDS = 1.0  # between heartbeats, and between looks at the others'
_SILENCE_SECONDS = 3.0  # three heartbeats missed: a living rank has written one
_ANSWER_SECONDS = 10.0  # of the store or a reader of our output, each of which may hang as well
_FAREWELL_SECONDS = 5.0  # that the others give the rank that has failed first
_LOST_ANOTHER = "it lost another rank"  # why a rank ended that is not the cause


class Heartbeat(NamedTuple):
    """State that a rank last wrote of itself. Clocks of different machines are never compared."""

    name: str  # rank and host
    place: str  # what the rank does, such as "iteration 5 (training)"
    progress: int  # marks and ticks so far; all ranks make the same ones
    number: int  # grows as long as the process lives
    ended: str = ""  # why the rank has left the run, by its own account


class HangDetector:
    """Watches the run while it is entered. Needs the process group, and the addresses in torchrun's environment."""

    def __init__(self, parallel: ParallelConfig) -> None:
        self._limit_seconds = 60.0 * parallel.distributed_timeout_minutes
        self._rank, self._ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self._name = f"rank {self._rank} ({socket.gethostname()})"
        # A connection of its own: the main thread may wait for an answer on the other one.
        self._store = connect_to_store("heartbeats", timeout_seconds=_ANSWER_SECONDS)
        self._place = "iteration 0 (loading)"
        self._progress = self._number = 0
        self._leaving = threading.Event()

    def mark(self, phase: str, iteration: int) -> None:
        """Note what the run does next. The main threads of all ranks make the same calls."""
        self._place = f"iteration {iteration} ({phase})"
        self._progress += 1

    def tick(self) -> None:
        """Note progress within a phase: an iteration may take longer than the limit."""
        self._progress += 1

    def __enter__(self) -> "HangDetector":
        faulthandler.enable()  # the line of Python at which a library crashes
        for target in (self._beat, self._watch):
            threading.Thread(target=target, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """End the rank with 69 if it lost another rank. Report any other error to the other ranks."""
        reason = (str(error).splitlines() or [""])[0][:200]
        if isinstance(error, Exception) and is_lost_connection(error):
            self._end_run(reason)
        self._leaving.set()  # the thread's heartbeat must not replace the last one
        if isinstance(error, Exception):
            signals.ask_within(_ANSWER_SECONDS, partial(self._write, f"{type(error).__name__}: {reason}"))

    def _beat(self) -> None:
        # Without an answer the machine with the store has gone; so has the run, as the next collective shows.
        with contextlib.suppress(torch.distributed.DistError):
            while not self._leaving.is_set():
                self._write()
                self._leaving.wait(_TICK_SECONDS)

    def _watch(self) -> None:
        seen, waited_seconds, looked = self._progress, 0.0, time.monotonic()
        while not self._leaving.wait(_TICK_SECONDS):
            # A process that was stopped has not waited meanwhile: hence no more than some ticks at a time.
            waited_seconds += min(time.monotonic() - looked, 5 * _TICK_SECONDS)
            looked = time.monotonic()
            another_ended = signals.ask_within(_ANSWER_SECONDS, partial(self._store.check, ["ended"]))
            if self._progress != seen:
                seen, waited_seconds = self._progress, 0.0
            elif waited_seconds >= (_FAREWELL_SECONDS if another_ended else self._limit_seconds):
                self._end_run()

    def _end_run(self, error: str = "") -> None:
        """End this rank and name the rank at fault; without an error, return if there is progress after all."""
        seen, suspects = self._progress, self._find_suspects()
        if not error and (self._progress != seen or self._leaving.is_set()):
            return
        self._leaving.set()
        named = listed(f"{beat.name} {why}" for beat, why in suspects) or error or "all heartbeats are alike"
        text, remedy = f"error: {self._name} lost another rank in {self._place}", ""
        if not error and not any(beat.ended for beat, _ in suspects):
            name = signals.ask_within(_ANSWER_SECONDS, pending_collective)
            where = f"{self._place}, collective {name}" if name else self._place
            text = f"error: no progress for {self._limit_seconds / 60:g} min on {self._name} in {where}"
            remedy = ", or raise --distributed-timeout-minutes"
        text += f": {named}. The last checkpoint is untouched: start again with the same command{remedy}.\n"
        # One rank of each machine reports, so that each log has the sentence once; the stacks are those of the culprit.
        count = partial(self._store.add, f"reports/{socket.gethostname()}", 1)
        if signals.ask_within(_ANSWER_SECONDS, count) in (1, None):
            signals.ask_within(_ANSWER_SECONDS, partial(signals.write_to_stderr, visible(text, keep="\n")))
        if not suspects or any(beat.name == self._name for beat, _ in suspects):
            faulthandler.dump_traceback_later(0.1)  # from C: the reader of our output may hang
        received = signals.count_signals()
        signals.ask_within(_ANSWER_SECONDS, partial(self._write, _LOST_ANOTHER))
        # The rank that failed first shall also end first: torchrun reports the first end, then signals the others.
        until = time.monotonic() + (_FAREWELL_SECONDS if self._ranks > 1 else 1.0)
        while time.monotonic() < until and signals.count_signals() == received:
            time.sleep(0.1)
        os._exit(EXIT_UNAVAILABLE)  # the interpreter's own way waits for what will never come

    def _find_suspects(self) -> list[tuple[Heartbeat, str]]:
        """Return the ranks that hold the others up, and how that shows, from two looks at the heartbeats."""
        before = {beat.name: beat.number for beat in signals.ask_within(_ANSWER_SECONDS, self._read) or []}
        time.sleep(_SILENCE_SECONDS)
        after: list[Heartbeat] = signals.ask_within(_ANSWER_SECONDS, self._read) or []
        ended = [(beat, f"has ended: {beat.ended}") for beat in after if beat.ended not in ("", _LOST_ANOTHER)]
        silent = [beat for beat in after if not beat.ended and before.get(beat.name) == beat.number]
        if ended or silent:
            return ended + [(beat, f"does not answer any more, last heard of in {beat.place}") for beat in silent]
        # The ranks that have left because of another rank show how far a run had come.
        done = [beat.progress for beat in after]
        return [(beat, f"is behind in {beat.place}") for beat in after if beat.progress == min(done) < max(done)]

    def _write(self, ended: str = "") -> None:
        self._number += 1
        heartbeat = Heartbeat(self._name, self._place, self._progress, self._number, ended)
        self._store.set(f"rank/{self._rank}", json.dumps(heartbeat))
        if ended not in ("", _LOST_ANOTHER):
            self._store.set("ended", str(self._rank))

    def _read(self) -> list[Heartbeat]:
        """Return the last heartbeat of every rank that has written one."""
        keys = [key for rank in range(self._ranks) if self._store.check([key := f"rank/{rank}"])]
        return [Heartbeat(*parse_json(text)) for text in self._store.multi_get(keys)]
