"""Logs of a run: two lines per interval to the console, and values to the trackers.

The results of steps are over all ranks already, so nothing here is a collective. A skipped update is logged when it
happens; its loss enters no average, its tokens count.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import psutil
import torch

from megatron_neobert.config.phases import phase_at
from megatron_neobert.config.schema import Settings
from megatron_neobert.data.batches.stream import StepBatches
from megatron_neobert.model.flops import training_flops_per_token
from megatron_neobert.model.gpus import find_gpu
from megatron_neobert.runtime.environment import is_rank_zero, world_size
from megatron_neobert.state import MetricSums, StepResult, TrainState
from megatron_neobert.text import duration, percent, with_prefix
from megatron_neobert.training.trackers import Trackers


def interval_lines(place: str, values: Mapping[str, float]) -> str:
    """Format two lines of at most 80 columns, what changes most on the first, always of the same parts.

    Loss, accuracy and gradient norm are dashes if the interval had no update.
    """
    accuracy, mfu, memory = values.get("masked_accuracy"), values.get("mfu"), values["memory_gib"]
    training = [
        place,
        f"loss {_in_seven_columns(values.get('loss'), digits=4)}",
        f"accuracy {'-' if accuracy is None else percent(accuracy, digits=2)}",
        f"grad norm {_in_seven_columns(values['grad_norm'], digits=3)}",
    ]
    machine = [
        f"  lr {values['lr']:.1e}",
        with_prefix(values["tokens_per_second"], " tok/s"),
        with_prefix(1e12 * values["tflops_per_rank"], "FLOP/s") if mfu is None else f"MFU {percent(mfu)}",
        f"{memory:.{0 if memory >= 9.95 else 1}f} GiB",
        f"wait {percent(values['data_wait'], digits=0)}",
        f"ETA {duration(values['eta_seconds'])}",
    ]
    return "\n".join(" | ".join(line) for line in (training, machine))


def _in_seven_columns(value: float | None, *, digits: int) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    text = f"{value:.{digits}f}"
    return text if len(text) <= 7 else f"{value:.1e}"


class Monitor:
    """Collects step reports and logs them every log interval, on rank 0 alone."""

    def __init__(self, settings: Settings, *, iteration: int, vocab_size: int, device: torch.device) -> None:
        self.settings = settings
        self.vocab_size = vocab_size
        self.device = device
        gpu = find_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self.peak_tflops = None if gpu is None else gpu.bf16_tflops
        self.logs = is_rank_zero()
        self.restart_clock()
        self.trackers = Trackers(settings, iteration=iteration, log=self.log) if self.logs else None

    def restart_clock(self) -> None:
        """Start a new interval now, so that saving and validating do not count as training."""
        self.sums = MetricSums()
        self.iterations = self.updates = 0  # updates are the iterations that were not skipped
        self.capacity_tokens = 0  # of these iterations
        self.largest_memory_mib = 0  # of all ranks
        self.waited_seconds = 0.0
        self.started_seconds = time.perf_counter()

    @contextmanager
    def running(self) -> Iterator["Monitor"]:
        """Close every file at the end, also after an error."""
        failed = True
        try:
            yield self
            failed = False
        finally:
            if self.trackers is not None:
                self.trackers.close(failed=failed)

    def log(self, text: str) -> None:
        """Print one line on rank 0."""
        if self.logs:
            print(text, flush=True)

    def clocked(self, steps: Iterable[StepBatches]) -> Iterator[StepBatches]:
        """Yield the same steps, and count the time until each is there as waiting for data."""
        started = time.perf_counter()
        for step in steps:
            self.waited_seconds += time.perf_counter() - started
            yield step
            started = time.perf_counter()

    def own_memory_mib(self) -> int:
        """Return the most that this rank had allocated since the last call, or on CPU what is resident."""
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device) >> 20
            torch.cuda.reset_peak_memory_stats(self.device)
            return peak
        return int(psutil.Process().memory_info().rss) >> 20

    def add(self, result: StepResult, state: TrainState) -> None:
        """Add a step to the current interval, and log a skipped update; `state` counts the step already."""
        sums = result.sums
        if result.skip_reason is None:
            self.updates += 1
        else:
            sums = MetricSums(tokens=sums.tokens, attended_pairs=sums.attended_pairs)
            self.log(
                f"{self._place(state)} | update skipped: {result.skip_reason} | {state.skipped_iterations} skipped, "
                f"{state.skipped_in_a_row} in a row"
            )
            self._record(state, {"skipped_iterations": state.skipped_iterations})
        self.sums += sums
        memory_mib = result.status.memory_mib
        # Of a GPU's peaks the largest counts; what is resident on a CPU is that of now.
        self.largest_memory_mib = max(self.largest_memory_mib, memory_mib) if self.device.type == "cuda" else memory_mib
        self.iterations += 1
        self.capacity_tokens += phase_at(self.settings, state.iteration).settings.tokens_per_iteration

    def close_interval(self, state: TrainState, *, lr: float, grad_norm: float) -> TrainState:
        """Log the averages since the last call, and return the train state with their tokens counted."""
        state = replace(state, consumed_tokens=state.consumed_tokens + round(self.sums.tokens))
        values = {**self._values(state), "lr": lr, "grad_norm": grad_norm}
        self.log(interval_lines(self._place(state), values))
        self._record(state, values)
        self.restart_clock()
        return state

    def report_validation(self, state: TrainState, sums: Mapping[str, MetricSums]) -> None:
        """Log a validation, whose sums are given by curve: over all corpora, and over each if there are several."""
        curves = {"": sum(sums.values(), start=MetricSums()), **(sums if len(sums) > 1 else {})}
        values: dict[str, float] = {}
        for name, own in curves.items():
            corpus = f" on {name}" if name else ""
            self.log(
                f"{self._place(state)} | validation{corpus} loss {own.mean_loss:.4f} | "
                f"accuracy {percent(own.accuracy, digits=2)} | {own.tokens:,.0f} tokens"
            )
            suffix = f"_{name}" if name else ""
            values |= {f"validation_loss{suffix}": own.mean_loss, f"validation_accuracy{suffix}": own.accuracy}
        self._record(state, values)

    def _values(self, state: TrainState) -> dict[str, float]:
        """Return means over all ranks and the iterations of the interval; what is not known is left out.

        Tokens are those of documents. `memory_gib` is that of the fullest rank: the peak of what it allocated, on CPU
        what is resident now. `fill` is the packing efficiency, `data_wait` the share of time that rank 0 waited.
        """
        settings, sums = phase_at(self.settings, state.iteration).settings, self.sums
        seconds = time.perf_counter() - self.started_seconds
        flops_per_token = training_flops_per_token(
            settings, vocab_size=self.vocab_size, document_tokens=sums.attended_pairs / max(sums.tokens, 1)
        )
        tflops = sums.tokens * flops_per_token / seconds / world_size() / 1e12
        values: dict[str, float] = {
            "tokens_per_second": sums.tokens / seconds,
            "tokens_per_second_per_rank": sums.tokens / seconds / world_size(),
            "tflops_per_rank": tflops,
            "memory_gib": self.largest_memory_mib / 1024,
            "fill": sums.tokens / self.capacity_tokens,
            "data_wait": self.waited_seconds / seconds,
            "consumed_tokens": state.consumed_tokens,
            "skipped_iterations": state.skipped_iterations,
            "eta_seconds": (settings.training.train_iters - state.iteration) * seconds / self.iterations,
        }
        if self.updates:
            values |= {"loss": sums.mean_loss, "masked_accuracy": sums.accuracy}
        if self.peak_tflops is not None:
            values["mfu"] = tflops / self.peak_tflops
        return values

    def _place(self, state: TrainState) -> str:
        return f"iteration {state.iteration}/{self.settings.training.train_iters}"

    def _record(self, state: TrainState, values: dict[str, float]) -> None:
        if self.trackers is not None:
            self.trackers.record(state.iteration, values, cursor=state.cursor)
