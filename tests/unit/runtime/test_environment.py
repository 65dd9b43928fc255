"""Rank and node are read from environment variables, and wrong variables are refused with one sentence."""

import os
import re

import pytest
from security.refusals import assert_refused

from megatron_neobert.errors import LauncherError
from megatron_neobert.runtime.environment import Node, find_node, is_rank_zero, local_rank, world_size

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.fixture
def set_variables(monkeypatch):
    """Return a function that sets these variables and no others."""
    return lambda variables: monkeypatch.setattr(
        os, "environ", {name: value for name, value in variables.items() if value is not None}
    )


@pytest.mark.parametrize(("variables", "expected"), [(LAUNCHED, (2, 1, False)), ({}, (1, 0, True))])
def test_rank_is_that_of_the_launcher_or_the_only_one(set_variables, variables, expected):
    set_variables(variables)
    assert (world_size(), local_rank(), is_rank_zero()) == expected


@pytest.mark.parametrize(
    ("change", "phrases"),
    [
        ({"WORLD_SIZE": "abc"}, ["WORLD_SIZE is 'abc'", "whole number of at least 1"]),
        ({"WORLD_SIZE": "²"}, ["WORLD_SIZE is '²'"]),
        ({"WORLD_SIZE": None}, ["WORLD_SIZE is not set"]),
        ({"RANK": "-1"}, ["RANK is '-1'", "whole number of at least 0"]),
        ({"RANK": "2"}, ["RANK is 2, but WORLD_SIZE is 2", "numbered 0 to 1"]),
        ({"MASTER_PORT": None, "MASTER_ADDR": ""}, ["MASTER_ADDR and MASTER_PORT are not set"]),
        ({"MASTER_PORT": "65536"}, ["MASTER_PORT is 65536; ports end at 65535"]),
    ],
    ids=lambda value: "" if isinstance(value, list) else " ".join(f"{name}={str(value[name])[:9]}" for name in value),
)
def test_wrong_variables_of_a_rank_are_refused_with_their_values(set_variables, change, phrases):
    set_variables(LAUNCHED | change)
    assert_refused(world_size, 2, *phrases)


ADDRESS = {"MASTER_ADDR": "first", "MASTER_PORT": "23456"}
TWO = {"NNODES": "2", "NODE_RANK": "1", **ADDRESS}
STEP = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1"}
ONLY_NODE = Node(nodes=1, rank=0)
SECOND_NODE = Node(nodes=2, rank=1, address="first", port=23456)


@pytest.mark.parametrize(
    ("variables", "node"),
    [
        ({}, ONLY_NODE),
        ({"SLURM_NNODES": "2", "SLURM_NODEID": "0"}, ONLY_NODE),  # a batch script without a step
        ({**STEP, "NNODES": "1"}, ONLY_NODE),
        (TWO, SECOND_NODE),
        ({**STEP, **ADDRESS}, SECOND_NODE),
    ],
    ids=["nothing", "batch script", "NNODES overrides the step", "NNODES", "srun"],
)
def test_node_is_that_of_nnodes_or_else_of_the_slurm_step(set_variables, variables, node):
    set_variables(variables)
    assert find_node() == node


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"NNODES": "2"}, "NODE_RANK and MASTER_ADDR and MASTER_PORT are not set; number the nodes from 0 to 1"),
        ({**TWO, "NODE_RANK": "2"}, "NODE_RANK is 2, but 2 nodes are started, numbered 0 to 1; correct it, or set "),
        ({"NODE_RANK": "1"}, "NODE_RANK is 1, but 1 node is started, numbered 0 to 0; correct it, or set NNODES to at"),
        ({**TWO, "MASTER_PORT": "http"}, "MASTER_PORT is 'http'; it must be a whole number of at least 1"),
        (STEP, "2 nodes need SLURM_NODEID, MASTER_ADDR and MASTER_PORT, but MASTER_ADDR and MASTER_PORT are not set"),
        ({**STEP, **ADDRESS, "SLURM_STEP_NUM_TASKS": "16"}, "srun started 16 tasks on 2 nodes, but one task "),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(f"{name}={text}" for name, text in value.items()),
)
def test_wrong_variables_of_a_node_are_refused_with_their_values(set_variables, variables, message):
    set_variables(variables)
    with pytest.raises(LauncherError, match=re.escape(message)):
        find_node()
