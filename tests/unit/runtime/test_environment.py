"""Which rank this is, or which node: by the environment alone, which is refused in one sentence where it is wrong."""

import re

import pytest
from security.refusals import assert_refused

from megatron_neobert.errors import LauncherError
from megatron_neobert.runtime.environment import Node, find_node, is_rank_zero, local_rank, world_size

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}

CASES = [
    ({"WORLD_SIZE": "abc"}, ["WORLD_SIZE is 'abc'", "whole number from 1 on"]),
    ({"WORLD_SIZE": "0"}, ["WORLD_SIZE is '0'"]),
    ({"WORLD_SIZE": "²"}, ["WORLD_SIZE is '²'"]),
    ({"WORLD_SIZE": "9" * 5000}, ["WORLD_SIZE is '999"]),
    ({"WORLD_SIZE": None}, ["WORLD_SIZE is not set"]),
    ({"RANK": None}, ["RANK is not set"]),
    ({"RANK": "-1"}, ["RANK is '-1'", "whole number from 0 on"]),
    ({"RANK": "2"}, ["RANK is 2, but WORLD_SIZE is 2", "numbered 0 to 1"]),
    ({"LOCAL_RANK": "gpu0"}, ["LOCAL_RANK is 'gpu0'"]),
    ({"MASTER_PORT": None, "MASTER_ADDR": ""}, ["MASTER_ADDR and MASTER_PORT are not set"]),
    ({"MASTER_PORT": "65536"}, ["MASTER_PORT is 65536; ports end at 65535"]),
]


def set_all(monkeypatch, **changes):
    for name, value in {**dict.fromkeys(NAMES), **LAUNCHED, **changes}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)


def test_a_launched_rank_knows_its_place(monkeypatch):
    set_all(monkeypatch)
    assert (world_size(), local_rank(), is_rank_zero()) == (2, 1, False)


def test_without_a_launcher_there_is_one_rank(monkeypatch):
    set_all(monkeypatch, **dict.fromkeys(NAMES))
    assert (world_size(), local_rank(), is_rank_zero()) == (1, 0, True)


@pytest.mark.parametrize(
    ("changes", "words"),
    CASES,
    ids=[f"{name}={str(value)[:9]}" for case, _ in CASES for name, value in [next(iter(case.items()))]],
)
def test_environment_that_no_launcher_sets_is_refused(monkeypatch, changes, words):
    set_all(monkeypatch, **changes)
    assert_refused(world_size, 2, *words)


TWO = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "first", "MASTER_PORT": "23456"}
STEP = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1"}
ADDRESS = {"MASTER_ADDR": "first", "MASTER_PORT": "23456"}
ONLY = Node(nodes=1, rank=0)
SECOND = Node(nodes=2, rank=1, address="first", port=23456)


@pytest.mark.parametrize(
    ("environment", "node"),
    [
        ({}, ONLY),
        ({"SLURM_NNODES": "2", "SLURM_NODEID": "0"}, ONLY),  # a batch script, no step
        ({**STEP, "NNODES": "1"}, ONLY),
        (TWO, SECOND),
        ({**STEP, **ADDRESS}, SECOND),
    ],
    ids=["nothing", "batch script", "NNODES overrides the step", "by hand", "by srun"],
)
def test_node_is_found_by_its_variables_or_those_of_the_slurm_step(environment, node):
    assert find_node(environment) == node


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
        (STEP, "2 nodes need SLURM_NODEID, MASTER_ADDR and MASTER_PORT, but MASTER_ADDR and MASTER_PORT are not set"),
        ({**STEP, **ADDRESS, "SLURM_STEP_NUM_TASKS": "16"}, "srun started 16 tasks on 2 nodes, but one task "),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(f"{name}={text}" for name, text in value.items()),
)
def test_node_that_cannot_exist_is_refused_with_the_numbers(environment, message):
    with pytest.raises(LauncherError, match=re.escape(message)):
        find_node(environment)
