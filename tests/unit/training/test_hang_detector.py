"""What the watchdog says and does when a rank hangs, dies or fails, with processes that do nothing else."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from megatron_neobert.training.heartbeats import Place, find_suspects

# A training loop without training. Rank 1 fails at its third mark; the watch is faster than in a run.
RANKS = """
import os, signal, sys, time
import torch
from megatron_neobert.config.schema import ParallelConfig
from megatron_neobert.training import hang_detector

hang_detector._TICK_SECONDS, hang_detector._SILENCE_SECONDS, hang_detector._FAREWELL_SECONDS = 0.2, 2.0, 1.0
torch.distributed.init_process_group("gloo")
with hang_detector.Watchdog(ParallelConfig(distributed_timeout_minutes={minutes})) as dog:
    for iteration in range(1, {iterations} + 1):
        dog.mark("waiting for data", iteration)
        {work}
        if os.environ["RANK"] == "1" and iteration == 3:
            {before}
        dog.mark("training", iteration)
        if os.environ["RANK"] == "1" and iteration == 3:
            {failure}
        torch.distributed.all_reduce(torch.ones(1))
torch.distributed.destroy_process_group()
print("finished")
"""
UNTIL_HEARD_OF = "while dog._board.read()[1].iteration < 3: time.sleep(0.05)"


class Ranks:
    """Two of them, and what they say."""

    def __init__(self, folder: Path) -> None:
        # The store is this process's, as it is torchrun's otherwise: it stays when a rank dies.
        self.folder, self.store = folder, TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.processes: list[subprocess.Popen[str]] = []

    def start(
        self, *, minutes: float = 3 / 60, iterations: int = 3, world_size: int = 2, pipe: int | None = None, **code: str
    ) -> None:
        words = {"work": "pass", "before": "pass", "failure": "pass", **code}
        script = RANKS.replace("{minutes}", str(minutes)).replace("{iterations}", str(iterations))
        for name, statement in words.items():
            script = script.replace("{" + name + "}", statement)
        place = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(self.store.port)}
        for rank in map(str, range(world_size)):
            with (self.folder / rank).open("w") as log:
                command = [sys.executable, "-c", script]
                variables = {**os.environ, **place, "RANK": rank, "TORCHELASTIC_USE_AGENT_STORE": "True"}
                self.processes.append(
                    subprocess.Popen(command, env=variables, stdout=pipe or log, stderr=subprocess.STDOUT, text=True)
                )

    def said(self, rank: int) -> str:
        return (self.folder / str(rank)).read_text()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    started = Ranks(tmp_path)
    yield started
    for process in started.processes:
        process.kill()
        process.wait()


def test_rank_that_sleeps_ends_the_run_with_69_and_its_name_and_place(ranks):
    ranks.start(before="time.sleep(300)")
    assert [process.wait(60) for process in ranks.processes] == [69, 69]
    said = ranks.said(0) + ranks.said(1)
    assert said.count("error: no progress for 0.05 min on rank ") == 1, "one rank of a machine speaks"
    assert "is behind in iteration 3 (waiting for data). The last checkpoint is untouched" in said
    assert "where rank 1 stands:\n" in ranks.said(1), "the stack of the rank in question is shown"
    assert "Traceback" not in said


@pytest.mark.slow
def test_rank_that_computes_for_ever_is_told_from_those_that_wait_for_it(ranks):
    ranks.start(failure="time.sleep(300)")
    assert [process.wait(60) for process in ranks.processes] == [69, 69]
    assert "is in no collective: <string> line " in ranks.said(0) + ranks.said(1)


@pytest.mark.slow
def test_rank_that_is_stopped_ends_the_others_with_69_and_its_name(ranks):
    ranks.start(before=UNTIL_HEARD_OF, failure="os.kill(os.getpid(), signal.SIGSTOP)")
    assert ranks.processes[0].wait(60) == 69, ranks.said(0)
    assert "no progress for 0.05 min on rank 0 (" in ranks.said(0)
    assert ") does not answer any more, last heard of in iteration 3 (waiting for data)." in ranks.said(0)
    assert "; rank 1 (" in ranks.said(0)


@pytest.mark.parametrize(
    ("failure", "code", "trouble"),
    [
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            -signal.SIGKILL,
            ") does not answer any more, last heard of in iteration 3 ",
        ),
        ("raise ValueError('planted')", 1, ") has ended: ValueError: planted."),
    ],
    ids=["killed", "raises"],
)
def test_rank_that_loses_another_ends_with_69_and_one_sentence(ranks, failure, code, trouble):
    ranks.start(before=UNTIL_HEARD_OF, failure=failure, minutes=10)
    assert [process.wait(60) for process in ranks.processes] == [69, code], ranks.said(0)
    sentence, *more = ranks.said(0).splitlines()
    assert sentence.startswith("error: rank 0 (")
    assert " lost another rank in iteration 3 (training): rank 1 (" in sentence
    assert trouble in sentence
    assert more == []


@pytest.mark.slow
def test_work_that_takes_longer_than_the_limit_is_no_hang_while_it_sets_marks(ranks):
    ranks.start(work="time.sleep(0.5)", iterations=12, minutes=4 / 60)
    assert [process.wait(60) for process in ranks.processes] == [0, 0], ranks.said(0) + ranks.said(1)
    assert ranks.said(0) == "finished\n"


def test_rank_whose_output_nobody_reads_ends_all_the_same(ranks):
    reader, writer = os.pipe()
    endless = "hang_detector._ANSWER_SECONDS = 0.5\n        while True: print('x' * 1000)"
    ranks.start(work=endless, world_size=1, pipe=writer, minutes=1 / 60)
    assert ranks.processes[0].wait(60) == 69
    os.set_blocking(reader, False)
    assert set(os.read(reader, 1 << 20)) == set(b"x\n"), "the pipe was full before there was anything to say"
    os.close(reader), os.close(writer)


def place(rank: int, **changes: object) -> Place:
    usual = Place(
        rank=rank, phase="training", iteration=7, marks=14, code="f.py line 1 in f", in_collective=True, line=1
    )
    return replace(usual, **{"host": "node", **changes})


def suspects(*places: Place, silent: tuple[int, ...] = ()) -> list[tuple[int, str]]:
    """Ranks named, from a second look at these places after which all but the silent ones have written again."""
    before = {place.rank: place for place in places}
    after = {
        rank: place if place.ended or rank in silent else replace(place, line=place.line + 1)
        for rank, place in before.items()
    }
    return [(place.rank, trouble) for place, trouble in find_suspects(before, after)]


def test_ranks_that_all_wait_for_each_other_are_no_suspects():
    assert suspects(place(0), place(1)) == []
    assert suspects(place(0, in_collective=False), place(1, in_collective=False)) == []


def test_silent_rank_counts_more_than_one_that_is_behind():
    behind = place(0, phase="waiting for data", iteration=6, marks=13)
    assert suspects(behind, place(1), place(2)) == [(0, "is behind in iteration 6 (waiting for data)")]
    assert suspects(behind, place(1), place(2), silent=(1,)) == [
        (1, "does not answer any more, last heard of in iteration 7 (training)")
    ]


def test_rank_that_waits_for_another_is_not_blamed_for_being_behind():
    """Stages of a pipeline: rank 0 hangs where it reads data, before or after it has said what the others say."""
    reads = {"in_collective": False, "code": "loader.py line 5 in next"}
    found = [(0, "is in no collective: loader.py line 5 in next")]
    assert suspects(place(0, **reads), place(1)) == found
    assert suspects(place(0, **reads), place(1, marks=13)) == found
    late = place(0, phase="waiting for data", marks=13, **reads)
    assert suspects(late, place(1), place(2, marks=13)) == [(0, "is behind in iteration 7 (waiting for data)")]


def test_rank_that_left_because_it_lost_another_is_no_suspect():
    victim = place(0, ended="it lost the others", is_victim=True)
    assert suspects(victim, place(1), place(2)) == []
    assert suspects(victim, place(1, ended="ValueError: x"), place(2)) == [(1, "has ended: ValueError: x")]


def test_busy_rank_is_a_suspect_only_among_waiting_ones():
    assert suspects(place(0), place(1, in_collective=False)) == [(1, "is in no collective: f.py line 1 in f")]
