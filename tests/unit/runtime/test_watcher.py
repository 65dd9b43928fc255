"""The watcher of a rank: its limits and its requests to the store.

Failures of ranks are tested in tests/distributed/test_failing_ranks.py.
"""

import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
from commands import REPOSITORY
from processes import run_on_ranks

from megatron_neobert.config.schema import ParallelConfig
from megatron_neobert.runtime import distributed, watcher
from megatron_neobert.runtime.store import reach_store, serve_store
from megatron_neobert.runtime.watcher import Failure, RunStatus, Status, Watcher


def work_longer_than_the_limit() -> None:
    with Watcher(limit_seconds=2.0) as watched:
        for iteration in range(1, 9):
            watched.mark("training", iteration)
            time.sleep(0.25)
            watched.tick()
            time.sleep(0.25)


@pytest.mark.slow
def test_run_longer_than_the_limit_is_not_a_hang_while_it_makes_progress():
    run_on_ranks(work_longer_than_the_limit, world_size=2)


def leave_while_the_store_answers_slowly() -> None:
    check = watcher.RunStatus.failure

    def check_slowly(run: RunStatus) -> Failure | None:
        in_store.set()
        time.sleep(1.0)
        return check(run)

    in_store, watcher.RunStatus.failure = threading.Event(), check_slowly
    before = set(threading.enumerate())
    with Watcher(limit_seconds=60.0):
        assert in_store.wait(60)
    assert set(threading.enumerate()) == before


def test_watcher_leaves_no_thread_in_the_store_when_the_interpreter_ends():
    run_on_ranks(leave_while_the_store_answers_slowly, world_size=1)


@pytest.mark.slow
def test_hung_rank_ends_although_its_output_is_not_read():
    code = "from megatron_neobert.runtime.watcher import Watcher\nwith Watcher(limit_seconds=1.0):\n"
    code += "  while True: print('x' * 1000)"
    reader, writer = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", code], stdout=writer, stderr=writer)
    assert process.wait(600) == 69
    os.set_blocking(reader, False)
    assert b"no progress" not in os.read(reader, 1 << 20), "the pipe must be full before the report"
    os.close(reader), os.close(writer)


def test_nccl_and_slurm_wait_longer_than_the_report_of_the_watcher_takes():
    report_seconds = watcher.LONGEST_REPORT_SECONDS + watcher._FAREWELL_SECONDS
    assert report_seconds > (1 + watcher._SILENCE_TICKS) * watcher._TICK_SECONDS
    assert report_seconds < distributed.MARGIN_SECONDS
    (slurm_seconds,) = re.findall(r"--wait=(\d+)", (REPOSITORY / "examples" / "slurm" / "pretrain.sh").read_text())
    assert int(slurm_seconds) > 60 * ParallelConfig().distributed_timeout_minutes + report_seconds


def simulate(ranks: int, *, silent: int) -> tuple[dict[str, float], set[Failure | None]]:
    """Run `ranks` ranks as threads, each with its own connection. The rank `silent` stops before the search.

    Returns:
        Keys in the requests of a rank, for five seconds of a run and for the search; and the failures of the search.
    """
    server = serve_store("127.0.0.1", 0, nodes=ranks)

    def connect(rank: int) -> Watcher:
        watched = Watcher(limit_seconds=600)
        store = Mock(wraps=reach_store("127.0.0.1", server.port, timeout_seconds=600))
        watched._status, watched._run = Status(rank, "here"), RunStatus(store, node=str(rank // 8), ranks=ranks)
        return watched

    def train(watched: Watcher) -> None:
        for _ in range(5):
            assert watched._exchange_status() is None
            time.sleep(1)

    def search(watched: Watcher) -> Failure | None:
        watched._limit_seconds = 0.0
        while (failure := watched._exchange_status()) is None:
            time.sleep(1)
        return failure

    with ThreadPoolExecutor(ranks) as threads:
        watchers = list(threads.map(connect, range(ranks)))

        def mean_keys() -> float:
            requested = [call.args[0] for watched in watchers for call in watched._run.store.method_calls]
            return sum(len(key) if isinstance(key, list) else 1 for key in requested) / ranks

        list(threads.map(train, watchers))
        keys = {"train": mean_keys()}
        failures = set(threads.map(search, watchers[:silent] + watchers[silent + 1 :]))
        keys["search"] = mean_keys() - keys["train"]
    return keys, failures


@pytest.mark.slow
def test_requests_of_a_rank_to_the_store_do_not_grow_with_the_run_and_256_ranks_find_the_silent_rank():
    keys = {}
    for ranks in (64, 256):  # with 1,024 threads, Python itself delays the status of a rank on a busy machine
        keys[ranks], failures = simulate(ranks, silent=ranks // 2)
        (failure,) = failures
        assert (failure.rank, failure.reason) == (ranks // 2, f"does not answer{watcher.REMEDY}")
    assert all(count <= 2 * keys[64][phase] for phase, count in keys[256].items()), keys
