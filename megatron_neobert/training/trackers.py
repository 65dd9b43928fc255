"""Trackers of logged values: SAVE/metrics.jsonl, TensorBoard, and optionally Weights & Biases. Only rank 0 uses them.

A resumed run appends to metrics.jsonl, first a line with `start` and the iteration of its checkpoint. Readers then drop
the values after this iteration, because the run repeats these iterations or takes another course.
The id of a run at Weights & Biases is stored in the save folder, so that the same command resumes the same run. A
tracker that fails is reported once, and training continues.
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
from megatron_neobert.errors import ConfigError, OutputError
from megatron_neobert.runtime.atomic_files import replace_file
from megatron_neobert.runtime.own_files import open_own

_RECORD = "metrics.jsonl"
_LEARNING = ("loss", "masked_accuracy", "lr", "grad_norm", "consumed_tokens", "skipped_iterations")
_REASON_LINES = 3  # of an error message of W&B: a heading, the setting, and the problem


class Trackers:
    """The open trackers of rank 0.

    Args:
        iteration: Iteration from which this start continues.
        log: Prints a warning.

    Raises:
        ConfigError: Weights & Biases did not start.
    """

    def __init__(self, settings: Settings, *, iteration: int, log: Callable[[str], None]) -> None:
        self.save = None if settings.checkpoint.save is None else Path(settings.checkpoint.save)
        self.log = log
        self.failed: set[str] = set()  # trackers that could not be written to
        self._append({"iteration": iteration, "start": True})
        self.tensorboard: Any = None
        if self.save is not None:
            # Slow to import, and only rank 0 needs it.
            from torch.utils.tensorboard import SummaryWriter

            # Values after the checkpoint are hidden.
            self.tensorboard = SummaryWriter(str(self.save / "tensorboard"), purge_step=iteration + 1)
        self.wandb = None if settings.logging.wandb_project is None else start_wandb(settings)

    def record(self, iteration: int, values: Mapping[str, float], *, cursor: Any) -> None:
        """Write the values to all trackers, except values that are not finite. Failures are logged, not raised."""
        values = {name: value for name, value in values.items() if math.isfinite(value)}
        self._append({"iteration": iteration, "cursor": asdict(cursor), **values})
        if self.tensorboard is not None:
            with self._logging_failures(self.tensorboard.log_dir):
                for name, value in values.items():
                    self.tensorboard.add_scalar(_tag(name), value, iteration)
        if self.wandb is not None and "W&B" not in self.failed:
            with self._logging_failures("W&B"):
                self.wandb.log({"iteration": iteration, **values})

    def _append(self, line: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl. inspection/plot.py finds lines by "iteration" as their first key."""
        if self.save is not None:
            with self._logging_failures(str(self.save / _RECORD)), open_own(self.save / _RECORD) as stream:
                now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
                stream.write(f"{json.dumps({**line, 'time': now})}\n".encode())

    @contextmanager
    def _logging_failures(self, tracker: str) -> Iterator[None]:
        """Log the first error of a tracker. Suppress OSError, OutputError, and every exception of "W&B"."""
        try:
            yield
        except Exception as error:
            # W&B raises many classes. In our own code, other errors are bugs.
            if not isinstance(error, OSError | OutputError) and tracker != "W&B":
                raise
            if tracker not in self.failed:
                reason = getattr(error, "strerror", None) or error
                self.log(f"warning: {tracker} cannot be written ({reason}); training continues without it")
            self.failed.add(tracker)

    def close(self, *, failed: bool) -> None:
        """Close TensorBoard and W&B. W&B uploads all values and records `failed`. Failures are logged, not raised."""
        if self.tensorboard is not None:
            with self._logging_failures(self.tensorboard.log_dir):
                self.tensorboard.close()
        if self.wandb is not None and "W&B" not in self.failed:
            with self._logging_failures("W&B"):
                self.wandb.finish(exit_code=int(failed))  # waits until all values are uploaded, or on disk if offline


def _tag(name: str) -> str:
    """Return the TensorBoard tag of a value, such as "train/loss". The part before the slash is the group."""
    if name.startswith("validation_"):
        return name.replace("_", "/", 1)
    return f"{'train' if name in _LEARNING else 'machine'}/{name}"


def start_wandb(settings: Settings) -> Any:
    """Start or resume the W&B run of the save folder, and return it. Raise ConfigError if W&B does not start."""
    import wandb

    project, save, id_ = settings.logging.wandb_project, settings.checkpoint.save, None
    if save is not None:
        path = Path(save) / "wandb_id.txt"
        if not path.exists():
            replace_file(path, secrets.token_hex(4) + "\n")
        id_ = path.read_text(encoding="utf-8", errors="replace").strip()[:64]
    try:
        run = wandb.init(
            project=project,
            name=save and Path(save).resolve().name,
            id=id_,
            resume="allow",
            dir=save,
            config=asdict(settings),
            allow_val_change=True,  # a run may resume with another learning rate
            settings=wandb.Settings(console="off"),  # do not capture our console output
        )
    except (wandb.Error, ValueError, OSError) as error:  # ValueError for a wrong WANDB_ variable
        reason = " ".join(" ".join(str(error).splitlines()[:_REASON_LINES]).split()).rstrip(".")
        raise ConfigError(
            f"--wandb-project {project}: W&B did not start ({reason}); correct the setting that it names (a variable "
            "WANDB_...?), use wandb login or WANDB_MODE=offline if it asks for a key, or leave the flag out."
        ) from error
    # W&B's own step counter cannot go back, but a run that was killed resumes from an earlier iteration.
    run.define_metric("iteration")
    run.define_metric("*", step_metric="iteration")
    return run
