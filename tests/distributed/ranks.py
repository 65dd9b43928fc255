"""Training runs on several gloo ranks, in forked processes (about a second), or by a user's command."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import processes
import pytest
from processes import Ended, clean_environment, run_on_ranks

from megatron_neobert.checkpoint.load import find_checkpoint, load_from
from megatron_neobert.checkpoint.save import Saver
from megatron_neobert.config.schema import Settings
from megatron_neobert.runtime.watcher import Watcher
from megatron_neobert.training.loop import run_training
from megatron_neobert.training.setup import build_run, join

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = str(REPOSITORY / "examples" / "pretrain_neobert.sh")
BASH = ["bash", SCRIPT]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def train_on_ranks(settings: Settings, *, world_size: int = 1, prepare: Any = None, preload: str = "preloaded") -> None:
    """Run `run_training` on `world_size` ranks. Raise if a rank fails.

    Args:
        prepare: Called in each process before training, to change functions.
        preload: Module that the processes have imported.
    """
    run_on_ranks(_train, settings, prepare, world_size=world_size, preload=preload)


def _train(settings: Settings, prepare: Any) -> None:
    if prepare is not None:
        prepare()
    run_training(settings, Watcher(limit_seconds=600))  # not entered: an error must reach the test


def load_and_save(settings: Settings) -> None:
    """Load the checkpoint in --load into a model and optimizer, and save it in --save."""
    inputs, device = join(settings)
    run = build_run(settings, inputs, device)
    found = find_checkpoint(settings)
    assert found is not None
    load_from(run, found.folder)
    Saver(run, log=print).save()


def quick_only(cases: Iterable[str], *quick: str) -> list[Any]:
    """Return cases for parametrize. `make test` runs only the `quick` cases, and `make test-all` runs all cases."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def read_metrics(save: str | Path, key: str = "loss") -> dict[int, float]:
    """Return a value per iteration from metrics.jsonl. Values are exact."""
    lines = (json.loads(line) for line in (Path(save) / "metrics.jsonl").read_text().splitlines())
    return {line["iteration"]: line[key] for line in lines if key in line}


# --- the command of a user


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
