"""Reports and exit codes of ranks when a rank hangs, dies or fails. The processes do not train (marking_rank.py)."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import processes
import pytest
from commands import REPOSITORY
from processes import Ended, group_of, run_command
from torch.distributed import Store, TCPStore
from torch.distributed.distributed_c10d import GroupName, _store_based_barrier

from megatron_neobert.config.schema import ParallelConfig
from megatron_neobert.runtime import distributed
from megatron_neobert.runtime.store import reach_store, serve_store
from megatron_neobert.training import hang_detector, heartbeats

RANK = "unit.training.marking_rank"


@pytest.fixture
def run_two() -> Callable[..., list[Ended]]:
    """Return a function that runs two ranks. The test process has the store, in place of torchrun."""

    def run(activity: str, how: str, *, minutes: float = 3 / 60, iterations: int = 3) -> list[Ended]:
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        group = group_of(store, world_size=2)

        def run_rank(rank: int) -> Ended:
            environment = {**group, "RANK": str(rank)}
            return run_command(RANK, activity, how, minutes, iterations, environment=environment)

        processes.use_server()  # here, because two threads must not start it
        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(run_rank, range(2)))

    return run


def test_rank_that_sleeps_ends_the_run_with_69_and_its_name_and_place(run_two):
    ranks = run_two("data", "sleep")
    assert [rank.code for rank in ranks] == [69, 69]
    output = ranks[0].output + ranks[1].output
    assert output.count("error: no progress for 0.05 min on rank ") == 1, "one rank of a machine reports"
    assert "is behind in iteration 3 (waiting for data). The last checkpoint is untouched" in output
    assert "marking_rank.py" in ranks[1].output and " in fail\n" in ranks[1].output, "stack of the rank at fault"
    assert "most recent call first" not in ranks[0].output
    # The flight recorder of rank 0 names the collective.
    assert (", collective gloo:all_reduce: " in output) == ("on rank 0 (" in output)
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("how", "code", "reason"),
    [
        ("kill", -signal.SIGKILL, ") does not answer, last heartbeat in iteration 3 "),
        ("raise", 1, ") has ended: ValueError: planted."),
        ("raise and stay", 1, ") has ended: ValueError: planted\\x1b]0;owned\\x07."),
    ],
)
def test_rank_that_loses_another_rank_ends_with_69_and_one_sentence(run_two, how, code, reason):
    first, second = run_two("training", how, minutes=10)
    assert (first.code, second.code) == (69, code), first.output
    sentence, *more = first.output.splitlines()
    assert sentence.startswith("error: rank 0 (")
    assert " lost another rank in iteration 3 (training): rank 1 (" in sentence
    assert reason in sentence
    assert more == []
    assert "rank 0 has not ended" not in second.output, "it must end within seconds"


@pytest.mark.slow
def test_run_longer_than_the_limit_is_not_a_hang_while_it_makes_progress(run_two):
    ranks = run_two("nowhere", "slow", iterations=12, minutes=4 / 60)
    assert [(rank.code, rank.output) for rank in ranks] == [(0, "finished\n")] * 2


def start(rank: int, variables: dict[str, str], *arguments: object, output: int | None = None) -> subprocess.Popen[str]:
    code = f"import sys; sys.argv[0] = 'rank'; from {RANK} import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, **variables, "RANK": str(rank), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=output or subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("minutes", "message"),
    [(3 / 60, "no progress for 0.05 min on rank 0 ("), (10, "error: rank 0 (")],
    ids=["after the time limit", "after a minute without a heartbeat"],
)
def test_suspended_rank_ends_the_other_ranks_with_69_and_its_name(minutes, message):
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    group = group_of(store, world_size=2)
    first, second = (start(rank, group, "training", "stop", minutes, 3) for rank in (0, 1))
    output, _ = first.communicate(timeout=600)
    second.kill()
    second.communicate()
    assert first.returncode == 69, output
    assert message in output
    assert ") does not answer, last heartbeat in iteration 3 (training)." in output
    assert ": rank 1 (" in output


@pytest.mark.slow
def test_hung_rank_ends_although_its_output_is_not_read():
    reader, writer = os.pipe()
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    process = start(0, group_of(store, world_size=1), "nowhere", "print", 1 / 60, 3, output=writer)
    assert process.wait(600) == 69
    os.set_blocking(reader, False)
    assert b"no progress" not in os.read(reader, 1 << 20), "the pipe must be full before the report"
    os.close(reader), os.close(writer)


def test_nccl_and_slurm_wait_longer_than_the_report_of_the_hang_detector_takes():
    # Requests: number of searches, two reads, the suspects; the pending collective and the number of reports.
    report_seconds = hang_detector._TICK_SECONDS + heartbeats.SILENCE_SECONDS + 6 * heartbeats.ANSWER_SECONDS
    assert report_seconds < distributed.MARGIN_SECONDS
    (slurm_seconds,) = re.findall(r"--wait=(\d+)", (REPOSITORY / "examples" / "slurm" / "pretrain.sh").read_text())
    limit_seconds = 60 * ParallelConfig().distributed_timeout_minutes
    assert int(slurm_seconds) > limit_seconds + report_seconds + hang_detector._FAREWELL_SECONDS


class CountedStore:
    """A store that counts the keys of all requests."""

    def __init__(self, store: Store) -> None:
        self._store, self.keys = store, 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def request(*arguments: Any) -> Any:
            self.keys += len(arguments[0]) if isinstance(arguments[0], list) else 1
            return getattr(self._store, name)(*arguments)

        return request


def simulate(ranks: int, *, silent: int) -> tuple[dict[str, float], set[str]]:
    """Run `ranks` ranks as threads, each with its own connection. The rank `silent` stops before the search.

    Returns:
        Keys of the requests of a rank for its groups, for five heartbeats and for the search; and the different results
        of the search.
    """
    server = serve_store("127.0.0.1", 0, nodes=ranks)
    results = set()

    def form_groups(rank: int) -> None:
        # A rank without tensor, pipeline or context parallelism is in 11 groups of one rank and in 6 of all.
        groups = [(f"{rank}, {number}", 1) for number in range(11)] + [(f"all, {number}", ranks) for number in range(6)]
        for name, members in groups:
            _store_based_barrier(rank, stores[rank], GroupName(name), members, timedelta(minutes=10))

    def write_heartbeats(rank: int) -> None:
        for _ in range(5):
            beats[rank].write("iteration 5 (training)", 10)
            beats[rank].is_rank_lost()
            time.sleep(1)

    def search(rank: int) -> None:
        has_result = threading.Event()

        def beat() -> None:
            while not has_result.wait(1):
                beats[rank].write("iteration 5 (training)", 10)

        if rank != silent:
            threading.Thread(target=beat).start()
            results.add(json.dumps(beats[rank].find_suspects(10)))
            has_result.set()

    keys = {}
    with ThreadPoolExecutor(ranks) as threads:
        connect = partial(reach_store, "127.0.0.1", server.port, timeout_seconds=600)
        stores = list(threads.map(lambda _: CountedStore(connect()), range(ranks)))
        beats = [heartbeats.Heartbeats(store, rank=rank, ranks=ranks) for rank, store in enumerate(stores)]
        for phase in (form_groups, write_heartbeats, search):
            before = sum(store.keys for store in stores)
            list(threads.map(phase, range(ranks)))
            keys[phase.__name__] = (sum(store.keys for store in stores) - before) / ranks
    return keys, results


@pytest.mark.slow
def test_requests_of_a_rank_to_the_store_do_not_grow_with_the_run_and_256_ranks_find_the_silent_rank():
    requests = {}
    for ranks in (64, 256):  # with 1,024 threads, Python itself delays heartbeats on a busy machine
        requests[ranks], suspects = simulate(ranks, silent=ranks // 2)
        (suspect,) = suspects
        assert f'"rank {ranks // 2} (' in suspect and "does not answer" in suspect
    # Measured with 64 and 1,024 ranks: 63 and 65 keys for the groups, 19 for five heartbeats, 16 for the search.
    for name, keys in requests[256].items():
        assert keys <= 2 * requests[64][name], requests
