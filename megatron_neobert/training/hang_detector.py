"""Ends a run that makes no progress with 69, and names the rank that holds it up.

A thread of each rank writes a heartbeat to the store by which the ranks found each other, once a second. Another thread
ends the process when the main thread has made no progress for --distributed-timeout-minutes, or for some seconds after
another rank has written that it ended. (A rank without its launcher ends by runtime/signals.py.)
"""

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
import traceback
from functools import partial
from typing import Any, NamedTuple

import torch

from megatron_neobert.config.schema import ParallelConfig
from megatron_neobert.errors import EXIT_UNAVAILABLE
from megatron_neobert.runtime import signals
from megatron_neobert.runtime.distributed import is_lost_connection, pending_collective
from megatron_neobert.runtime.store import connect_to_store
from megatron_neobert.text import parse_json, visible

_TICK_SECONDS = 1.0  # between heartbeats, and between looks at the others'
_SILENCE_SECONDS = 3.0  # three heartbeats missed: a living rank has written one
_ANSWER_SECONDS = 10.0  # of the store, a file system or a reader of our output, each of which may hang as well
_FAREWELL_SECONDS = 5.0  # that the others give the rank that has failed first
_LOST_ANOTHER = "it lost another rank"  # why a rank ended that is not the cause
_REMEDY = "The last checkpoint is untouched: start again with the same command"


class Heartbeat(NamedTuple):
    """State that a rank last wrote of itself. Clocks of different machines are never compared."""

    name: str  # rank and host
    phase: str  # what the rank does, such as "training"
    iteration: int
    progress: int  # marks and ticks so far; all ranks make the same ones
    number: int  # grows as long as the process lives
    ended: str = ""  # why the rank has left the run, by its own account

    @property
    def position(self) -> str:
        return f"iteration {self.iteration} ({self.phase})"


class HangDetector:
    """Watches the run while it is entered. Needs the process group, and the addresses in torchrun's environment."""

    def __init__(self, parallel: ParallelConfig) -> None:
        self._limit_seconds = 60.0 * parallel.distributed_timeout_minutes
        self._rank, self._host = torch.distributed.get_rank(), socket.gethostname()
        self._ranks = torch.distributed.get_world_size()
        # A connection of its own: the main thread may wait for an answer on the other one.
        self._store = None if self._ranks == 1 else connect_to_store("heartbeats", timeout_seconds=_ANSWER_SECONDS)
        self._mark = ("loading", 0)  # phase and iteration
        self._progress = self._number = 0
        self._leaving = threading.Event()

    def mark(self, phase: str, iteration: int) -> None:
        """Note what the run does next. The main threads of all ranks call this alike."""
        self._mark = (phase, iteration)
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
        """End the rank with 69 if it lost another rank. Any other error passes, and the other ranks hear of it."""
        if self._store is not None and isinstance(error, Exception):
            reason = (str(error).splitlines() or [""])[0][:200]
            if is_lost_connection(error):
                self._end_run(reason)
            self._leave(f"{type(error).__name__}: {reason}")
        self._leaving.set()

    def _beat(self) -> None:
        # Without an answer the machine with the store has gone; so has the run, as the next collective shows.
        with contextlib.suppress(torch.distributed.DistError):
            while self._store is not None and not self._leaving.is_set():
                self._write()
                self._leaving.wait(_TICK_SECONDS)

    def _watch(self) -> None:
        seen, waited_seconds, looked = self._progress, 0.0, time.monotonic()
        while not self._leaving.wait(_TICK_SECONDS):
            # A process that was stopped has not waited meanwhile: hence no more than some ticks at a time.
            waited_seconds += min(time.monotonic() - looked, 5 * _TICK_SECONDS)
            looked = time.monotonic()
            another_ended = self._store is not None and self._ask(partial(self._store.check, ["ended"]))
            if self._progress != seen:
                seen, waited_seconds = self._progress, 0.0
            elif waited_seconds >= (_FAREWELL_SECONDS if another_ended else self._limit_seconds):
                self._end_run()

    def _end_run(self, error: str = "") -> None:
        """End this rank and name the rank at fault; without an error, return if there is progress after all."""
        seen, suspects, own = self._progress, self._find_suspects(), self._heartbeat()
        if not error and (self._progress != seen or self._leaving.is_set()):
            return
        named = ", ".join(f"{'it' if beat.name == own.name else beat.name} {why}" for beat, why in suspects[:4])
        named += f", and {len(suspects) - 4} more" if len(suspects) > 4 else ""
        # One rank of each machine reports, whichever asks first, so that each log has the sentence once.
        key = f"reports/{self._host}"
        reports = self._store is None or self._ask(partial(self._store.add, key, 1)) in (1, None)
        stack = ""
        if error or any(beat.ended for beat, _ in suspects):
            text = f"error: {own.name} lost another rank in {own.position}: {named or error}. {_REMEDY}.\n"
        else:
            others = f"; {named or 'all heartbeats are alike'}" if self._store is not None else ""
            text = f"error: no progress for {self._limit_seconds / 60:g} min on {own.name} in {own.position}{others}. "
            text += f"{_REMEDY}, or raise --distributed-timeout-minutes if it was only slow.\n"
            if reports or any(beat.name == own.name for beat, _ in suspects):
                stack = self._ask(self._describe_main_thread) or ""
        # Past sys.stderr and its lock, which the main thread may hold.
        content = visible((text if reports else "") + stack, keep="\n\t")
        self._ask(partial(signals.write_to_stderr, content))
        received = signals.count_signals()
        self._leave(_LOST_ANOTHER)
        # The rank that failed first shall also end first: torchrun reports the first end, then signals the others.
        until = time.monotonic() + (_FAREWELL_SECONDS if self._store else 0)
        while time.monotonic() < until and signals.count_signals() == received:
            time.sleep(0.1)
        os._exit(EXIT_UNAVAILABLE)  # the interpreter's own way waits for what will never come

    def _find_suspects(self) -> list[tuple[Heartbeat, str]]:
        """Return the ranks that hold the others up, and how that shows, from two looks at the heartbeats."""
        before = {beat.name: beat.number for beat in self._ask(self._read) or []}
        time.sleep(_SILENCE_SECONDS)
        after: list[Heartbeat] = self._ask(self._read) or []
        ended = [(beat, f"has ended: {beat.ended}") for beat in after if beat.ended not in ("", _LOST_ANOTHER)]
        silent = [beat for beat in after if not beat.ended and before.get(beat.name) == beat.number]
        if ended or silent:
            return ended + [(beat, f"does not answer any more, last heard of in {beat.position}") for beat in silent]
        # The ranks that have left because of another rank show how far a run had come.
        progress = [beat.progress for beat in after]
        oldest, furthest = min(progress, default=0), max(progress, default=0)
        return [(beat, f"is behind in {beat.position}") for beat in after if beat.progress == oldest < furthest]

    def _describe_main_thread(self) -> str:
        # Not by faulthandler, which writes with the interpreter's lock held, for ever if the output is not read.
        stack = "".join(traceback.format_stack(sys._current_frames()[threading.main_thread().ident or 0]))
        collective = f" (in the collective {name})" if (name := pending_collective()) else ""
        return f"where rank {self._rank} stands{collective}:\n{stack}"

    def _leave(self, why: str) -> None:
        self._leaving.set()  # first: the thread's heartbeat must not replace the last one
        if self._store is not None:
            self._ask(partial(self._write, ended=why))

    def _heartbeat(self, ended: str = "") -> Heartbeat:
        self._number += 1
        return Heartbeat(f"rank {self._rank} ({self._host})", *self._mark, self._progress, self._number, ended)

    def _write(self, ended: str = "") -> None:
        assert self._store is not None
        self._store.set(f"rank/{self._rank}", json.dumps(self._heartbeat(ended)))
        if ended not in ("", _LOST_ANOTHER):
            self._store.set("ended", str(self._rank))

    def _read(self) -> list[Heartbeat]:
        """Return the last heartbeat of every rank that has written one."""
        if self._store is None:
            return []
        keys = [key for rank in range(self._ranks) if self._store.check([key := f"rank/{rank}"])]
        return [Heartbeat(*parse_json(text)) for text in self._store.multi_get(keys)]

    def _ask(self, question: Any) -> Any:
        return signals.ask_within(_ANSWER_SECONDS, question)
