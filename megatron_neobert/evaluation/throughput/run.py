"""Tokens per second of encoders against the length of documents, the batch size swept until memory ends.

All contenders lie on the device together and take turns step by step, so that a slow phase of the machine meets all of
them. One that is out of memory at a batch size takes no part in larger ones of that length. Every group of steps is
appended to a file before the next one begins: the same call goes on after a kill.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from megatron_neobert.evaluation.throughput.batches import build_batch, draw_lengths
from megatron_neobert.evaluation.throughput.log import StepLog
from megatron_neobert.evaluation.throughput.models import TRAINING, Contender, Subject, find_kernels, make_step, prepare
from megatron_neobert.evaluation.throughput.steps import Step, has_memory_for, time_step

MEASURED, OUT_OF_MEMORY = "measured", "out of memory"


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What is measured."""

    lengths: tuple[int, ...]
    batch_sizes: tuple[int, ...]  # documents
    steps: int
    warmup: int
    distribution: str
    seed: int
    max_tokens: int | None  # slots of a padded batch of full documents; larger batches are left out

    def groups(self) -> Iterator[tuple[int, int]]:
        """Lengths with batch sizes, each length from its smallest batch to its largest."""
        for length in self.lengths:
            for batch_size in sorted(self.batch_sizes):
                if self.max_tokens is None or length * batch_size <= self.max_tokens:
                    yield length, batch_size


def measure(
    contenders: Mapping[Contender, Subject],
    sweep: Sweep,
    *,
    device: torch.device,
    log: StepLog,
    on_group: Callable[[list[dict[str, Any]]], None],
) -> list[dict[str, Any]]:
    """Measures what the log does not hold yet.

    Returns:
        One row per contender and group, see `_to_row`; of those measured earlier too.
    """
    for length, batch_size in sweep.groups():
        if log.holds(length, batch_size):
            continue
        failed = {_who(row) for row in log.rows if _failed(row, length, batch_size)}
        entered = {
            contender: subject
            for contender, subject in contenders.items()
            if contender not in failed and (subject.longest is None or length <= subject.longest)
        }
        rows = _measure_group(entered, sweep, length=length, batch_size=batch_size, device=device)
        log.append(length, batch_size, rows)
        on_group(rows)
    return log.rows


def summarise(row: dict[str, Any]) -> dict[str, Any]:
    """A row with tokens per second (median and quartiles over its steps) in place of the seconds of each step."""
    summary = {name: value for name, value in row.items() if name != "seconds"}
    speeds = [row["tokens"] / seconds for seconds in row["seconds"]]
    lower, middle, upper = quartiles(speeds) if speeds else (None, None, None)
    return summary | {
        "steps": len(speeds),
        "tokens_per_second": middle,
        "lower_quartile": lower,
        "upper_quartile": upper,
    }


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile, linear between the values."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    lower, middle, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, middle, upper


def _measure_group(
    contenders: Mapping[Contender, Subject], sweep: Sweep, *, length: int, batch_size: int, device: torch.device
) -> list[dict[str, Any]]:
    documents = draw_lengths(batch_size, longest=length, distribution=sweep.distribution, seed=sweep.seed)
    runs = [_Run(contender, subject, documents, sweep.seed, device) for contender, subject in contenders.items()]
    for run in runs:
        run.attempt(lambda run=run: run.warm_up(sweep.warmup))  # type: ignore[misc]
    for number in range(sweep.steps):
        start = number % max(1, len(runs))  # nobody always follows the same one
        for run in runs[start:] + runs[:start]:
            run.attempt(run.time)
    return [run.to_row(length, batch_size) for run in runs]


class _Run:
    """A contender at one length and batch size."""

    def __init__(
        self, contender: Contender, subject: Subject, documents: Sequence[int], seed: int, device: torch.device
    ) -> None:
        self.contender, self.subject, self.documents, self.seed = contender, subject, documents, seed
        self.device = device
        self.fits = True
        self.steps: list[Step] = []
        self.kernels: list[str] = []
        self.step: Callable[[], None] | None = None
        self.tokens, self.slots = sum(documents), 0

    def attempt(self, work: Callable[[], None]) -> None:
        """Does the work unless this run is out of memory already."""
        if self.fits:
            prepare(self.subject, self.contender.passes)
            self.fits = has_memory_for(work, self.device)
            self.subject.model.zero_grad(set_to_none=True)  # the others need the memory
        if not self.fits:
            self.step = None  # and its batch

    def warm_up(self, times: int) -> None:
        batch = build_batch(
            self.documents,
            layout=self.contender.layout,
            labels=self.contender.passes == TRAINING,
            config=self.subject.model.config,
            seed=self.seed,
            device=self.device,
        )
        self.slots = batch.slots
        self.step = make_step(self.subject, batch, self.contender.passes)
        self.kernels = find_kernels(self.subject, self.step)
        for _ in range(times):
            prepare(self.subject, self.contender.passes)
            self.step()

    def time(self) -> None:
        assert self.step is not None, f"{self.contender} was not warmed up"
        self.steps.append(time_step(self.step, self.device))

    def to_row(self, length: int, batch_size: int) -> dict[str, Any]:
        return asdict(self.contender) | {
            "length": length,
            "batch_size": batch_size,
            "tokens": self.tokens,
            "slots": self.slots,
            "kernels": self.kernels,
            "outcome": MEASURED if self.fits else OUT_OF_MEMORY,
            "seconds": [step.seconds for step in self.steps] if self.fits else [],
            "peak_bytes": self._peak_bytes() if self.fits else None,
        }

    def _peak_bytes(self) -> int:
        return self.subject.weight_bytes + max(step.grown_bytes for step in self.steps)


def _who(row: Mapping[str, Any]) -> Contender:
    return Contender(**{field.name: row[field.name] for field in fields(Contender)})


def _failed(row: Mapping[str, Any], length: int, batch_size: int) -> bool:
    return row["outcome"] == OUT_OF_MEMORY and row["length"] == length and row["batch_size"] <= batch_size
