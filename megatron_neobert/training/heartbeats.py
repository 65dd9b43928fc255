"""Heartbeats: the state of each rank of a run, in the store, and the search for the rank at fault.

The cost per rank does not depend on the number of ranks, except for the one rank that searches.
"""

import json
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.distributed import Store

from megatron_neobert.runtime import signals
from megatron_neobert.text import parse_json

SILENCE_SECONDS = 3.0  # a living rank writes a heartbeat in this time
ANSWER_SECONDS = 10.0  # for the store, or the reader of our output, which may hang, too
LOST_ANOTHER = "it lost another rank"  # reason of a rank that ended because another rank did
HAS_ENDED = "has ended: "  # start of the reason of a suspect that reported an error, rather than stopped to answer
_POLL_SECONDS = 0.5
# A rank that imports a large library from a slow file system may hold Python's lock for half a minute.
_SILENT_CALLS = 60


class Heartbeat(NamedTuple):
    """Latest state of a rank. Has no time stamps, because clocks of different machines differ."""

    rank: int
    host: str
    position: str  # such as "iteration 5 (training)"
    progress: int  # calls of `mark` and `tick`, which are the same on all ranks
    number: int  # number of this heartbeat
    ended: str = ""  # reason why the rank has ended

    @property
    def name(self) -> str:
        """Rank and host, for messages."""
        return f"rank {self.rank} ({self.host})"


class Heartbeats:
    """Reader and writer of the heartbeats of a run.

    Args:
        store: Store of all ranks. Several threads may use it.
        ranks: Number of ranks of the run.
    """

    def __init__(self, store: Store, *, rank: int, ranks: int) -> None:
        self._store, self._rank, self._ranks = store, rank, ranks
        self.host, self._number = socket.gethostname(), 0
        self._neighbour, self._neighbour_beat, self._silent_calls = (rank + 1) % ranks, b"", 0

    @property
    def name(self) -> str:
        """Name of this rank, with its host."""
        return f"rank {self._rank} ({self.host})"

    def write(self, position: str, progress: int, ended: str = "") -> None:
        """Write the next heartbeat of this rank.

        Args:
            ended: Reason why this rank ends now, which also ends the other ranks.
        """
        self._number += 1
        beat = Heartbeat(self._rank, self.host, position, progress, self._number, ended)
        self._store.set(f"rank/{self._rank}", json.dumps(beat))
        if ended:
            self._store.set("ended", str(self._rank))

    def is_rank_lost(self) -> bool:
        """Return whether a rank has ended, or the next rank has written no heartbeat for a minute.

        Must be called once a second. Every rank watches the next one, so the cost does not depend on the run's size.
        """
        key = f"rank/{self._neighbour}"
        beat = self._store.get(key) if self._store.check([key]) else b""
        self._silent_calls = self._silent_calls + 1 if beat == self._neighbour_beat else 0
        self._neighbour_beat = beat
        is_silent = self._ranks > 1 and self._silent_calls >= _SILENT_CALLS
        return is_silent or bool(self._store.check(["ended"]))

    def count_report(self) -> int:
        """Return how often this method was called on this machine, this call included."""
        return int(self._store.add(f"reports/{self.host}", 1))

    def find_suspects(self, progress: int) -> dict[str, str]:
        """Return the ranks at fault, as name -> reason; empty if the heartbeats do not tell. Takes several seconds.

        The first rank that asks at a progress searches, and the others wait for its result. If the result does not
        come in time, this rank searches, too.

        Args:
            progress: Progress of this rank.
        """
        key = f"suspects/{progress}"
        searches = _answer(lambda: self._store.add(f"{key}/searches", 1))
        if searches is None:
            return {}  # the store does not answer
        if searches > 1:
            until = time.monotonic() + SILENCE_SECONDS + ANSWER_SECONDS
            while time.monotonic() < until:
                # Polled, because a waiting connection would block the heartbeats of this rank.
                if _answer(lambda: self._store.check([key])):
                    return parse_json(_answer(lambda: self._store.get(key)) or "{}")
                time.sleep(_POLL_SECONDS)
        suspects = self._search()
        _answer(lambda: self._store.set(key, json.dumps(suspects)))
        return suspects

    def _search(self) -> dict[str, str]:
        """Return the ranks at fault, from the heartbeats of all ranks, which are read twice, a few seconds apart."""
        numbers = {beat.rank: beat.number for beat in _answer(self.read) or []}
        time.sleep(SILENCE_SECONDS)
        beats: list[Heartbeat] = _answer(self.read) or []
        suspects = {beat.name: HAS_ENDED + beat.ended for beat in beats if beat.ended not in ("", LOST_ANOTHER)} | {
            beat.name: f"does not answer, last heartbeat in {beat.position}"
            for beat in beats
            if not beat.ended and numbers.get(beat.rank) == beat.number
        }
        # Ranks that ended because of another rank are included: they show how far the run had come.
        progress = [beat.progress for beat in beats]
        return suspects or {
            beat.name: f"is behind in {beat.position}"
            for beat in beats
            if beat.progress == min(progress) < max(progress)
        }

    def read(self) -> list[Heartbeat]:
        """Return the latest heartbeat of each rank that has written one."""
        keys = [f"rank/{rank}" for rank in range(self._ranks)]
        if not self._store.check(keys):  # a rank has not written its first heartbeat yet
            keys = [key for key in keys if self._store.check([key])]
        return [Heartbeat(*parse_json(text)) for text in self._store.multi_get(keys)]


def _answer(function: Callable[[], Any]) -> Any:
    """Return the result of a request to the store, or None if the store does not answer in time."""
    return signals.call_with_timeout(ANSWER_SECONDS, function)
