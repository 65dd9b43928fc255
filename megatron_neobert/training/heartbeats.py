"""Where every rank stands, on a board that all of them can read even while no collective gets through.

The board is the TCP store by which the ranks found each other. torchrun and the launcher keep it on node 0, outside of
the ranks; where ranks are started without either, rank 0 holds it, and it ends with rank 0. Each rank writes its line
about once a second, from a thread, so that a line that does not change any more belongs to a process that is gone,
stopped, or cut off. Clocks of different machines are never compared.
"""

import datetime
import json
import os
import socket
from dataclasses import asdict, dataclass, field

import torch

_ANSWER_SECONDS = 10


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a rank says of itself."""

    rank: int
    phase: str  # what it does, such as "training"
    iteration: int
    marks: int  # how often it has said so; all ranks say the same, one thing after the other
    code: str  # where its main thread is, as "file.py line 7 in function"
    in_collective: bool  # whether it waits there for other ranks
    line: int  # number of this line; grows as long as the process lives
    ended: str = ""  # why it has left the run, by its own account
    is_victim: bool = False  # it left because another rank had gone
    host: str = field(default_factory=socket.gethostname)

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host})"

    @property
    def position(self) -> str:
        return f"iteration {self.iteration} ({self.phase})"


class Board:
    """This rank's connection to the store. Needs the addresses that torchrun puts into the environment."""

    def __init__(self, *, world_size: int) -> None:
        self.world_size = world_size
        store = torch.distributed.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=_ANSWER_SECONDS),
        )
        # torchrun keeps the store when it starts the ranks again.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = torch.distributed.PrefixStore(f"whereabouts/{attempt}", store)

    def write(self, place: Place) -> None:
        self._store.set(f"rank/{place.rank}", json.dumps(asdict(place)))

    def read(self) -> dict[int, Place]:
        """The last line of every rank that has written one."""
        keys = [f"rank/{rank}" for rank in range(self.world_size)]
        if not self._store.check(keys):
            keys = [key for key in keys if self._store.check([key])]
        places = (Place(**json.loads(text)) for text in self._store.multi_get(keys))
        return {place.rank: place for place in places}

    def is_first_of_host(self) -> bool:
        """True for one rank of each machine, whichever asks first."""
        return bool(self._store.add(f"speaker/{socket.gethostname()}", 1) == 1)


def find_suspects(before: dict[int, Place], after: dict[int, Place]) -> list[tuple[Place, str]]:
    """The ranks that hold the others up, and how that shows, from two looks at the board some seconds apart.

    The surest sign counts alone: having ended or being silent; else being behind the others; else being elsewhere while
    others wait in a collective. Who waits in one is held up itself, however far behind, as long as somebody does not.
    """
    living = [place for place in after.values() if not place.ended]
    ended = [(place, f"has ended: {place.ended}") for place in after.values() if place.ended and not place.is_victim]
    silent = [place for place in living if place.rank in before and before[place.rank].line == place.line]
    if ended or silent:
        return ended + [(place, f"does not answer any more, last heard of in {place.position}") for place in silent]
    elsewhere = [place for place in living if not place.in_collective]
    furthest = max((place.marks for place in living), default=0)
    behind = [place for place in elsewhere or living if place.marks < furthest]
    if behind:
        return [(place, f"is behind in {place.position}") for place in behind]
    return (
        [(place, f"is in no collective: {place.code}") for place in elsewhere] if len(elsewhere) < len(living) else []
    )
