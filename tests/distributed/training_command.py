"""The training command as a user starts it, and the environment that it is started in."""

import socket
import sys
from dataclasses import fields
from pathlib import Path

from processes import clean_environment

from megatron_neobert.config.schema import Settings

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = str(REPOSITORY / "examples" / "pretrain_neobert.sh")
BASH = ["bash", SCRIPT]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def environment(ranks: int, **more: object) -> dict[str, str]:
    own = {"PYTHON": sys.executable, "PYTHONPATH": str(REPOSITORY), "NPROC_PER_NODE": str(ranks)}
    return {**clean_environment(), **own, **{name: str(value) for name, value in more.items()}}


def flags_of(settings: Settings) -> list[str]:
    """The command line of these settings."""
    words: list[str] = []
    for section in fields(Settings):
        chosen, defaults = getattr(settings, section.name), getattr(Settings(), section.name)
        for setting in fields(chosen):
            value = getattr(chosen, setting.name)
            if value != getattr(defaults, setting.name):
                if setting.name == "phases":
                    value = str(list(value))  # as YAML
                several = value if isinstance(value, tuple) else (value,)
                words += [f"--{setting.name.replace('_', '-')}", *map(str, several)]
    return words


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
