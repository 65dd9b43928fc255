"""Which restarts are allowed, which ends are worth one, and with which code a node ends."""

import signal

import pytest

from megatron_neobert import launch
from megatron_neobert.config.schema import CheckpointConfig
from megatron_neobert.errors import ConfigError
from megatron_neobert.runtime import signals, torchrun


@pytest.mark.parametrize(
    ("checkpoint", "nodes", "problem"),
    [
        (CheckpointConfig(save="run", load="run"), 2, "MAX_RESTARTS is set for 2 nodes"),
        (CheckpointConfig(save="run"), 1, "--save is run and --load is None"),
        (CheckpointConfig(save="run", load="other"), 1, "--save is run and --load is other"),
        (CheckpointConfig(), 1, "--save is None and --load is None"),
    ],
)
def test_restarts_that_could_not_resume_are_refused(checkpoint, nodes, problem):
    with pytest.raises(ConfigError, match=problem):
        launch.check_restarts(checkpoint, nodes=nodes)


def test_restarts_are_allowed_where_save_and_load_are_the_same_folder():
    launch.check_restarts(CheckpointConfig(save="run", load="./run"), nodes=1)


@pytest.mark.parametrize("code", [0, 2, 65, 66, 70, 73, 75, 78, 130])
def test_ends_that_would_only_repeat_themselves_or_were_asked_for_are_no_crashes(code):
    assert not torchrun.is_crash(code)


@pytest.mark.parametrize("code", [1, 69, 74, 128 + signal.SIGKILL, 128 + signal.SIGSEGV])
def test_ends_that_may_not_come_again_are_crashes(code):
    assert torchrun.is_crash(code)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [({0: 69, 1: 1}, 1), ({0: 69, 1: -9}, 137), ({0: 69, 1: 69}, 69), ({0: 74, 1: 69}, 74), ({2: 75}, 75)],
)
def test_node_ends_with_the_code_of_the_rank_that_did_not_merely_lose_another(codes, expected):
    assert torchrun.exit_code_of_node(codes) == expected


def test_rank_ended_by_a_signal_stopped_early_only_if_the_launcher_passed_it_on(monkeypatch, capsys):
    assert torchrun.exit_code_of_node({3: -15}) == 128 + 15
    assert "rank 3 was ended by signal 15" in capsys.readouterr().err
    monkeypatch.setattr(signals, "passed_on", {15})
    assert torchrun.exit_code_of_node({3: -15}) == 75
    assert torchrun.exit_code_of_node({3: -9}) == 128 + 9
