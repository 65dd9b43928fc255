"""The nodes of a run: how many there are, and which one this is. Standard library only."""

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_neobert.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where this node stands among the nodes of a run; `address` and `port` are node 0's."""

    nodes: int
    rank: int
    address: str = ""
    port: int = 0


def whole_number(environment: Mapping[str, str], name: str, default: str, *, minimum: int = 1) -> int:
    """The value of an environment variable.

    Raises:
        ConfigError: It is not a whole number, or too small.
    """
    text = environment.get(name, default)
    if not (text.isascii() and text.isdigit()) or int(text) < minimum:
        raise ConfigError(f"the environment variable {name} is {text!r}; it must be a whole number from {minimum} on.")
    return int(text)


def find_place(environment: Mapping[str, str]) -> Place:
    """By NNODES and NODE_RANK; without NNODES by the Slurm step that started this process; otherwise the only node.

    Raises:
        ConfigError: Something is missing, or no such node can exist.
    """
    if "NNODES" in environment or "SLURM_STEP_NUM_TASKS" not in environment:
        nodes, rank = whole_number(environment, "NNODES", "1"), "NODE_RANK"
    else:
        nodes, rank = _nodes_of_slurm_step(environment), "SLURM_NODEID"
    if nodes > 1:
        missing = [name for name in (rank, "MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
        if missing:
            raise ConfigError(
                f"{nodes} nodes need {rank}, MASTER_ADDR and MASTER_PORT, but {' and '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} not set; number the nodes from 0 to {nodes - 1} and give all "
                "of them the address and a free port of node 0."
            )
    number = whole_number(environment, rank, "0", minimum=0)
    if number >= nodes:
        raise ConfigError(
            f"{rank} is {number}, but {nodes} {'node is' if nodes == 1 else 'nodes are'} started, numbered 0 to "
            f"{nodes - 1}; correct it, or set NNODES to at least {number + 1}."
        )
    if nodes == 1:
        return Place(nodes=1, rank=0)
    port = whole_number(environment, "MASTER_PORT", "")
    if port > 65535:
        raise ConfigError(f"MASTER_PORT is {port}; ports end at 65535. Choose a free one between 1024 and 32767.")
    return Place(nodes=nodes, rank=number, address=environment["MASTER_ADDR"], port=port)


def _nodes_of_slurm_step(environment: Mapping[str, str]) -> int:
    nodes = whole_number(environment, "SLURM_STEP_NUM_NODES", "")
    tasks = whole_number(environment, "SLURM_STEP_NUM_TASKS", "")
    if tasks != nodes:
        raise ConfigError(
            f"srun started {tasks} tasks on {nodes} node{'s' if nodes > 1 else ''}, but one task starts all ranks of "
            "its node; give srun --ntasks-per-node=1, or set NNODES."
        )
    return nodes
