"""Ends a run that does not get on, and says which rank holds it up.

A rank that hangs, or has died without a word, leaves the others in a collective from which they do not return. A thread
of each rank therefore watches the marks that the training loop sets at every step of its story, and ends the process
with 69 when they stop coming. Costs a message to the store per rank and second, and nothing in the training loop.
"""

import contextlib
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn, TypeVar

import torch

from megatron_neobert.config.schema import ParallelConfig
from megatron_neobert.errors import EXIT_UNAVAILABLE
from megatron_neobert.runtime import signals
from megatron_neobert.training.heartbeats import Board, Place, find_suspects

_Answer = TypeVar("_Answer")

_TICK_SECONDS = 1.0
_SILENCE_SECONDS = 3.0  # three lines missed: whoever lives has written one
_ANSWER_SECONDS = 10.0  # of the store, a file system or a reader of our output, each of which may hang as well
_FAREWELL_SECONDS = 5.0

# Of gloo, which has no class for them; NCCL and the store raise torch.distributed.DistError.
_LOST_CONNECTION = re.compile(
    r"Connection closed by peer|Connection reset by peer|Connection refused|Broken pipe|Socket closed|"
    r"Application timeout caused pair closure|Timed out waiting"
)
# Where the main thread stands while it waits for other ranks: anywhere below torch.distributed, or in the code that has
# begun an operation and waits for its handle, whose own wait is not Python.
_COLLECTIVES, _WAITING_FOR_HANDLES = "torch/distributed/", "megatron/core/"
_REMEDY = "The last checkpoint is untouched: start again with the same command"


class Watchdog:
    """Watches the run while it is entered. Needs the process group; a single rank has nobody to tell."""

    def __init__(self, parallel: ParallelConfig) -> None:
        self._limit_seconds = 60.0 * parallel.distributed_timeout_minutes
        self._rank = torch.distributed.get_rank()
        world_size = torch.distributed.get_world_size()
        self._board = Board(world_size=world_size) if world_size > 1 else None
        self._mark = ("loading", 0, 0)  # phase, iteration, number of marks
        self._beats = 0  # signs of life: marks and ticks
        self._lines = 0
        self._leaving = threading.Event()
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._publish, self._watch)]

    def mark(self, phase: str, iteration: int) -> None:
        """Says that the run gets on. To be called by the main threads of all ranks alike."""
        self._mark = (phase, iteration, self._mark[2] + 1)
        self._beats += 1

    def tick(self) -> None:
        """Says that this rank gets on, whatever the others do: an iteration may take longer than the limit."""
        self._beats += 1

    def __enter__(self) -> "Watchdog":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the rank with 69 if it lost another one. Any other error passes, and is known to the others then."""
        if self._board is not None and isinstance(error, Exception):
            if _is_lost_connection(error):
                self._end_after_loss(error)
            self._leave(f"{type(error).__name__}: {_first_line(error)}")
        self._leaving.set()

    def _publish(self) -> None:
        while self._board is not None and not self._leaving.is_set():
            try:
                self._board.write(self._place())
            except torch.distributed.DistError:
                return  # the machine that held the board has gone; so has the run, as the others will notice
            self._leaving.wait(_TICK_SECONDS)

    def _watch(self) -> None:
        beats, waited_seconds, looked = 0, 0.0, time.monotonic()
        while not self._leaving.wait(_TICK_SECONDS):
            if signals.launcher_has_gone():
                self._end(f"error: rank {self._rank}: the launcher that started it has gone. {_REMEDY}.")
            # A process that was stopped and goes on has not waited meanwhile: hence no more than some ticks at once.
            waited_seconds += min(time.monotonic() - looked, 5 * _TICK_SECONDS)
            looked = time.monotonic()
            if self._beats != beats:
                beats, waited_seconds = self._beats, 0.0
            elif waited_seconds >= self._limit_seconds:
                self._end_hung_run(beats)

    def _end_hung_run(self, beats: int) -> None:
        """Returns only if the run got on at the last moment."""
        own, suspects = self._place(), self._find_suspects()
        if self._beats != beats:
            return
        said = ""
        if self._speaks():
            others = f"; {_describe(suspects, own)}" if self._board is not None else ""
            said = (
                f"error: no progress for {self._limit_seconds / 60:g} min on {own} in {own.position}{others}. "
                f"{_REMEDY}, or raise --distributed-timeout-minutes if it was only slow.\n"
            )
        if said or any(place.rank == self._rank for place, _ in suspects):
            # Bounded, because it reads the source files.
            stack = _within(_ANSWER_SECONDS, lambda: "".join(traceback.format_stack(_main_frame())))
            said += f"where rank {self._rank} stands:\n{stack or self._place().code}"
        self._end(said)

    def _end_after_loss(self, error: Exception) -> NoReturn:
        own, suspects = self._place(), self._find_suspects()
        cause = _describe(suspects, own) if suspects else _first_line(error)
        said = f"error: {own} lost another rank in {own.position}: {cause}. {_REMEDY}."
        self._end(said if self._speaks() else "")

    def _find_suspects(self) -> list[tuple[Place, str]]:
        board = self._board
        if board is None:
            return []
        before = _within(_ANSWER_SECONDS, board.read)
        time.sleep(_SILENCE_SECONDS)
        after = _within(_ANSWER_SECONDS, board.read)
        return find_suspects(before, after) if before and after else []

    def _speaks(self) -> bool:
        """One rank of each machine, so that each log says once what happened."""
        return self._board is None or _within(_ANSWER_SECONDS, self._board.is_first_of_host) is not False

    def _end(self, said: str) -> NoReturn:
        """Without the interpreter's own way, which waits for what will never come."""
        if said:
            # Past sys.stderr and its lock, which the main thread may hold, and not for ever: nobody may read the pipe.
            text = f"{said.rstrip()}\n".encode()
            _within(_ANSWER_SECONDS, lambda: os.write(2, text))
        received = signals.count_signals()
        self._leave("it lost the others", is_victim=True)
        # Whoever failed first shall also end first: torchrun reports the first end, then signals the others to end.
        until = time.monotonic() + (_FAREWELL_SECONDS if self._board else 0)
        while time.monotonic() < until and signals.count_signals() == received and not signals.launcher_has_gone():
            time.sleep(0.1)
        os._exit(EXIT_UNAVAILABLE)

    def _leave(self, why: str, *, is_victim: bool = False) -> None:
        self._leaving.set()  # first: the thread's line must not replace the last one
        board, place = self._board, self._place(ended=why, is_victim=is_victim)
        if board is not None:
            _within(_ANSWER_SECONDS, lambda: board.write(place))

    def _place(self, *, ended: str = "", is_victim: bool = False) -> Place:
        phase, iteration, marks = self._mark
        frames = [frame for frame, _ in traceback.walk_stack(_main_frame())]
        code = frames[0].f_code
        self._lines += 1
        return Place(
            rank=self._rank,
            phase=phase,
            iteration=iteration,
            marks=marks,
            code=f"{Path(code.co_filename).name} line {frames[0].f_lineno} in {code.co_name}",
            in_collective=_WAITING_FOR_HANDLES in code.co_filename
            or any(_COLLECTIVES in frame.f_code.co_filename for frame in frames),
            line=self._lines,
            ended=ended,
            is_victim=is_victim,
        )


def _describe(suspects: list[tuple[Place, str]], own: Place) -> str:
    if not suspects:
        return "no rank stands out"
    named = [f"{'it' if place.rank == own.rank else place} {trouble}" for place, trouble in suspects[:4]]
    return ", ".join(named) + (f", and {len(suspects) - 4} more" if len(suspects) > 4 else "")


def _is_lost_connection(error: Exception) -> bool:
    if isinstance(error, torch.distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and _LOST_CONNECTION.search(str(error)) is not None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200]


def _within(seconds: float, ask: Callable[[], _Answer]) -> _Answer | None:
    """The answer, or None if there is none in time: whoever is asked may be gone, and then a question never returns."""
    answers: list[_Answer] = []

    def wait_for_answer() -> None:
        with contextlib.suppress(torch.distributed.DistError, OSError):
            answers.append(ask())

    thread = threading.Thread(target=wait_for_answer, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


def _main_frame() -> FrameType:
    identity = threading.main_thread().ident
    assert identity is not None
    return sys._current_frames()[identity]
