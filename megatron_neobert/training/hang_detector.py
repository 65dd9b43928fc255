"""Ends a run that makes no progress, and names the rank that holds it up.

A rank that hangs, or has died without a word, leaves the others in a collective from which they do not return. So a
thread of each rank writes a heartbeat to the store once a second, and ends the process with 69 when the main thread has
made no progress for --distributed-timeout-minutes, or for some seconds after another rank has written that it ended.
The oldest heartbeat names the rank. The store is that by which the
ranks found each other: torchrun and the launcher keep it on node 0, outside of the ranks; where ranks are started
without either, rank 0 holds it, and it ends with rank 0. Costs two messages per rank and second.
"""

import contextlib
import datetime
import faulthandler
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import NoReturn, TypeVar

import torch

from megatron_neobert.config.schema import ParallelConfig
from megatron_neobert.errors import EXIT_UNAVAILABLE
from megatron_neobert.runtime import signals
from megatron_neobert.text import visible

_Answer = TypeVar("_Answer")

_TICK_SECONDS = 1.0  # between heartbeats, and between looks at the others'
_SILENCE_SECONDS = 3.0  # three heartbeats missed: a living rank has written one
_ANSWER_SECONDS = 10.0  # of the store, a file system or a reader of our output, each of which may hang as well
_FAREWELL_SECONDS = 5.0  # that the others give the rank that has failed first

# Of gloo, which has no class for them; NCCL and the store raise torch.distributed.DistError.
_LOST_CONNECTION = re.compile(
    r"Connection closed by peer|Connection reset by peer|Connection refused|Broken pipe|Socket closed|"
    r"Application timeout caused pair closure|Timed out waiting"
)
_ENDED = "ended"  # key of the store: a rank has failed
_LOST_ANOTHER = "it lost another rank"  # why a rank ended that is not the cause
_REMEDY = "The last checkpoint is untouched: start again with the same command"


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """What a rank last wrote of itself. Clocks of different machines are never compared."""

    rank: int
    phase: str  # what it does, such as "training"
    iteration: int
    progress: int  # marks and ticks so far; all ranks make the same ones
    number: int  # grows as long as the process lives
    ended: str = ""  # why it has left the run, by its own account
    host: str = field(default_factory=socket.gethostname)

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host})"

    @property
    def position(self) -> str:
        return f"iteration {self.iteration} ({self.phase})"


class HangDetector:
    """Watches the run while it is entered. Needs the process group, and the addresses in torchrun's environment."""

    def __init__(self, parallel: ParallelConfig) -> None:
        self._limit_seconds = 60.0 * parallel.distributed_timeout_minutes
        self._rank, self._world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self._store: torch.distributed.Store | None = None
        if self._world_size > 1:  # a single rank has nobody to tell
            # A connection of its own: the main thread may wait for an answer on the other one.
            store = torch.distributed.TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=False,
                wait_for_workers=False,
                timeout=datetime.timedelta(seconds=_ANSWER_SECONDS),
            )
            # torchrun keeps the store when it starts the ranks again.
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            self._store = torch.distributed.PrefixStore(f"heartbeats/{attempt}", store)
        self._mark = ("loading", 0)  # phase and iteration
        self._progress = self._number = 0
        self._leaving = threading.Event()

    def mark(self, phase: str, iteration: int) -> None:
        """Notes what the run does next. To be called by the main threads of all ranks alike."""
        self._mark = (phase, iteration)
        self._progress += 1

    def tick(self) -> None:
        """Notes progress within a phase: an iteration may take longer than the limit."""
        self._progress += 1

    def __enter__(self) -> "HangDetector":
        faulthandler.enable()  # the line of Python at which a library crashes
        for target in (self._beat, self._watch):
            threading.Thread(target=target, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the rank with 69 if it lost another one. Any other error passes, and is known to the others then."""
        if self._store is not None and isinstance(error, Exception):
            reason = (str(error).splitlines() or [""])[0][:200]
            is_gloos = isinstance(error, RuntimeError) and _LOST_CONNECTION.search(str(error)) is not None
            if is_gloos or isinstance(error, torch.distributed.DistError):
                own, oldest = self._heartbeat(), self._find_oldest()
                self._end_without_another(own, oldest, reason)
            self._leave(f"{type(error).__name__}: {reason}")
        self._leaving.set()

    def _beat(self) -> None:
        # Without an answer the machine with the store has gone; so has the run, as the next collective shows.
        with contextlib.suppress(torch.distributed.DistError):
            while self._store is not None and not self._leaving.is_set():
                self._write(self._heartbeat())
                self._leaving.wait(_TICK_SECONDS)

    def _watch(self) -> None:
        seen, waited_seconds, looked = self._progress, 0.0, time.monotonic()
        while not self._leaving.wait(_TICK_SECONDS):
            if signals.launcher_has_gone():
                self._end(f"error: rank {self._rank}: the launcher that started it has gone. {_REMEDY}.")
            # A process that was stopped has not waited meanwhile: hence no more than some ticks at a time.
            waited_seconds += min(time.monotonic() - looked, 5 * _TICK_SECONDS)
            looked = time.monotonic()
            if self._progress != seen:
                seen, waited_seconds = self._progress, 0.0
            elif waited_seconds >= (_FAREWELL_SECONDS if self._another_has_ended() else self._limit_seconds):
                self._end_hung_run(seen)

    def _another_has_ended(self) -> bool:
        store = self._store  # NCCL, unlike gloo, does not notice it by its connections
        return store is not None and bool(_within(_ANSWER_SECONDS, lambda: store.check([_ENDED])))

    def _end_hung_run(self, seen: int) -> None:
        """Returns only if there was progress at the last moment."""
        own, oldest = self._heartbeat(), self._find_oldest()
        if self._progress != seen or self._leaving.is_set():
            return
        if any(beat.ended for beat, _ in oldest):
            self._end_without_another(own, oldest)
        text = ""
        if self._reports():
            others = f"; {_describe(oldest, own)}" if self._store is not None else ""
            text = (
                f"error: no progress for {self._limit_seconds / 60:g} min on {own} in {own.position}{others}. "
                f"{_REMEDY}, or raise --distributed-timeout-minutes if it was only slow.\n"
            )
        if text or any(beat.rank == self._rank for beat, _ in oldest):
            main_thread = threading.main_thread().ident
            assert main_thread is not None
            frame = sys._current_frames()[main_thread]
            # Not faulthandler's: it writes with the interpreter's lock held, for ever if nobody reads. Bounded, because
            # it reads the source files.
            stack = _within(_ANSWER_SECONDS, lambda: "".join(traceback.format_stack(frame)))
            text += f"where rank {self._rank} stands:\n{stack or f'{frame}'}"
        self._end(text)

    def _find_oldest(self) -> list[tuple[Heartbeat, str]]:
        """The ranks that hold the others up, and how that shows, from two looks at the heartbeats."""
        before = {beat.rank: beat for beat in _within(_ANSWER_SECONDS, self._read) or []}
        time.sleep(
            _SILENCE_SECONDS
        )  # without an answer too: where the launcher has gone, the watching thread reports it
        after = _within(_ANSWER_SECONDS, self._read) or []
        ended = [(beat, f"has ended: {beat.ended}") for beat in after if beat.ended not in ("", _LOST_ANOTHER)]
        silent = [
            beat for beat in after if not beat.ended and beat.rank in before and before[beat.rank].number == beat.number
        ]
        if ended or silent:
            return ended + [(beat, f"does not answer any more, last heard of in {beat.position}") for beat in silent]
        # Those that have left because of another one show how far a run had come.
        progress = [beat.progress for beat in after if beat.ended in ("", _LOST_ANOTHER)]
        oldest, furthest = min(progress, default=0), max(progress, default=0)
        return [(beat, f"is behind in {beat.position}") for beat in after if beat.progress == oldest < furthest]

    def _end_without_another(self, own: Heartbeat, oldest: list[tuple[Heartbeat, str]], reason: str = "") -> NoReturn:
        cause = _describe(oldest, own) if oldest else reason
        sentence = f"error: {own} lost another rank in {own.position}: {cause}. {_REMEDY}."
        self._end(sentence if self._reports() else "")

    def _end(self, text: str) -> NoReturn:
        """Without the interpreter's own way, which waits for what will never come."""
        if text:
            # Past sys.stderr and its lock, which the main thread may hold, and not for ever: nobody may read the pipe.
            content = visible(f"{text.rstrip()}\n", keep="\n\t").encode()
            _within(_ANSWER_SECONDS, lambda: os.write(2, content))
        received = signals.count_signals()
        self._leave(_LOST_ANOTHER)
        # The rank that failed first shall also end first: torchrun reports the first end, then signals the others.
        until = time.monotonic() + (_FAREWELL_SECONDS if self._store else 0)
        while time.monotonic() < until and signals.count_signals() == received and not signals.launcher_has_gone():
            time.sleep(0.1)
        os._exit(EXIT_UNAVAILABLE)

    def _leave(self, why: str) -> None:
        self._leaving.set()  # first: the thread's heartbeat must not replace the last one
        if self._store is not None:
            _within(_ANSWER_SECONDS, lambda: self._write(self._heartbeat(ended=why)))

    def _heartbeat(self, *, ended: str = "") -> Heartbeat:
        phase, iteration = self._mark
        self._number += 1
        return Heartbeat(
            rank=self._rank,
            phase=phase,
            iteration=iteration,
            progress=self._progress,
            number=self._number,
            ended=ended,
        )

    def _write(self, heartbeat: Heartbeat) -> None:
        assert self._store is not None
        self._store.set(f"rank/{heartbeat.rank}", json.dumps(asdict(heartbeat)))
        if heartbeat.ended not in ("", _LOST_ANOTHER):
            self._store.set(_ENDED, str(heartbeat.rank))

    def _read(self) -> list[Heartbeat]:
        """The last one of every rank that has written one."""
        store = self._store
        if store is None:
            return []
        keys = [f"rank/{rank}" for rank in range(self._world_size)]
        if not store.check(keys):
            keys = [key for key in keys if store.check([key])]
        return [Heartbeat(**json.loads(text)) for text in store.multi_get(keys)]

    def _reports(self) -> bool:
        """One rank of each machine does, whichever asks first, so that each log holds once what happened."""
        store = self._store
        if store is None:
            return True
        return _within(_ANSWER_SECONDS, lambda: store.add(f"reports/{socket.gethostname()}", 1)) in (1, None)


def _describe(oldest: list[tuple[Heartbeat, str]], own: Heartbeat) -> str:
    if not oldest:
        return "all heartbeats are alike"
    named = [f"{'it' if beat.rank == own.rank else beat} {trouble}" for beat, trouble in oldest[:4]]
    return ", ".join(named) + (f", and {len(oldest) - 4} more" if len(oldest) > 4 else "")


def _within(seconds: float, ask: Callable[[], _Answer]) -> _Answer | None:
    """The answer, or None if there is none in time: what is asked may be gone, and then a question never returns."""
    answers: list[_Answer] = []

    def wait_for_answer() -> None:
        with contextlib.suppress(torch.distributed.DistError, OSError):
            answers.append(ask())

    thread = threading.Thread(target=wait_for_answer, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None
