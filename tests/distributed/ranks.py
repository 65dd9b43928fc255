"""Real training runs on several gloo ranks, each a forked process of this one.

Imports are paid once, by the parent; a run of two ranks then takes about a second.
"""

import json
import os
import socket
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing

from megatron_neobert.config import Settings
from megatron_neobert.training.loop import run_training

torch.set_num_threads(1)  # a forked child must not wait for the threads of its parent


def train_on_ranks(settings: Settings, *, world_size: int = 1, prepare: Any = None) -> None:
    """Runs `run_training` on `world_size` ranks; raises if one of them fails.

    Args:
        prepare: Called in each process before training, for controls that break something on purpose.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    multiprocessing.start_processes(
        _train, args=(settings, world_size, port, prepare), nprocs=world_size, start_method="fork"
    )


def _train(rank: int, settings: Settings, world_size: int, port: int, prepare: Any) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank)
    )
    if prepare is not None:
        prepare()
    run_training(settings)


def read_metrics(save: str | Path, key: str = "loss") -> dict[int, float]:
    """One value per iteration out of the run's metrics.jsonl; exact, as Python prints floats."""
    lines = (json.loads(line) for line in (Path(save) / "metrics.jsonl").read_text().splitlines())
    return {line["iteration"]: line[key] for line in lines if key in line}
