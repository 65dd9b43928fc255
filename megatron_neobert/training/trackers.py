"""Trackers of logged values: JSON lines, TensorBoard, and optionally Weights & Biases.

Rank 0 alone keeps them. In `SAVE/metrics.jsonl` a run that was killed and resumes repeats the iterations since its
checkpoint, and the later lines count; a line with "restarted" marks where it resumed. A run at Weights & Biases is
known by an id in the save folder, so that the same command resumes the same run. A tracker that fails is named once,
and training continues.
"""

import datetime
import json
import math
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_neobert.config.schema import Settings
from megatron_neobert.errors import ConfigError
from megatron_neobert.runtime.atomic_files import replace_file

_RECORD = "metrics.jsonl"
_LEARNING = ("loss", "masked_accuracy", "lr", "grad_norm", "consumed_tokens", "skipped_iterations")
_REASON_LINES = 3  # of an error of W&B: a heading, the setting, what is wrong with it


class Trackers:
    """The open files and connections of rank 0."""

    def __init__(self, settings: Settings, *, iteration: int, log: Callable[[str], None]) -> None:
        self.save = None if settings.checkpoint.save is None else Path(settings.checkpoint.save)
        self.log = log
        self.failed: set[str] = set()  # what values could not be written to; training is worth more than a log of it
        self.tensorboard = _open_tensorboard(settings, iteration)
        self.wandb = None if settings.logging.wandb_project is None else start_wandb(settings)
        has_record = self.save is not None and (self.save / _RECORD).exists()
        # Not recorded yet: a run that has nothing left to do, or is stopped before it does anything, has not resumed.
        self.resumes_from = iteration if has_record else None

    def record(self, iteration: int, values: Mapping[str, float], *, cursor: Any) -> None:
        """Keep the values that are finite; JSON knows no others."""
        values = {name: value for name, value in values.items() if math.isfinite(value)}
        if self.save is not None:
            with self._logging_failures(str(self.save / _RECORD)):
                if self.resumes_from is not None:
                    self._append({"iteration": self.resumes_from, "restarted": 1})  # what neobert plot marks
                    self.resumes_from = None
                self._append({"iteration": iteration, "cursor": asdict(cursor), **values})
        if self.tensorboard is not None:
            with self._logging_failures(self.tensorboard.log_dir):
                for name, value in values.items():
                    self.tensorboard.add_scalar(_tag(name), value, iteration)
        if self.wandb is not None and "W&B" not in self.failed:
            with self._logging_failures("W&B"):
                self.wandb.log({"iteration": iteration, **values})

    @contextmanager
    def _logging_failures(self, place: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not isinstance(error, OSError) and place != "W&B":
                raise
            if place not in self.failed:
                reason = getattr(error, "strerror", None) or error
                self.log(f"warning: {place} takes no values ({reason}); the run continues without them")
            self.failed.add(place)

    def _append(self, values: dict[str, Any]) -> None:
        assert self.save is not None
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        with (self.save / _RECORD).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({**values, "time": now}) + "\n")  # "iteration" first: run_log.py finds lines by it

    def close(self, *, failed: bool) -> None:
        if self.tensorboard is not None:
            with self._logging_failures(self.tensorboard.log_dir):
                self.tensorboard.close()
        if self.wandb is not None and "W&B" not in self.failed:
            with self._logging_failures("W&B"):
                self.wandb.finish(exit_code=int(failed))  # returns when W&B has everything, or the disk if offline


def _tag(name: str) -> str:
    """Return TensorBoard's tag, whose first part is the group that a curve is shown in."""
    if name.startswith("validation_"):
        return name.replace("_", "/", 1)
    return f"{'train' if name in _LEARNING else 'machine'}/{name}"


def _open_tensorboard(settings: Settings, iteration: int) -> Any:
    if settings.checkpoint.save is None:
        return None
    from torch.utils.tensorboard import SummaryWriter  # slow to import, and only one rank needs it

    folder = str(Path(settings.checkpoint.save) / "tensorboard")
    return SummaryWriter(folder, purge_step=iteration + 1)  # hides what a killed run wrote beyond its checkpoint


def start_wandb(settings: Settings) -> Any:
    """Start a run at W&B, or resume that of the save folder."""
    import wandb

    project, save = settings.logging.wandb_project, settings.checkpoint.save
    try:
        run = wandb.init(
            project=project,
            name=save and Path(save).resolve().name,
            id=save and _id_of(Path(save)),
            resume="allow",
            dir=save,
            config=asdict(settings),
            allow_val_change=True,  # of that config: a run may resume with another learning rate
            settings=wandb.Settings(console="off"),  # the log is on the console already
        )
    except (wandb.Error, ValueError, OSError) as error:  # ValueError: what it makes of a wrong WANDB_ variable
        reason = " ".join(" ".join(str(error).splitlines()[:_REASON_LINES]).split()).rstrip(".")
        raise ConfigError(
            f"--wandb-project {project}: W&B did not start ({reason}); correct what it names (a variable WANDB_...?), "
            "log in with wandb login or set WANDB_MODE=offline if it asks for a key, or leave the flag out."
        ) from error
    # W&B's own counter cannot go back, which a run does that was killed behind its last checkpoint.
    run.define_metric("iteration")
    run.define_metric("*", step_metric="iteration")
    return run


def _id_of(save: Path) -> str:
    """Return the W&B id of a save folder, drawn at its first use. A run in another folder is another run."""
    path = save / "wandb_id.txt"
    if not path.exists():
        replace_file(path, secrets.token_hex(4) + "\n")
    return path.read_text(encoding="utf-8", errors="replace").strip()[:64]
