"""Real training runs on several gloo ranks, each a forked process: a run of two ranks takes about a second."""

import json
from pathlib import Path
from typing import Any

from processes import run_on_ranks

from megatron_neobert.config import Settings
from megatron_neobert.training.loop import run_training


def train_on_ranks(settings: Settings, *, world_size: int = 1, prepare: Any = None) -> None:
    """Runs `run_training` on `world_size` ranks; raises if one of them fails.

    Args:
        prepare: Called in each process before training, for controls that break something on purpose.
    """
    run_on_ranks(_train, settings, prepare, world_size=world_size)


def _train(settings: Settings, prepare: Any) -> None:
    if prepare is not None:
        prepare()
    run_training(settings)


def read_metrics(save: str | Path, key: str = "loss") -> dict[int, float]:
    """One value per iteration out of the run's metrics.jsonl; exact, as Python prints floats."""
    lines = (json.loads(line) for line in (Path(save) / "metrics.jsonl").read_text().splitlines())
    return {line["iteration"]: line[key] for line in lines if key in line}
