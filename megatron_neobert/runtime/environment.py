"""Rank of this process, or node of this launcher, read from the environment. Standard library only."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_neobert.errors import LauncherError

_LARGEST = 2**31 - 1  # ranks are int32 in every backend


@dataclass(frozen=True, kw_only=True)
class Node:
    """One of the nodes of a run; `address` and `port` are node 0's."""

    nodes: int
    rank: int
    address: str = ""
    port: int = 0


def whole_number(name: str, default: str = "", *, minimum: int = 1, environment: Mapping[str, str] = os.environ) -> int:
    """Return the value of an environment variable, or raise LauncherError if it is no whole number in range."""
    text = environment.get(name, default)
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(_LARGEST))
    if not is_number or not minimum <= int(text) <= _LARGEST:
        raise LauncherError(
            f"the environment variable {name} is {text[:80]!r}; it must be a whole number from {minimum} on."
        )
    if name == "MASTER_PORT" and int(text) > 65535:
        raise LauncherError(f"MASTER_PORT is {text}; ports end at 65535. Choose a free one between 1024 and 32767.")
    return int(text)


def world_size() -> int:
    """Return the number of ranks that the launcher announced, 1 without a launcher; refuse contradictory variables."""
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return 1
    if missing := _missing(("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), os.environ):
        raise LauncherError(
            f"{missing} not set; torchrun and neobert train set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and "
            "MASTER_PORT, so start with one of them, or unset RANK and WORLD_SIZE for one process."
        )
    ranks, rank = whole_number("WORLD_SIZE"), whole_number("RANK", minimum=0)
    if rank >= ranks:
        raise LauncherError(
            f"the environment variable RANK is {rank}, but WORLD_SIZE is {ranks}; ranks are numbered 0 to {ranks - 1}. "
            "Start all ranks with the same WORLD_SIZE."
        )
    local_rank()
    whole_number("MASTER_PORT")
    return ranks


def local_rank() -> int:
    """Return the number of this rank among those of its node, by which it takes its GPU."""
    return whole_number("LOCAL_RANK", "0", minimum=0)


def is_rank_zero() -> bool:
    """True on the rank that logs for all."""
    return int(os.environ.get("RANK", "0")) == 0


def find_node(environment: Mapping[str, str] = os.environ) -> Node:
    """Find this node by NNODES and NODE_RANK, or by the Slurm step of this process; else it is the only one."""

    def number(name: str, default: str = "", *, minimum: int = 1) -> int:
        return whole_number(name, default, minimum=minimum, environment=environment)

    nodes, name = number("NNODES", "1"), "NODE_RANK"
    if "NNODES" not in environment and "SLURM_STEP_NUM_TASKS" in environment:
        nodes, tasks, name = number("SLURM_STEP_NUM_NODES"), number("SLURM_STEP_NUM_TASKS"), "SLURM_NODEID"
        if tasks != nodes:
            raise LauncherError(
                f"srun started {tasks} tasks on {nodes} node{'s' if nodes > 1 else ''}, but one task starts all ranks "
                "of its node; give srun --ntasks-per-node=1, or set NNODES."
            )
    if nodes > 1 and (missing := _missing((name, "MASTER_ADDR", "MASTER_PORT"), environment)):
        raise LauncherError(
            f"{nodes} nodes need {name}, MASTER_ADDR and MASTER_PORT, but {missing} not set; number the nodes from 0 "
            f"to {nodes - 1} and give all of them the address and a free port of node 0."
        )
    rank = number(name, "0", minimum=0)
    if rank >= nodes:
        raise LauncherError(
            f"{name} is {rank}, but {nodes} {'node is' if nodes == 1 else 'nodes are'} started, numbered 0 to "
            f"{nodes - 1}; correct it, or set NNODES to at least {rank + 1}."
        )
    if nodes == 1:
        return Node(nodes=1, rank=0)
    return Node(nodes=nodes, rank=rank, address=environment["MASTER_ADDR"], port=number("MASTER_PORT"))


def _missing(names: tuple[str, ...], environment: Mapping[str, str]) -> str:
    missing = [name for name in names if not environment.get(name)]
    return f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'}" if missing else ""
