"""Measure what the ranks of a run ask of its store: at the start, while they train, and when one of them hangs.

    python benchmarks/benchmark_store.py --ranks 64 256 1024

The store is a process, and every rank is a thread with its own connection that does what a rank of `neobert train`
does, through the same functions: it connects, forms Megatron's groups, writes heartbeats, and looks for the rank at
fault. NCCL and the network are not measured.
"""

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, before an installed package

from megatron_neobert.cli import Parser
from megatron_neobert.errors import run_command

PACKAGES = ("torch", "megatron-core")
PROCESSES = 4
# Sizes of the groups that a rank without tensor, pipeline or context parallelism is in: 11 of one rank, 6 of all.
GROUPS_OF_ONE, GROUPS_OF_ALL = 11, 6
HEARTBEAT_SECONDS = 5
LIMIT = timedelta(minutes=10)


class Phase(NamedTuple):
    """Times and requests of one rank in a phase."""

    started: float  # of time.monotonic, which all processes of a machine share
    ended: float
    requests: int
    keys: int  # keys in these requests


class CountedStore:
    """A store that counts requests and keys. Has the methods of torch's Store."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.requests = self.keys = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def request(*arguments: Any) -> Any:
            self.requests += 1
            self.keys += len(arguments[0]) if isinstance(arguments[0], list) else 1
            return getattr(self._store, name)(*arguments)

        return request


def main() -> int:
    """Measure runs of several sizes, print seconds, requests and keys of each phase as a table, and return 0."""
    parser = Parser((__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[64, 256, 1024], help="sizes of the runs (%(default)s)")
    add("--every-group", action="store_true", help="every rank waits for all groups of the run, as in megatron.core")
    options = parser.parse_args()
    from benchmarks.shared import describe_machine, print_table

    for item in describe_machine(PACKAGES).items():
        print("{}: {}".format(*item))
    rows = []
    for ranks in options.ranks:
        phases, suspects = simulate(ranks, silent=ranks // 2, every_group=options.every_group)
        for name, done in phases.items():
            requests = sum(phase.requests for phase in done)
            seconds = max(phase.ended for phase in done) - min(phase.started for phase in done)
            rows.append(
                {"ranks": ranks, "phase": name, "seconds": seconds, "requests": requests}
                | {"requests of a rank": requests / ranks, "keys of a rank": sum(phase.keys for phase in done) / ranks}
            )
        print(f"{ranks:,} ranks: {len(suspects)} different results, {suspects[0]}")
    print_table(rows)
    return 0


def simulate(ranks: int, *, silent: int, every_group: bool = False) -> tuple[dict[str, list[Phase]], list[str]]:
    """Run all phases with `ranks` ranks, and return what each rank did by phase, and the different search results.

    Args:
        silent: Rank that stops writing heartbeats after the phase "heartbeats" and never searches.
        every_group: Each rank waits for all groups of the run, not only for its own.
    """
    with ProcessPoolExecutor(PROCESSES + 1, mp_context=get_context("spawn")) as pool:
        port = pool.submit(_serve, ranks).result()
        members = [list(range(first, ranks, PROCESSES)) for first in range(PROCESSES)]
        parts = list(
            pool.map(partial(_run_ranks, port=port, ranks=ranks, silent=silent, every_group=every_group), members)
        )
    names = parts[0][0]
    phases = {name: [phase for part, _ in parts for phase in part[name]] for name in names}
    return phases, sorted({result for _, results in parts for result in results})


_SERVED: list[Any] = []  # keeps the store open


def _serve(ranks: int) -> int:
    from megatron_neobert.runtime.store import serve_store

    _SERVED.append(serve_store("127.0.0.1", 0, nodes=ranks))
    return int(_SERVED[0].port)


def _run_ranks(
    members: Sequence[int], *, port: int, ranks: int, silent: int, every_group: bool
) -> tuple[dict[str, list[Phase]], list[str]]:
    """Run some of the ranks in threads. Return what each did by phase, and the result of each rank that searched."""
    # Imported before the time of the first phase is taken.
    from torch.distributed.distributed_c10d import GroupName, _store_based_barrier

    from megatron_neobert.runtime.store import reach_store
    from megatron_neobert.training.heartbeats import Heartbeats

    stores: dict[int, CountedStore] = {}
    results: list[str] = []

    def connect(rank: int) -> None:
        stores[rank] = CountedStore(reach_store("127.0.0.1", port, timeout_seconds=LIMIT.total_seconds()))

    def form_groups(rank: int) -> None:
        for number in range(GROUPS_OF_ONE * ranks if every_group else GROUPS_OF_ONE):
            meet(rank, f"group {number}" if every_group else f"group {number} of {rank}", ranks if every_group else 1)
        for number in range(GROUPS_OF_ALL):
            meet(rank, f"group {number} of all", ranks)

    def meet(rank: int, name: str, members: int) -> None:
        _store_based_barrier(rank, stores[rank], GroupName(name), members, LIMIT)

    def write_heartbeats(rank: int) -> None:
        for _ in range(HEARTBEAT_SECONDS):
            beats[rank].write("iteration 5 (training)", 10)
            beats[rank].is_rank_lost()
            time.sleep(1)

    def search(rank: int) -> None:
        if rank == silent:
            return
        has_result = threading.Event()

        def beat() -> None:
            while not has_result.wait(1):
                beats[rank].write("iteration 5 (training)", 10)

        threading.Thread(target=beat).start()
        results.append(json.dumps(beats[rank].find_suspects(10)))
        has_result.set()

    def run(phase: Callable[[int], None], rank: int) -> Phase:
        counted = stores.get(rank)
        before = (counted.requests, counted.keys) if counted else (0, 0)
        started = time.monotonic()
        phase(rank)
        ended, counted = time.monotonic(), stores[rank]
        return Phase(started, ended, counted.requests - before[0], counted.keys - before[1])

    # The processes have imported torch at different times.
    store = reach_store("127.0.0.1", port, timeout_seconds=LIMIT.total_seconds())
    _store_based_barrier(members[0], store, GroupName("processes"), PROCESSES, LIMIT)
    phases: dict[str, list[Phase]] = {}
    with ThreadPoolExecutor(len(members)) as threads:
        phases["connect"] = list(threads.map(partial(run, connect), members))
        list(threads.map(lambda rank: meet(rank, "connected", ranks), members))
        phases["groups"] = list(threads.map(partial(run, form_groups), members))
        beats = {rank: Heartbeats(stores[rank], rank=rank, ranks=ranks) for rank in members}  # type: ignore[arg-type]
        phases[f"{HEARTBEAT_SECONDS} heartbeats"] = list(threads.map(partial(run, write_heartbeats), members))
        phases["search"] = list(threads.map(partial(run, search), members))
        list(threads.map(lambda rank: meet(rank, "ended", ranks), members))
    return phases, results


if __name__ == "__main__":
    run_command(main)
