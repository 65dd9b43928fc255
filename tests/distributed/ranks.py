"""Training runs on several gloo ranks, which are forked processes. A run of two ranks takes about a second."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from processes import run_on_ranks

from megatron_neobert.checkpoint.load import find_checkpoint, load_from
from megatron_neobert.checkpoint.save import Saver
from megatron_neobert.config.schema import Settings
from megatron_neobert.runtime.watcher import Watcher
from megatron_neobert.training.loop import run_training
from megatron_neobert.training.setup import build_run, join


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
