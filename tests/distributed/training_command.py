"""The training command of a user, its environment, and launchers of several nodes."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import processes
from processes import Ended, clean_environment

from megatron_neobert.config.schema import Settings

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = str(REPOSITORY / "examples" / "pretrain_neobert.sh")
BASH = ["bash", SCRIPT]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def environment(ranks: int, **variables: object) -> dict[str, str]:
    """Return the environment of a launcher with `ranks` ranks and these variables."""
    path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    variables = {"PYTHON": sys.executable, "PYTHONPATH": path, "NPROC_PER_NODE": ranks, **variables}
    return clean_environment() | {name: str(value) for name, value in variables.items()}


def start(command: list[str], variables: dict[str, str]) -> subprocess.Popen[str]:
    """Start a command with both streams in one pipe."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, env=variables, text=True, **streams)


def flags_of(settings: Settings) -> list[str]:
    """Return the command-line flags for all settings that differ from their defaults."""
    flags: list[str] = []
    for section in fields(Settings):
        chosen, defaults = getattr(settings, section.name), getattr(Settings(), section.name)
        for setting in fields(chosen):
            value = getattr(chosen, setting.name)
            if value != getattr(defaults, setting.name):
                if setting.name == "phases":
                    value = str(list(value))  # YAML
                values = value if isinstance(value, tuple) else (value,)
                flags += [f"--{setting.name.replace('_', '-')}", *(str(one) for one in values if one is not True)]
    return flags


def run_nodes(
    commands: Sequence[Sequence[object]], variables: Sequence[dict[str, str]], *, limit_seconds: float | None = None
) -> list[Ended]:
    """Run the command of each node, a module and arguments, in forked processes until all have ended.

    Args:
        variables: Environment of each node, besides its number and the address of node 0.
    """
    processes.use_server()  # here, because two threads must not start it
    common = {"NNODES": str(len(commands)), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}

    def run(rank: int) -> Ended:
        environment = {**variables[rank], **common, "NODE_RANK": str(rank)}
        return processes.run_command(*map(str, commands[rank]), environment=environment, limit_seconds=limit_seconds)

    with ThreadPoolExecutor(len(commands)) as threads:
        return list(threads.map(run, range(len(commands))))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
