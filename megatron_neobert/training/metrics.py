"""What a run says: one line per interval, TensorBoard, a JSON line per interval, and a bar on a terminal.

The reports of steps are over all ranks already, so nothing here is a collective. A skipped update is said at once; its
loss enters no average, its tokens count.
"""

import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

from megatron_neobert.config import Settings
from megatron_neobert.environment import is_rank_zero
from megatron_neobert.training.run import Progress
from megatron_neobert.training.step import StepReport


@dataclass(frozen=True)
class Averages:
    """Means over all ranks and over the steps that were added up."""

    loss: float  # nats per masked token
    accuracy: float  # share of the masked tokens whose likeliest prediction is right
    tokens: int  # tokens of documents

    @classmethod
    def of(cls, sums: torch.Tensor) -> "Averages":
        loss, masked, correct, tokens = sums.tolist()
        covered = max(masked, 1)
        return cls(loss=loss / covered, accuracy=correct / covered, tokens=round(tokens))


class Monitor:
    """Collects step reports and says them every log interval; only rank 0 speaks."""

    def __init__(self, settings: Settings, *, iteration: int) -> None:
        self.settings = settings
        self.speaks = is_rank_zero()
        self.sums: torch.Tensor | None = None
        self.iterations = 0
        self.updates = 0  # of these iterations, those that were not skipped
        self.started_seconds = time.perf_counter()
        self.console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self.bar = ProgressBar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not (self.speaks and self.console.is_terminal),
        )
        self.task = self.bar.add_task("pretraining", total=settings.training.train_iters, completed=iteration)
        self.writer = self._open_tensorboard(iteration)

    @contextmanager
    def running(self) -> Iterator["Monitor"]:
        """Shows the bar, and closes every file at the end, whatever the end is."""
        try:
            with self.bar:
                yield self
        finally:
            if self.writer is not None:
                self.writer.close()

    def say(self, text: str) -> None:
        """One line on rank 0."""
        if self.speaks:
            self.console.print(text, markup=False)

    def add(self, report: StepReport, progress: Progress) -> None:
        """Adds a step to the current interval, and says if its update was skipped; `progress` counts it already."""
        sums = report.sums
        if report.skip_reason is None:
            self.updates += 1
        else:
            sums = torch.cat([torch.zeros_like(sums[:3]), sums[3:]])
            self._report_skip(progress, report.skip_reason)
        self.sums = sums if self.sums is None else self.sums + sums
        self.iterations += 1
        self.bar.advance(self.task)

    def close_interval(self, progress: Progress, *, lr: float, grad_norm: float) -> Progress:
        """Says the averages since the last call and counts their tokens into `progress`."""
        assert self.sums is not None, "an interval has at least one step"
        averages = Averages.of(self.sums)
        seconds = time.perf_counter() - self.started_seconds
        progress = replace(progress, consumed_tokens=progress.consumed_tokens + averages.tokens)
        remaining = (self.settings.training.train_iters - progress.iteration) * seconds / self.iterations
        rate = averages.tokens / seconds
        values = {
            "lr": lr,
            "grad_norm": grad_norm,
            "tokens_per_second": rate,
            "consumed_tokens": progress.consumed_tokens,
            "skipped_iterations": progress.skipped_iterations,
        }
        said = "every update skipped"
        if self.updates:
            said = f"loss {averages.loss:.4f} nats | masked accuracy {100 * averages.accuracy:.2f} %"
            values = {"loss": averages.loss, "masked_accuracy": averages.accuracy, **values}
        norm = f"grad norm {grad_norm:.3f} | " if math.isfinite(grad_norm) else ""
        self.say(
            f"{self._place(progress)} | {said} | lr {lr:.2e} | {norm}{_with_prefix(rate)}tokens/s | "
            f"ETA {_duration(remaining)}"
        )
        self._record(progress, values)
        self.restart_clock()
        return progress

    def report_validation(self, progress: Progress, averages: Averages) -> None:
        """Says a validation."""
        self.say(
            f"{self._place(progress)} | validation loss {averages.loss:.4f} nats | masked accuracy "
            f"{100 * averages.accuracy:.2f} % | {averages.tokens:,} tokens"
        )
        self._record(progress, {"validation_loss": averages.loss, "validation_accuracy": averages.accuracy})

    def restart_clock(self) -> None:
        """Starts a new interval now, so that saving and validating do not count as training."""
        self.sums, self.iterations, self.updates = None, 0, 0
        self.started_seconds = time.perf_counter()

    def _report_skip(self, progress: Progress, reason: str) -> None:
        self.say(
            f"{self._place(progress)} | update skipped: {reason} | {progress.skipped_iterations} skipped, "
            f"{progress.skipped_in_a_row} in a row"
        )
        self._record(progress, {"skipped_iterations": progress.skipped_iterations})

    def _place(self, progress: Progress) -> str:
        return f"iteration {progress.iteration}/{self.settings.training.train_iters}"

    def _open_tensorboard(self, iteration: int) -> Any:
        folder = self.settings.logging.tensorboard_dir
        if folder is None and self.settings.checkpoint.save is not None:
            folder = str(Path(self.settings.checkpoint.save) / "tensorboard")
        if folder is None or not self.speaks:
            return None
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only one rank needs it

        return SummaryWriter(folder, purge_step=iteration + 1)  # hides what a killed run wrote beyond its checkpoint

    def _record(self, progress: Progress, values: dict[str, float]) -> None:
        values = {name: value for name, value in values.items() if math.isfinite(value)}  # JSON has no others
        if self.writer is not None:
            for name, value in values.items():
                self.writer.add_scalar(name, value, progress.iteration)
        if self.speaks and self.settings.checkpoint.save is not None:
            line = json.dumps({"iteration": progress.iteration, "cursor": asdict(progress.cursor), **values})
            with (Path(self.settings.checkpoint.save) / "metrics.jsonl").open("a", encoding="utf-8") as stream:
                stream.write(line + "\n")


def _with_prefix(rate: float) -> str:
    for factor, prefix in ((1e6, "M "), (1e3, "k ")):
        if rate >= factor:
            return f"{rate / factor:.2f} {prefix}"
    return f"{rate:.0f} "


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
