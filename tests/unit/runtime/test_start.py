"""The start of a run: store, sockets, imports and variables of a rank; the exit code of a launcher."""

import os
import re
import resource
import socket
import subprocess
import sys
from unittest.mock import Mock

import psutil
import pytest
import torch
from processes import run_on_ranks
from security.refusals import assert_refused
from torch.distributed import HashStore

from megatron_neobert import launch, pretrain
from megatron_neobert.config.schema import Settings
from megatron_neobert.errors import LauncherError
from megatron_neobert.model import kernels
from megatron_neobert.runtime import signals
from megatron_neobert.runtime.distributed import initialize
from megatron_neobert.runtime.environment import Node, find_node, is_rank_zero, local_rank, world_size
from megatron_neobert.runtime.store import reach_store, serve_store
from megatron_neobert.runtime.watcher import RunStatus, Status, Watcher


@pytest.mark.parametrize(("forwarded", "ended_by", "code"), [((), 15, 143), ((15,), 15, 75), ((15,), 9, 137)])
def test_signal_that_ended_a_rank_counts_as_a_stop_only_if_the_launcher_forwarded_it(
    monkeypatch, forwarded, ended_by, code
):
    monkeypatch.setattr(signals, "forwarded", set(forwarded))
    run = RunStatus(HashStore(), node="0", ranks=4)
    launch._record_early_end(run, 3, -ended_by)
    assert f"on rank 3 (unknown node) in iteration 0 (starting): was ended by signal {ended_by} " in run.sentence(
        run.failure()
    )
    assert run.failure().code == code


@pytest.mark.parametrize(("code", "fails"), [(0, False), (75, False), (-6, True)])
def test_rank_that_has_finished_fails_only_if_it_then_crashes(code, fails):
    run = RunStatus(HashStore(), node="0", ranks=1)
    run.publish(Status(0, is_finished=True))
    launch._record_early_end(run, 0, code)
    assert (run.failure() is not None) == fails


# --- the store of a run; tests/distributed/test_launch.py tests its address


def test_port_in_use_is_reported_with_its_number():
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConnectionError, match=f"MASTER_PORT {port} cannot be used on node 0 .*choose a free port"):
            serve_store("127.0.0.1", port, nodes=2)


def test_store_accepts_more_connections_than_the_soft_limit_of_open_files():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        store = serve_store("127.0.0.1", 0, nodes=1)
        clients = [reach_store("127.0.0.1", store.port, timeout_seconds=60) for _ in range(256)]
        assert clients[-1].add("connections", 1) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


# --- sockets of a rank between its start and its first step


GROUPS_OF_ALL_RANKS = 7  # torch's own, and six of megatron.core 0.16 and 0.19; none of them beside another for gloo


def count_sockets() -> None:
    initialize(Settings())
    torch.distributed.barrier()
    sockets = psutil.Process().net_connections("inet")
    connected = sum(socket.status == psutil.CONN_ESTABLISHED for socket in sockets)
    torch.distributed.barrier()
    # One to the store, and in each group one to every other rank. Over NCCL these groups have none.
    assert connected == 1 + GROUPS_OF_ALL_RANKS * (torch.distributed.get_world_size() - 1)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_has_one_socket_to_every_other_rank_per_group_that_megatron_uses(world_size):
    run_on_ranks(count_sockets, world_size=world_size)


# --- imports of a rank before it trains


HEAVY = ("torch._inductor", "torch._dynamo", "wandb")


def check_modules_of_a_rank() -> None:
    import preloaded

    assert [name for name in HEAVY if name in preloaded.MODULES_OF_A_RANK] == []


def test_rank_imports_neither_inductor_nor_wandb():
    run_on_ranks(check_modules_of_a_rank, world_size=1)


@pytest.mark.slow
def test_importing_megatron_directly_imports_them():
    """The control. If it fails, `import_megatron` in model/kernels.py is no longer needed."""
    code = f"import sys, megatron_neobert.training.loop; print([name for name in {HEAVY} if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert str(list(HEAVY)) in ended.stdout


def test_a_rank_chooses_its_gpu_and_one_compile_thread_before_the_hardware_is_examined(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "")
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", choose := Mock())
    monkeypatch.setattr(kernels, "check_hardware", Mock(side_effect=InterruptedError))
    with pytest.raises(InterruptedError):
        pretrain.train(Settings(), Watcher(limit_seconds=600))
    choose.assert_called_once_with(3)
    read = "from torch._inductor import config; print(config.compile_threads)"
    printed = subprocess.run([sys.executable, "-c", read], env=os.environ, capture_output=True, check=True).stdout
    assert printed.split() == [b"1"]


# --- rank and node are read from environment variables, and wrong variables are refused


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
        (
            {"NNODES": "2"},
            "NODE_RANK, MASTER_ADDR and MASTER_PORT, but none of them is set; number the nodes",
        ),
        ({**TWO, "NODE_RANK": "2"}, "NODE_RANK is 2, but 2 nodes are started, numbered 0 to 1; correct it, or set "),
        ({"WORLD_SIZE": "2", "RANK": "1", **ADDRESS}, "WORLD_SIZE is '2', but NNODES is not set, so each node would "),
        ({"PET_NNODES": "4"}, "PET_NNODES is '4', but NNODES is not set, so each node would train a run of its own"),
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
