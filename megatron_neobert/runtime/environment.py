"""The rank of this process or the node of this launcher, and the installed packages. Standard library only."""

import importlib.metadata
import os
import re
from dataclasses import dataclass

from megatron_neobert.errors import LauncherError

_LARGEST = 2**31 - 1  # ranks are int32 in NCCL and gloo


@dataclass(frozen=True, kw_only=True)
class Node:
    """Number of nodes and this node's rank. `address` and `port` are node 0's; empty and 0 in a run of one node."""

    nodes: int
    rank: int
    address: str = ""
    port: int = 0


def whole_number(name: str, default: str = "", *, minimum: int = 1) -> int:
    """Return an environment variable, or `default` if it is not set, as an integer.

    Raise LauncherError if the value is not a whole number from `minimum` to 2**31 - 1 (MASTER_PORT: 65535).
    """
    text = os.environ.get(name, default)
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(_LARGEST))
    if not is_number or not minimum <= int(text) <= _LARGEST:
        raise LauncherError(
            f"the environment variable {name} is {text[:80]!r}; it must be a whole number of at least {minimum}."
        )
    if name == "MASTER_PORT" and int(text) > 65535:
        raise LauncherError(f"MASTER_PORT is {text}; ports end at 65535. Choose a free port from 1024 to 32767.")
    return int(text)


def world_size() -> int:
    """Return WORLD_SIZE, the number of ranks, or 1 if neither RANK nor WORLD_SIZE is set.

    Raise LauncherError if one of the launcher's variables (RANK, MASTER_PORT and so on) is missing or not in range.
    """
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return 1
    if missing := _missing("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        raise LauncherError(
            f"{missing}; torchrun and neobert train set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and "
            "MASTER_PORT. Start the ranks with one of these, or unset RANK and WORLD_SIZE to run one process."
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
    """Return the number of this rank on its node, which is also the number of its GPU; 0 without a launcher."""
    return whole_number("LOCAL_RANK", "0", minimum=0)


def is_rank_zero() -> bool:
    """Return True if this is rank 0, which logs for all ranks."""
    return int(os.environ.get("RANK", "0")) == 0


def find_node(*, starts: bool = True) -> Node:
    """Return the number of nodes, this node's number, and node 0's address, which is empty if there is only one node.

    Read NNODES and NODE_RANK or, if NNODES is not set, the variables of Slurm's step. If neither is set, the run uses
    one node. Raise LauncherError if a variable is missing, not in range, or contradicts another variable.

    Args:
        starts: False to read only the number of nodes, for a plan. The result is then node 0 without an address.
    """
    nodes, name = whole_number("NNODES", "1"), "NODE_RANK"
    if "NNODES" not in os.environ and "SLURM_STEP_NUM_TASKS" in os.environ:
        nodes, name = whole_number("SLURM_STEP_NUM_NODES"), "SLURM_NODEID"
        if (tasks := whole_number("SLURM_STEP_NUM_TASKS")) != nodes:
            raise LauncherError(
                f"srun started {tasks} tasks on {nodes} node{'s' if nodes > 1 else ''}, but one task starts all ranks "
                "of its node; give srun --ntasks-per-node=1, or set NNODES."
            )
    elif "NNODES" not in os.environ and "LOCAL_RANK" not in os.environ:  # set for the ranks of a launcher
        for of_pods in ("WORLD_SIZE", "PET_NNODES"):  # Kubeflow's, of one process per pod
            if os.environ.get(of_pods, "1") != "1":
                raise LauncherError(
                    f"{of_pods} is {os.environ[of_pods][:80]!r}, but NNODES is not set, so each node would train a run "
                    f"of its own; set NNODES to the number of nodes and NODE_RANK to the number of this one, or unset "
                    f"{of_pods}."
                )
    if not starts:
        return Node(nodes=nodes, rank=0)
    if nodes > 1 and (missing := _missing(name, "MASTER_ADDR", "MASTER_PORT")):
        raise LauncherError(
            f"{nodes} nodes need {name}, MASTER_ADDR and MASTER_PORT, but {missing}; number the nodes from 0 "
            f"to {nodes - 1}, and set the address and a free port of node 0 on all nodes."
        )
    rank = whole_number(name, "0", minimum=0)
    if rank >= nodes:
        raise LauncherError(
            f"{name} is {rank}, but {nodes} {'node is' if nodes == 1 else 'nodes are'} started, numbered 0 to "
            f"{nodes - 1}; correct it, or set NNODES to at least {rank + 1}."
        )
    if nodes == 1:
        return Node(nodes=1, rank=0)
    return Node(nodes=nodes, rank=rank, address=os.environ["MASTER_ADDR"], port=whole_number("MASTER_PORT"))


def _missing(*names: str) -> str:
    """Return a clause that lists the variables that are not set, such as "RANK is not set", or "" if all are set."""
    missing = [name for name in names if not os.environ.get(name)]
    if len(missing) == len(names):
        return "none of them is set"
    return f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set" if missing else ""


def installed_packages() -> dict[str, str]:
    """Return installed distributions as normalized name (PEP 503, such as transformer-engine) -> version."""
    distributions = ((package.metadata["Name"], package.version) for package in importlib.metadata.distributions())
    return {re.sub("[-_.]+", "-", name).lower(): version for name, version in distributions if name}
