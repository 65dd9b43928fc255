"""The training command of a user, and its environment."""

import os
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from processes import clean_environment

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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
