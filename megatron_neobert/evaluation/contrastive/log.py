"""The loss while fine-tuning: a line per interval for the reader, and the whole history as CSV and figure."""

import csv
import io
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from megatron_neobert.evaluation.plots import Curve, plot_curves
from megatron_neobert.runtime.atomic_files import replace_file

_COLUMNS = ("step", "loss", "learning_rate", "grad_norm")


class LossLog(TrainerCallback):
    """Rewrites the CSV at every interval from the trainer's history, which a checkpoint carries: no step is twice.

    A loss is the mean since the last interval; where a run went on in the middle of one, since the checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start: tuple[int, float] | None = None  # step and time

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._start = state.global_step, time.monotonic()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        entries = [entry for entry in state.log_history if "loss" in entry]
        if not state.is_world_process_zero or not entries or "loss" not in state.log_history[-1]:
            return
        text = io.StringIO()
        writer = csv.DictWriter(text, _COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(entries)
        replace_file(self._path, text.getvalue())
        if not sys.stderr.isatty():  # where the trainer draws a bar
            print(self._describe(state, entries[-1]), flush=True)

    def _describe(self, state: TrainerState, entry: dict[str, float]) -> str:
        assert self._start is not None, "on_log before on_train_begin"
        step, started = self._start
        pace = (time.monotonic() - started) / max(1, state.global_step - step)
        remaining = pace * (state.max_steps - state.global_step)
        return (
            f"step {state.global_step}/{state.max_steps} | loss {entry['loss']:.4f} nats | "
            f"lr {entry['learning_rate']:.1e} | grad norm {entry['grad_norm']:.2f} | {pace:.2f} s/step | "
            f"{remaining / 60:.0f} min left"
        )


def write_curve(path: Path, name: str, losses: Sequence[tuple[float, float]]) -> None:
    """The loss against the step."""
    steps, values = zip(*losses, strict=True)
    title = "contrastive fine-tuning"
    plot_curves(path, [Curve(name, steps, values)], x_label="step", y_label="InfoNCE (nats)", title=title)
