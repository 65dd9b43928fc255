"""Watcher of a rank: when a rank fails, hangs or leaves, all ranks end within seconds, and each node prints its name.

The requests of a rank to the store do not depend on the number of ranks, except for the rank that searches for a cause.
"""

import contextlib
import faulthandler
import json
import os
import re
import socket
import sys
import threading
import time
from typing import Any, NamedTuple

import torch
from torch.distributed import DistError, Store

from megatron_neobert import errors
from megatron_neobert.runtime import signals
from megatron_neobert.runtime.store import connect_to_store
from megatron_neobert.text import parse_json, visible

REMEDY = ". The last checkpoint is untouched: start again with the same command"
LONGEST_REPORT_SECONDS = 20.0  # if the store hangs, too
_TICK_SECONDS = 1.0
_FAREWELL_SECONDS = 2.0  # for this rank's own error, after another rank has failed
_RECORD_SECONDS = 4.0  # in which a failing rank or its launcher records the failure
_SILENCE_TICKS = 3  # in which a living rank publishes its status
# A rank that imports a large library from a slow file system may hold Python's lock for half a minute.
_SILENT_TICKS = 60
# gloo raises RuntimeError with these messages; NCCL and the store raise torch.distributed.DistError.
_LOST_CONNECTION = re.compile(
    r"Connection closed by peer|Connection reset by peer|Connection refused|Broken pipe|Socket closed|"
    r"Application timeout caused pair closure|Timed out waiting"
)


class Status(NamedTuple):
    """Latest status of a rank. It contains no time stamps, because clocks of different machines differ."""

    rank: int
    host: str = "unknown node"
    position: str = "iteration 0 (starting)"
    progress: int = 0  # calls of `mark` and `tick`, which are the same on all ranks
    number: int = 0  # of this status; 0 before the watcher of the rank has started
    waits: bool = False  # the main thread waits for other ranks
    is_finished: bool = False


class Failure(NamedTuple):
    """Reason why a run ends. `code` is the exit code of every launcher."""

    rank: int
    host: str
    position: str
    reason: str
    code: int = errors.EXIT_UNAVAILABLE
    is_hang: bool = False  # the rank prints its stacks


class RunStatus:
    """Status of all ranks and first failure of a run, kept in the store. Several threads may use this object."""

    def __init__(self, store: Store, *, node: str, ranks: int) -> None:
        self.store, self.ranks, self._node = store, ranks, node

    def publish(self, status: Status) -> None:
        """Write the status of a rank."""
        self.store.set(f"rank/{status.rank}", json.dumps(status))

    def read(self, rank: int) -> Status:
        """Return a rank's latest status. If the rank has published none, store and return `Status(rank)`."""
        return Status(*parse_json(self.store.compare_set(f"rank/{rank}", "", json.dumps(Status(rank)))))

    def record(self, failure: Failure) -> Failure:
        """Record `failure` unless the run already has a failure, and return the run's first failure."""
        return Failure(*parse_json(self.store.compare_set("failure", "", json.dumps(failure))))

    def failure(self) -> Failure | None:
        """Return the run's first failure, or None if no failure is recorded."""
        return Failure(*parse_json(self.store.get("failure"))) if self.store.check(["failure"]) else None

    def sentence_for_node(self, failure: Failure) -> str:
        """Return the error message of a failure for the caller to print, or "" if this node has already printed it."""
        return self.sentence(failure) if self.store.add(f"printed/{self._node}", 1) == 1 else ""

    def sentence(self, failure: Failure) -> str:
        """Return the error message of a failure, with a newline at its end."""
        origin = f" on rank {failure.rank} ({failure.host})" if self.ranks > 1 else ""
        position = f" in {failure.position}" if origin or failure.is_hang else ""
        return visible(f"error{origin}{position}: {failure.reason}\n", keep="\n\t")


class Watcher:
    """A context manager that watches all ranks, and ends this process when any rank fails or hangs.

    Inside the block, the main thread must call `mark` and `tick`. Outside the block, these methods have no effect.
    """

    def __init__(self, *, limit_seconds: float) -> None:
        self._limit_seconds, self._lost = limit_seconds, ""  # message of a lost connection
        self._status = self._published = Status(int(os.environ.get("RANK", "0")), socket.gethostname())
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        # Ticks, not seconds, because a process that is suspended has not hung.
        self._idle_ticks, self._silent_ticks, self._neighbour = 0, 0, self._status
        self._leaving = threading.Event()

    def mark(self, activity: str, iteration: int = 0) -> None:
        """Record the run's next activity as progress. All ranks must make the same calls."""
        self._status = self._status._replace(position=f"iteration {iteration} ({activity})")
        self.tick()

    def tick(self) -> None:
        """Record progress within an activity that may exceed the time limit. All ranks must make the same calls."""
        self._status = self._status._replace(progress=self._status.progress + 1)

    def __enter__(self) -> "Watcher":
        faulthandler.enable()  # prints the Python stack if a library crashes
        node, ranks = os.environ.get("GROUP_RANK", self._status.host), int(os.environ.get("WORLD_SIZE", "1"))
        self._run = RunStatus(connect_to_store("watcher", timeout_seconds=self._limit_seconds), node=node, ranks=ranks)
        self._publish()
        self._follower = threading.Thread(target=self._follow, daemon=True)
        self._follower.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        """Report that this rank has finished, or end the process if the block raised an error."""
        if isinstance(error, DistError) or (isinstance(error, RuntimeError) and _LOST_CONNECTION.search(str(error))):
            time.sleep(_RECORD_SECONDS)  # `_follow` ends the process if the cause is recorded, or else searches for it
            self._lost = f"lost another rank ({errors.short_reason(error)})"
            time.sleep(LONGEST_REPORT_SECONDS)
        self._leaving.set()
        if error is None:
            with contextlib.suppress(DistError):
                self._run.publish(self._status._replace(is_finished=True))
            # C++ aborts a process in which a thread returns from the store after the end of the interpreter.
            self._follower.join(LONGEST_REPORT_SECONDS)
            return
        code, message = errors.explain(error)
        failure = Failure(*self._status[:3], message or errors.short_reason(error), code)
        trace = "" if message else errors.format_bug(error)
        text = trace + self._run.sentence(failure)
        timer = threading.Timer(LONGEST_REPORT_SECONDS, signals.end_process, (code, text))  # the store may hang
        timer.daemon = True
        timer.start()
        with contextlib.suppress(DistError):
            first = self._run.record(failure)
            if first.rank == failure.rank:
                text = trace
            elif first.reason == failure.reason:
                text = ""  # an error of all ranks is printed once
            text += self._run.sentence_for_node(first)
        signals.end_process(code, text)

    def _follow(self) -> None:
        """Exchange status once a second. End the process after a failure; return when the block ends."""
        failure, text = None, ""
        try:
            while failure is None and not self._leaving.wait(_TICK_SECONDS):
                failure = self._exchange_status()
        except DistError:
            failure = Failure(*self._status[:3], f"lost the store of the run: node 0 or its launcher has ended{REMEDY}")
            text = self._run.sentence(failure) if os.environ.get("LOCAL_RANK", "0") == "0" else ""
        if failure is None or self._leaving.wait(_FAREWELL_SECONDS):
            return
        with contextlib.suppress(DistError):
            text = text or self._run.sentence_for_node(failure)
        if failure.is_hang and failure.rank == self._status.rank:
            faulthandler.dump_traceback_later(0.1)  # by a C thread, because the reader of our output may hang
            time.sleep(0.5)
        signals.end_process(errors.EXIT_UNAVAILABLE, text)

    def _publish(self) -> Status:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        name = "" if frame is None else frame.f_code.co_filename
        # Code that waits for other ranks. The last is the start of the process group, which waits for the store.
        waiting = ("torch/distributed", "megatron/core", "megatron_neobert/runtime/distributed")
        waits = any(part in name for part in waiting)
        self._published = self._status._replace(number=self._published.number + 1, waits=waits)
        self._run.publish(self._published)
        return self._published

    def _exchange_status(self) -> Failure | None:
        """Publish the status of this rank, detect failures, and return the first failure of the run or None."""
        progress = self._published.progress
        is_idle = self._publish().progress == progress
        if failure := self._run.failure():
            return failure
        if self._launcher not in (None, os.getppid()):
            return self._run.record(Failure(*self._status[:3], f"its launcher has ended{REMEDY}"))
        before, self._neighbour = self._neighbour, self._run.read((self._status.rank + 1) % self._run.ranks)
        is_silent = before == self._neighbour and before.number > 0 and not before.is_finished
        self._silent_ticks = self._silent_ticks + 1 if is_silent and is_idle else 0
        if self._silent_ticks >= _SILENT_TICKS:
            return self._run.record(Failure(*before[:3], f"does not answer{REMEDY}"))
        self._idle_ticks = self._idle_ticks + 1 if is_idle else 0
        searches = self._lost or self._idle_ticks * _TICK_SECONDS >= self._limit_seconds
        # One rank searches for all ranks with the same progress.
        is_first = searches and self._run.store.add(f"search/{self._status.progress}", 1) == 1
        return self._search() if is_first else None

    def _search(self) -> Failure | None:
        """Record and return the failure of the rank at fault, or None if this rank makes progress again."""
        progress = self._status.progress
        numbers = [self._run.read(rank).number for rank in range(self._run.ranks)]
        for _ in range(_SILENCE_TICKS):
            time.sleep(_TICK_SECONDS)
            self._publish()  # another rank may search, too
        ranks = [one for one in map(self._run.read, range(self._run.ranks)) if not one.is_finished]
        if self._status.progress != progress:
            return None
        if suspects := [one for one in ranks if one.number == numbers[one.rank]]:
            return self._run.record(Failure(*suspects[0][:3], f"does not answer{REMEDY}"))
        if self._lost:
            return self._run.record(Failure(*self._status[:3], self._lost + REMEDY))
        least = min(one.progress for one in ranks)
        behind = [one for one in ranks if one.progress == least]
        suspects = [one for one in behind if not one.waits] or behind
        collective = f" (rank {self._status.rank} is in {name})" if (name := _pending_collective()) else ""
        remedy = f"{REMEDY}, or raise --distributed-timeout-minutes"
        reason = f"no progress for {self._limit_seconds / 60:g} min{collective}{remedy}"
        return self._run.record(Failure(*suspects[0][:3], reason, is_hang=True))


def _pending_collective() -> str:
    """Return the name of this rank's oldest collective that has not ended, such as "nccl:all_reduce".

    Return "" if all have ended, or if this release of torch records collectives in another way.
    """
    name = "_dump_nccl_trace_json" if torch.cuda.is_available() else "_dump_fr_trace_json"
    dump = getattr(torch._C._distributed_c10d, name, None)
    if dump is None:
        return ""
    entries = parse_json(dump(includeCollectives=True, onlyActive=False)).get("entries", [])
    return next((str(entry["profiling_name"]) for entry in entries if not entry["retired"]), "")
