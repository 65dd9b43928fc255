"""Which node of how many this is, by the environment alone."""

import re

import pytest

from megatron_neobert.errors import ConfigError
from megatron_neobert.launch import _exit_code_of_node, _forwarded_signals
from megatron_neobert.runtime.nodes import Place, find_place

TWO = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "first", "MASTER_PORT": "23456"}
STEP = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1"}
ADDRESS = {"MASTER_ADDR": "first", "MASTER_PORT": "23456"}


def test_without_a_word_about_nodes_this_is_the_only_one():
    assert find_place({}) == Place(nodes=1, rank=0)
    assert find_place({"SLURM_NNODES": "2", "SLURM_NODEID": "0"}) == Place(nodes=1, rank=0)  # a batch script, no step


@pytest.mark.parametrize("environment", [TWO, {**STEP, **ADDRESS}], ids=["by hand", "by srun"])
def test_second_of_two_nodes(environment):
    assert find_place(environment) == Place(nodes=2, rank=1, address="first", port=23456)


def test_nnodes_overrides_the_slurm_step():
    assert find_place({**STEP, "NNODES": "1"}) == Place(nodes=1, rank=0)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"NNODES": "two"}, "NNODES is 'two'; it must be a whole number from 1 on"),
        ({"NNODES": "0"}, "NNODES is '0'; it must be a whole number from 1 on"),
        ({"NNODES": "2"}, "NODE_RANK and MASTER_ADDR and MASTER_PORT are not set; number the nodes from 0 to 1"),
        ({**TWO, "MASTER_ADDR": ""}, "2 nodes need NODE_RANK, MASTER_ADDR and MASTER_PORT, but MASTER_ADDR is not set"),
        ({**TWO, "NODE_RANK": "2"}, "NODE_RANK is 2, but 2 nodes are started, numbered 0 to 1; correct it, or set "),
        ({"NODE_RANK": "1"}, "NODE_RANK is 1, but 1 node is started, numbered 0 to 0; correct it, or set NNODES to at"),
        ({**TWO, "NODE_RANK": "-1"}, "NODE_RANK is '-1'; it must be a whole number from 0 on"),
        ({**TWO, "MASTER_PORT": "http"}, "MASTER_PORT is 'http'; it must be a whole number from 1 on"),
        ({**TWO, "MASTER_PORT": "70000"}, "MASTER_PORT is 70000; ports end at 65535"),
        (STEP, "2 nodes need SLURM_NODEID, MASTER_ADDR and MASTER_PORT, but MASTER_ADDR and MASTER_PORT are not set"),
        (
            {**STEP, **ADDRESS, "SLURM_STEP_NUM_TASKS": "16"},
            "srun started 16 tasks on 2 nodes, but one task ",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(f"{name}={text}" for name, text in value.items()),
)
def test_node_that_cannot_exist_is_refused_with_the_numbers(environment, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        find_place(environment)


def test_rank_ended_by_a_signal_stopped_early_only_if_the_launcher_passed_it_on(monkeypatch, capsys):
    assert _exit_code_of_node({3: 65}) == 65
    assert _exit_code_of_node({3: -15}) == 128 + 15
    assert "rank 3 was ended by signal 15" in capsys.readouterr().err
    monkeypatch.setattr("megatron_neobert.launch._forwarded_signals", {*_forwarded_signals, 15})
    assert _exit_code_of_node({3: -15}) == 75
    assert _exit_code_of_node({3: -9}) == 128 + 9
