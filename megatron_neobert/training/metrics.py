"""Logs of a run: two lines per interval on the console, and values in the trackers of rank 0.

Trackers are SAVE/metrics.jsonl, TensorBoard, and optionally Weights & Biases. A tracker that fails is reported once,
and training continues. Step results are already reduced over all ranks, so no function here is a collective.
"""

import datetime
import json
import math
import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch

from megatron_neobert.checkpoint.train_state import TrainState
from megatron_neobert.config.phases import phase_at
from megatron_neobert.config.schema import Settings
from megatron_neobert.errors import ConfigError, OutputError
from megatron_neobert.model.flops import find_gpu, training_flops_per_token
from megatron_neobert.runtime.atomic_files import replace_file
from megatron_neobert.runtime.environment import is_rank_zero, world_size
from megatron_neobert.runtime.own_files import open_own
from megatron_neobert.state import MetricSums, StepResult
from megatron_neobert.text import duration, percent, with_prefix

_SMALLEST_LEAD = 0.01  # of the slowest rank over the median, as a share; a smaller one is noise
_RECORD = "metrics.jsonl"
_LEARNING = ("loss", "masked_accuracy", "lr", "grad_norm", "consumed_tokens", "skipped_iterations")
_REASON_LINES = 3  # of an error message of W&B: a heading, the setting, and the problem


def interval_lines(position: str, values: Mapping[str, float]) -> str:
    """Format the log of an interval: two lines of at most 80 columns, always with the same columns.

    A third line names the slowest rank if the ranks are on several machines and this rank's time is at least 1 % above
    the median. Without an update in the interval, loss and accuracy are dashes. A norm that is not finite is a dash.

    Args:
        position: Start of the first line, such as "iteration 100/1000".
        values: Values that `Monitor.close_interval` has collected, by name.
    """
    accuracy, mfu, memory = values.get("masked_accuracy"), values.get("mfu"), values["memory_gib"]
    training = [
        position,
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
    lines = [" | ".join(training), " | ".join(machine)]
    on_several_machines = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) < world_size()
    if on_several_machines and values.get("slowest_rank_lead", 0.0) >= _SMALLEST_LEAD:
        lead, seconds = percent(values["slowest_rank_lead"], digits=0), values["compute_seconds"]
        lines.append(f"  slowest rank {values['slowest_rank']}, {lead} above the median of {seconds:.3g} s per step")
    return "\n".join(lines)


def _in_seven_columns(value: float | None, *, digits: int) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    text = f"{value:.{digits}f}"
    return text if len(text) <= 7 else f"{value:.1e}"


class Monitor:
    """Collects step results, and logs them on rank 0. A context manager that closes the trackers.

    Args:
        iteration: Iteration from which this start continues.
        vocab_size: Number of tokens, without padding.
    """

    def __init__(self, settings: Settings, *, iteration: int, vocab_size: int, device: torch.device) -> None:
        self.settings = settings
        self.vocab_size = vocab_size
        self.device = device
        gpu = find_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self.peak_tflops = None if gpu is None else gpu.bf16_tflops
        self.step_started = self.step_computed = self._now()
        self.compute_us = 0  # of this rank in the last step, see stop_clock
        self.start_interval()
        self.trackers = Trackers(settings, iteration=iteration, log=self.log) if is_rank_zero() else None

    def start_interval(self) -> None:
        """Set all sums and counters of the interval to zero, and start its clock.

        Called after saving and validation, so that their time does not count.
        """
        self.sums = MetricSums()
        self.iterations = self.updates = 0  # updates are iterations that were not skipped
        self.predicted_tokens = 0.0  # of skipped iterations, too
        self.largest_memory_mib = 0  # over all ranks
        self.waited_seconds = 0.0
        self.computed_us = [0] * world_size()
        self.computed_steps = 0
        self.started_seconds = time.perf_counter()

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the trackers, as failed if the block raised."""
        if self.trackers is not None:
            self.trackers.close(failed=kind is not None)

    def log(self, text: str) -> None:
        """Print text on rank 0."""
        if is_rank_zero():
            print(text, flush=True)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context manager around the wait for a batch: start the step's clock, and add the wait to `waited_seconds`."""
        self.step_started = self._now()
        started = time.perf_counter()
        yield
        self.waited_seconds += time.perf_counter() - started

    def stop_clock(self) -> None:
        """Stop the clock of this rank's computing time in a step. The times of all ranks show which rank is slowest.

        The clock runs from the request for a batch until this rank has its gradients: loading, forward and backward.
        Waiting for other replicas is not included, because gradients are reduced afterwards. Waiting for ranks of the
        same replica (tensor, pipeline and context parallelism) is included, so all ranks of a slow replica are slow.
        """
        self.step_computed = self._now()

    def _now(self) -> Any:
        """Return the time in seconds, or on a GPU a recorded event, so that the host does not wait for the device."""
        if self.device.type != "cuda":
            return time.perf_counter()
        # External: also recorded whenever a CUDA graph is launched that it was captured in.
        event = torch.cuda.Event(enable_timing=True, external=True)
        event.record()
        return event

    def used_memory_mib(self) -> int:
        """Return this rank's memory in MiB: on GPU, the allocated peak since the last call; on CPU, the current use."""
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device) >> 20
            torch.cuda.reset_peak_memory_stats(self.device)
            return peak
        return int(psutil.Process().memory_info().rss) >> 20

    def add(self, result: StepResult, state: TrainState) -> None:
        """Add a step to the interval. Log a skipped update, and omit its loss. `state` is the state after the step."""
        sums = result.sums
        self.predicted_tokens += sums.masked_tokens
        if result.skip_reason is None:
            self.updates += 1
        else:
            sums = MetricSums(tokens=sums.tokens, attended_pairs=sums.attended_pairs)
            self.log(
                f"{self._position(state)} | update skipped: {result.skip_reason} | {state.skipped_iterations} skipped, "
                f"{state.skipped_in_a_row} in a row"
            )
            self._record(state, {"skipped_iterations": state.skipped_iterations})
        self.sums += sums
        # The interval reports the largest peak on GPUs, and the latest resident memory on CPU.
        memory_mib = result.status.memory_mib
        self.largest_memory_mib = max(self.largest_memory_mib, memory_mib) if self.device.type == "cuda" else memory_mib
        self.iterations += 1
        if self.device.type == "cuda":  # which has finished the step
            self.compute_us = round(1e3 * self.step_started.elapsed_time(self.step_computed))
        else:
            self.compute_us = round(1e6 * (self.step_computed - self.step_started))
        if any(result.compute_us):  # the first step of a start has no previous step
            self.computed_us = [a + b for a, b in zip(self.computed_us, result.compute_us, strict=True)]
            self.computed_steps += 1

    def close_interval(self, state: TrainState, *, lr: float, grad_norm: float) -> None:
        """Log the interval and start a new one. `lr` and `grad_norm` (before clipping) are the last iteration's."""
        values = {**self._values(state), "lr": lr, "grad_norm": grad_norm}
        self.log(interval_lines(self._position(state), values))
        self._record(state, values)
        self.start_interval()

    def report_validation(
        self, state: TrainState, sums: Mapping[str, MetricSums], bytes_per_token: Mapping[str, float | None]
    ) -> None:
        """Log loss and accuracy of a validation: over all corpora, and for each corpus if there are several.

        The loss is also logged in bits per byte: bits per predicted token, divided by bytes per token. Unlike the loss,
        bits per byte can be compared between vocabularies, if the models predict the same share of the tokens.

        Args:
            sums: Name of the corpus -> sums over the corpus's batches and all ranks.
            bytes_per_token: Name of the corpus -> UTF-8 bytes of text per token, or None if unknown.
        """
        curves = {"": sum(sums.values(), start=MetricSums()), **(sums if len(sums) > 1 else {})}
        values: dict[str, float] = {}
        for name, curve in curves.items():
            corpus, suffix = (f" on {name}", f"_{name}") if name else ("", "")
            values |= {f"validation_loss{suffix}": curve.mean_loss, f"validation_accuracy{suffix}": curve.accuracy}
            sizes = {each: bytes_per_token[each] for each in ([name] if name else sums)}
            masked_bytes = [sums[each].masked_tokens * size for each, size in sizes.items() if size]
            bits = ""
            if len(masked_bytes) == len(sizes) and sum(masked_bytes) > 0:
                values[f"validation_bits_per_byte{suffix}"] = curve.loss / math.log(2) / sum(masked_bytes)
                bits = f" ({values[f'validation_bits_per_byte{suffix}']:.4f} bits per byte)"
            self.log(
                f"{self._position(state)} | validation{corpus} loss {curve.mean_loss:.4f}{bits} | "
                f"accuracy {percent(curve.accuracy, digits=2)} | {curve.tokens:,.0f} tokens"
            )
        self._record(state, values)

    def _values(self, state: TrainState) -> dict[str, float]:
        """Return the values of the interval over all ranks, as name -> value. The names contain the units.

        Tokens are document tokens. `memory_gib` is the largest memory of any rank, `fill` the packing efficiency, and
        `data_wait` the share of time in which rank 0 waited for data. `compute_seconds` is the ranks' median computing
        time per step (see `stop_clock`), and `slowest_rank_lead` the share by which the slowest rank exceeds the
        median.
        Loss and accuracy are missing if no update was made, `mfu` if the GPU is unknown, computing times on one rank.
        """
        settings, sums = phase_at(self.settings, state.iteration).settings, self.sums
        seconds = time.perf_counter() - self.started_seconds
        flops_per_token = training_flops_per_token(
            settings,
            vocab_size=self.vocab_size,
            document_tokens=sums.attended_pairs / max(sums.tokens, 1),
            predicted_share=self.predicted_tokens / max(sums.tokens, 1),
        )
        tflops = sums.tokens * flops_per_token / seconds / world_size() / 1e12
        values: dict[str, float] = {
            "tokens_per_second": sums.tokens / seconds,
            "tokens_per_second_per_rank": sums.tokens / seconds / world_size(),
            "tflops_per_rank": tflops,
            "memory_gib": self.largest_memory_mib / 1024,
            "fill": sums.tokens / (self.iterations * settings.tokens_per_iteration),  # an interval is in one phase
            "data_wait": self.waited_seconds / seconds,
            "consumed_tokens": state.consumed_tokens,
            "skipped_iterations": state.skipped_iterations,
            "eta_seconds": (settings.training.train_iters - state.iteration) * seconds / self.iterations,
        }
        if self.updates:
            values |= {"loss": sums.mean_loss, "masked_accuracy": sums.accuracy}
        if self.computed_steps and world_size() > 1:
            times = [us / 1e6 / self.computed_steps for us in self.computed_us]
            slowest, median = max(times), statistics.median(times)
            values |= {"slowest_rank": times.index(slowest), "slowest_rank_lead": slowest / median - 1}
            values["compute_seconds"] = median
        if self.peak_tflops is not None:
            values["mfu"] = tflops / self.peak_tflops
        return values

    def _position(self, state: TrainState) -> str:
        return f"iteration {state.iteration}/{self.settings.training.train_iters}"

    def _record(self, state: TrainState, values: dict[str, float]) -> None:
        if self.trackers is not None:
            self.trackers.record(state.iteration, values, cursor=state.cursor)


# ---- trackers


class Trackers:
    """The open trackers of rank 0.

    A resumed run appends to metrics.jsonl, first a line with `start` and the iteration of its checkpoint. Readers then
    drop the values after this iteration, because the run repeats these iterations or takes another course. The id of a
    run at Weights & Biases is stored in the save folder, so that the same command resumes the same run.
    `log` prints a warning. Raise ConfigError if Weights & Biases does not start.
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
                    group = "train" if name in _LEARNING else "machine"
                    # The part of a tag before the slash is the group.
                    tag = name.replace("_", "/", 1) if name.startswith("validation_") else f"{group}/{name}"
                    self.tensorboard.add_scalar(tag, value, iteration)
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
