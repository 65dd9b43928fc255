"""Where the values of a run are kept beside its log: a JSON line each, TensorBoard, and Weights & Biases if asked for.

Rank 0 alone keeps them. `SAVE/metrics.jsonl` is the record that everything else can be rebuilt from; a run that was
killed and goes on repeats the iterations since its checkpoint there, and the later lines count. A line with "restarted"
says where a run went on.
"""

import datetime
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_neobert.checkpoint.folder import refuse_lost_claim
from megatron_neobert.config.schema import Settings
from megatron_neobert.training.trackers_wandb import WandbRun

_RECORD = "metrics.jsonl"


class Trackers:
    """The open files and connections of rank 0."""

    def __init__(self, settings: Settings, *, iteration: int, say: Callable[[str], None]) -> None:
        self.save = None if settings.checkpoint.save is None else Path(settings.checkpoint.save)
        self.tensorboard = _open_tensorboard(settings, iteration)
        self.wandb = None if settings.logging.wandb_project is None else WandbRun(settings, say=say)
        # Not said yet: a run that has nothing left to do, or is stopped before it does anything, has not gone on.
        self.goes_on_from = iteration if iteration > 0 and self._has_record() else None

    def record(self, iteration: int, values: Mapping[str, float], *, cursor: Any) -> None:
        """Keeps those of the values that are finite; JSON knows no others.

        Raises:
            OutputError: Another run has begun to write to the save folder.
        """
        values = {name: value for name, value in values.items() if math.isfinite(value)}
        if self.save is not None:
            refuse_lost_claim(self.save)
            if self.goes_on_from is not None:
                self._append({"iteration": self.goes_on_from, "restarted": 1})  # what plot_run.py marks
                self.goes_on_from = None
            self._append({"iteration": iteration, "cursor": asdict(cursor), **values})
        if self.tensorboard is not None:
            for name, value in values.items():
                self.tensorboard.add_scalar(name, value, iteration)
        if self.wandb is not None:
            self.wandb.record(iteration, values)

    def _has_record(self) -> bool:
        return self.save is not None and (self.save / _RECORD).exists()

    def _append(self, values: dict[str, Any]) -> None:
        assert self.save is not None
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        with (self.save / _RECORD).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({**values, "time": now}) + "\n")  # "iteration" first: run_log.py finds lines by it

    def close(self, *, failed: bool) -> None:
        if self.tensorboard is not None:
            self.tensorboard.close()
        if self.wandb is not None:
            self.wandb.close(failed=failed)


def _open_tensorboard(settings: Settings, iteration: int) -> Any:
    folder = settings.logging.tensorboard_dir
    if folder is None and settings.checkpoint.save is not None:
        folder = str(Path(settings.checkpoint.save) / "tensorboard")
    if folder is None:
        return None
    from torch.utils.tensorboard import SummaryWriter  # slow to import, and only one rank needs it

    return SummaryWriter(folder, purge_step=iteration + 1)  # hides what a killed run wrote beyond its checkpoint
