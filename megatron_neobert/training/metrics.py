"""What a run says: one line per interval to whoever looks and to the trackers, and a bar on a terminal.

The reports of steps are over all ranks already, so nothing here is a collective. A skipped update is said at once; its
loss enters no average, its tokens count.
"""

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import psutil
import torch
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

from megatron_neobert.config.schema import Settings
from megatron_neobert.data.batches.stream import StepBatches
from megatron_neobert.model.flops import training_flops_per_token
from megatron_neobert.model.gpus import find_gpu
from megatron_neobert.runtime.environment import is_rank_zero, world_size
from megatron_neobert.runtime.terminal import Terminal
from megatron_neobert.state import Progress
from megatron_neobert.training.metrics_line import Interval, say_quality
from megatron_neobert.training.step import StepReport
from megatron_neobert.training.trackers import Trackers


@dataclass(frozen=True)
class Averages:
    """Means over all ranks and over the steps that were added up."""

    loss: float  # nats per masked token
    accuracy: float  # share of the masked tokens whose likeliest prediction is right
    tokens: int  # tokens of documents
    seen_tokens: float = 0.0  # by a token on average, its document's, itself among them

    @classmethod
    def of(cls, sums: torch.Tensor) -> "Averages":
        """Of the sums of a StepReport."""
        loss, masked, correct, tokens, pairs = sums.tolist()
        covered = max(masked, 1)
        return cls(
            loss=loss / covered, accuracy=correct / covered, tokens=round(tokens), seen_tokens=pairs / max(tokens, 1)
        )


class Monitor:
    """Collects step reports and says them every log interval; only rank 0 speaks."""

    def __init__(self, settings: Settings, *, iteration: int, vocab_size: int, device: torch.device) -> None:
        self.settings = settings
        self.vocab_size = vocab_size
        self.device = device
        gpu = find_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self.peak_tflops = None if gpu is None else gpu.bf16_tflops
        self.speaks = is_rank_zero()
        self.sums: torch.Tensor | None = None
        self.iterations = 0
        self.updates = 0  # of these iterations, those that were not skipped
        self.waited_seconds = 0.0
        self.started_seconds = time.perf_counter()
        self.largest_memory_mib = 0  # of all ranks, as the loop has learnt
        self.console = Terminal(file=sys.stdout, highlight=False, soft_wrap=True)
        # Not console.is_terminal alone: FORCE_COLOR makes a terminal of any file.
        shows_bar = sys.stdout.isatty() and self.console.is_terminal and not self.console.is_dumb_terminal
        self.bar = ProgressBar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not (self.speaks and shows_bar),
        )
        self.task = self.bar.add_task("pretraining", total=settings.training.train_iters, completed=iteration)
        self.trackers = Trackers(settings, iteration=iteration, say=self.say) if self.speaks else None

    @contextmanager
    def running(self) -> Iterator["Monitor"]:
        """Shows the bar, and closes every file at the end, whatever the end is."""
        failed = True
        try:
            with self.bar:
                yield self
            failed = False
        finally:
            if self.trackers is not None:
                self.trackers.close(failed=failed)

    def say(self, text: str) -> None:
        """One line on rank 0."""
        if self.speaks:
            self.console.print(text, markup=False)

    def clocked(self, steps: Iterable[StepBatches]) -> Iterator[StepBatches]:
        """The same steps; how long this rank waits for them counts as waiting for data."""
        started = time.perf_counter()
        for step in steps:
            self.waited_seconds += time.perf_counter() - started
            yield step
            started = time.perf_counter()

    def own_memory_mib(self) -> int:
        """Of this rank: the most it had allocated since the last line, or on CPU what is resident."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) >> 20
        return int(psutil.Process().memory_info().rss) >> 20

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
        progress = replace(progress, consumed_tokens=progress.consumed_tokens + averages.tokens)
        interval = self._interval(progress, averages, lr=lr, grad_norm=grad_norm)
        self.say(str(interval))
        self._record(progress, interval.values)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.restart_clock()
        return progress

    def report_validation(self, progress: Progress, averages: Averages) -> None:
        """Says a validation."""
        quality = say_quality(averages.loss, averages.accuracy)
        self.say(f"{self._place(progress)} | validation {quality} | {averages.tokens:,} tokens")
        self._record(progress, {"validation_loss": averages.loss, "validation_accuracy": averages.accuracy})

    def restart_clock(self) -> None:
        """Starts a new interval now, so that saving and validating do not count as training."""
        self.sums, self.iterations, self.updates = None, 0, 0
        self.waited_seconds = 0.0
        self.started_seconds = time.perf_counter()

    def _interval(self, progress: Progress, averages: Averages, *, lr: float, grad_norm: float) -> Interval:
        settings, seconds = self.settings, time.perf_counter() - self.started_seconds
        flops_per_token = training_flops_per_token(
            settings, vocab_size=self.vocab_size, document_tokens=averages.seen_tokens
        )
        return Interval(
            iteration=progress.iteration,
            train_iters=settings.training.train_iters,
            loss=averages.loss if self.updates else None,
            masked_accuracy=averages.accuracy if self.updates else None,
            lr=lr,
            grad_norm=grad_norm,
            ranks=world_size(),
            tokens_per_second=averages.tokens / seconds,
            flops_per_second=averages.tokens * flops_per_token / seconds,
            peak_tflops=self.peak_tflops,
            memory_gib=self.largest_memory_mib / 1024,
            fill=averages.tokens / (self.iterations * settings.tokens_per_iteration),
            data_wait=self.waited_seconds / seconds,
            consumed_tokens=progress.consumed_tokens,
            skipped_iterations=progress.skipped_iterations,
            eta_seconds=(settings.training.train_iters - progress.iteration) * seconds / self.iterations,
        )

    def _report_skip(self, progress: Progress, reason: str) -> None:
        self.say(
            f"{self._place(progress)} | update skipped: {reason} | {progress.skipped_iterations} skipped, "
            f"{progress.skipped_in_a_row} in a row"
        )
        self._record(progress, {"skipped_iterations": progress.skipped_iterations})

    def _place(self, progress: Progress) -> str:
        return f"iteration {progress.iteration}/{self.settings.training.train_iters}"

    def _record(self, progress: Progress, values: dict[str, float]) -> None:
        if self.trackers is not None:
            self.trackers.record(progress.iteration, values, cursor=progress.cursor)
