"""Every launcher of a run names the rank that fails, hangs or leaves, and ends with its code, at each stage."""

import itertools
import re
import socket
from typing import Any

import pytest
from failing_rank import STAGES
from processes import Ended
from ranks import flags_of, run_nodes
from tests_tiny import tiny_settings

HANG_MINUTES = 0.1
# Much shorter than the timeout of a collective, which would otherwise end the run.
LONGEST_SECONDS = 120.0
# How a rank fails -> exit code of all launchers, and the reason that they print.
REASONS = {
    "raise": (1, "ValueError: planted\\x1b]0;owned\\x07"),
    "refuse": (74, "planted refusal."),
    "sys.exit 0": (69, "exited with code 0 before the run was finished"),
    "os._exit 0": (69, "exited with code 0 before the run was finished"),
    "os._exit 1": (1, "exited with code 1 before the run was finished"),
    "kill": (137, "was ended by signal 9 (Killed)"),
    "hang": (69, "no progress for 0.1 min"),
    "stop": (69, "does not answer"),
    "stop for a minute": (69, "does not answer"),
}


def launch(corpus: Any, *, nodes: int, fault: str) -> list[Ended]:
    """Run two ranks on one or two nodes until all launchers have ended."""
    settings = tiny_settings(corpus, training={"eval_interval": 3})
    if fault.endswith(("hang", "stop")):
        settings = settings.with_section("parallel", distributed_timeout_minutes=HANG_MINUTES)
    variables = {"NPROC_PER_NODE": str(2 // nodes), "FAULT": fault, "OMP_NUM_THREADS": "1"}
    command = ("failing_rank:launch_forked", "failing_rank", *flags_of(settings))
    results = run_nodes([command] * nodes, [variables] * nodes, limit_seconds=LONGEST_SECONDS)
    assert any("the fault\n" in result.output for result in results), results
    return results


def assert_all_name_the_rank(corpus: Any, nodes: int, stage: str, rank: int, how: str) -> list[Ended]:
    code, reason = REASONS[how]
    if stage == "parsing":  # before the watcher starts
        reason = {"raise": REASONS["os._exit 1"][1], "hang": REASONS["stop"][1]}.get(how, reason)
    launchers = launch(corpus, nodes=nodes, fault=f"{stage}:{rank}:{how}")
    for ended in launchers:
        assert ended.code == code, ended.output
        (sentence,) = ended.errors
        assert sentence.startswith(f"error on rank {rank} ({socket.gethostname()}) in iteration "), ended.output
        assert reason in sentence, ended.output
        assert how == "raise" or "Traceback" not in ended.output
    return launchers


def test_rank_that_hangs_is_named_with_its_place_and_prints_its_stack(tiny_corpus):
    first, second = assert_all_name_the_rank(tiny_corpus, 2, "training", 1, "hang")
    assert " in iteration 3 (training): no progress for 0.1 min" in first.errors[0]
    # The flight recorder names the collective if the rank that waits in it has searched.
    assert re.search(r"min( \(rank 0 is in gloo:[a-z_]+\))?\. The last checkpoint is untouched", first.errors[0])
    assert "failing_rank.py" in second.output and " in fail\n" in second.output
    assert "most recent call first" not in first.output


QUICK = [
    (2, "folders", 0, "refuse"),
    (2, "joining", 1, "raise"),
    (2, "folders", 1, "sys.exit 0"),
    (2, "training", 0, "kill"),
    (1, "training", 1, "os._exit 0"),
]
SLOW = [
    (2, "training", 1, "stop"),
    (2, "training", 0, "stop for a minute"),
    *itertools.product((1, 2), STAGES, (0, 1), ("raise", "os._exit 0", "os._exit 1", "kill", "hang")),
]


@pytest.mark.parametrize(
    ("nodes", "stage", "rank", "how"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW if case not in QUICK)],
)
def test_at_each_stage_all_launchers_name_the_rank_that_fails_and_end_with_its_code(
    tiny_corpus, nodes, stage, rank, how
):
    assert_all_name_the_rank(tiny_corpus, nodes, stage, rank, how)
