"""Tokens per second of encoders against the length of documents, the batch size swept until memory ends.

All models under test lie on the device together and take turns step by step, so that a slow phase of the machine meets
all of them. One that is out of memory at a batch size takes no part in larger ones of that length. The same call
resumes after a kill. Leaves a record per model, and of all models a CSV, a Markdown page and figures.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_neobert.evaluation.encoders import fingerprint
from megatron_neobert.evaluation.pages import to_csv
from megatron_neobert.evaluation.records import (
    LineFile,
    describe_machine,
    refuse_changed_settings,
    versions,
    write_record,
)
from megatron_neobert.evaluation.report import write_page
from megatron_neobert.evaluation.throughput.models import (
    MASKED_SHARE,
    TRAINING,
    WEB_MEDIAN_TOKENS,
    ModelsUnderTest,
    Subject,
    Variant,
    build_batch,
    draw_lengths,
    find_kernels,
    has_memory_for,
    make_step,
    measure_memory,
    prepare,
    time_step,
)
from megatron_neobert.evaluation.throughput.tables import COLUMNS, csv_rows
from megatron_neobert.runtime.atomic_files import replace_file

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


def open_log(path: Path, settings: dict[str, Any]) -> LineFile:
    """The groups of steps that have been measured, each on disk before the next begins, behind a line of settings.

    Raises:
        ConfigError: The file holds measurements under other settings, beside which new ones could not stand.
        DataError: The file is no such log.
    """
    log = LineFile(path)
    if not log.lines:
        log.add(settings)
    refuse_changed_settings(path, log.lines[0], settings)
    return log


def measure(
    variants: Mapping[Variant, Subject],
    sweep: Sweep,
    *,
    device: torch.device,
    log: LineFile,
    on_group: Callable[[list[dict[str, Any]]], None],
) -> list[dict[str, Any]]:
    """Measures what the log does not hold yet.

    Returns:
        One row per variant and group, see `_Turn.outcome`; of those measured earlier too.
    """
    done = {(group["length"], group["batch_size"]) for group in log.lines[1:]}
    for length, batch_size in sweep.groups():
        if (length, batch_size) in done:
            continue
        failed = {
            Variant(**{field.name: row[field.name] for field in fields(Variant)})
            for group in log.lines[1:]
            if group["length"] == length and group["batch_size"] <= batch_size
            for row in group["rows"]
            if row["outcome"] == OUT_OF_MEMORY
        }
        entered = {
            variant: subject
            for variant, subject in variants.items()
            if variant not in failed and (subject.longest is None or length <= subject.longest)
        }
        rows = _measure_group(entered, sweep, length=length, batch_size=batch_size, device=device)
        log.add({"length": length, "batch_size": batch_size, "rows": rows})
        on_group(rows)
    return [row for group in log.lines[1:] for row in group["rows"]]


def summarise(row: dict[str, Any]) -> dict[str, Any]:
    """A row with tokens per second (median and quartiles over its steps) in place of the seconds of each step."""
    summary = {name: value for name, value in row.items() if name != "seconds"}
    speeds = [row["tokens"] / seconds for seconds in row["seconds"]]
    names = ("lower_quartile", "tokens_per_second", "upper_quartile")
    quartiles = np.quantile(speeds, (0.25, 0.5, 0.75)).tolist() if speeds else [None] * 3
    return summary | {"steps": len(speeds)} | dict(zip(names, quartiles, strict=True))


def _measure_group(
    variants: Mapping[Variant, Subject], sweep: Sweep, *, length: int, batch_size: int, device: torch.device
) -> list[dict[str, Any]]:
    documents = draw_lengths(batch_size, longest=length, distribution=sweep.distribution, seed=sweep.seed)
    turns = [_Turn(variant, subject, sweep, documents, device) for variant, subject in variants.items()]
    for turn in turns:
        turn.attempt(turn.warm_up)
    for number in range(sweep.steps):
        start = number % max(1, len(turns))  # nobody always follows the same one
        for turn in turns[start:] + turns[:start]:
            turn.attempt(turn.time)
    return [{**asdict(turn.variant), "length": length, "batch_size": batch_size, **turn.outcome()} for turn in turns]


class _Turn:
    """A variant at one length and batch size."""

    def __init__(
        self, variant: Variant, subject: Subject, sweep: Sweep, documents: Sequence[int], device: torch.device
    ) -> None:
        self.variant, self.subject, self.sweep, self.documents = variant, subject, sweep, documents
        self.device, self.fits, self.slots = device, True, 0
        self.peak_bytes = 0  # without the weights
        self.seconds: list[float] = []  # of each timed step
        self.kernels: list[str] = []
        self.step: Callable[[], None] | None = None

    def attempt(self, work: Callable[[], None]) -> None:
        """Does the work unless this turn is out of memory already."""
        if self.fits:
            prepare(self.subject, self.variant.passes)
            self.fits = has_memory_for(work, self.device)
            self.subject.model.zero_grad(set_to_none=True)  # the others need the memory
        if not self.fits:
            self.step = None  # and its batch

    def warm_up(self) -> None:
        inputs = build_batch(
            self.documents,
            layout=self.variant.layout,
            labels=self.variant.passes == TRAINING,
            config=self.subject.model.config,
            seed=self.sweep.seed,
            device=self.device,
        )
        self.slots = inputs["input_ids"].numel()
        self.step = make_step(self.subject, inputs, self.variant.passes)
        self.kernels = find_kernels(self.subject, self.step)
        prepare(self.subject, self.variant.passes)
        self.peak_bytes = measure_memory(self.step, self.device)  # the first step of the warm-up
        for _ in range(self.sweep.warmup - 1):
            prepare(self.subject, self.variant.passes)
            self.step()

    def time(self) -> None:
        assert self.step is not None, f"{self.variant} was not warmed up"
        self.seconds.append(time_step(self.step, self.device))

    def outcome(self) -> dict[str, Any]:
        model = self.subject.model
        weights = sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
        return {
            "tokens": sum(self.documents),
            "slots": self.slots,
            "kernels": self.kernels,
            "outcome": MEASURED if self.fits else OUT_OF_MEMORY,
            "seconds": self.seconds if self.fits else [],
            "peak_bytes": weights + self.peak_bytes if self.fits else None,
        }


def describe(folders: Mapping[str, Path], found: ModelsUnderTest, sweep: Sweep, device: torch.device) -> dict[str, Any]:
    """All that must be equal for measurements to stand in one table."""
    return {
        "models": {name: fingerprint(folder) for name, folder in folders.items()},
        "variants": [
            f"{variant.model}, {variant.dtype}, {variant.attention}, {variant.layout}, {variant.passes}"
            for variant in found.variants
        ],
        "steps": sweep.steps,
        "warmup": sweep.warmup,
        "lengths_distribution": sweep.distribution,
        "web_median_tokens": WEB_MEDIAN_TOKENS if sweep.distribution == "web" else None,
        "masked_share": MASKED_SHARE,
        "seed": sweep.seed,
        "max_tokens": sweep.max_tokens,
        "device": str(device),
        "machine": describe_machine(device),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "versions": versions(),
    }


def write_results(
    output: Path,
    folders: Mapping[str, Path],
    found: ModelsUnderTest,
    sweep: Sweep,
    rows: Sequence[dict[str, Any]],
    device: torch.device,
) -> str:
    """Writes everything and returns the Markdown page."""
    settings = describe(folders, found, sweep, device)
    del settings["machine"], settings["versions"]  # which every record holds
    for name, folder in folders.items():
        own = [row for row in rows if row["model"] == name]
        model = next((subject.model for variant, subject in found.variants.items() if variant.model == name), None)
        results = {
            "parameters": None if model is None else sum(parameter.numel() for parameter in model.parameters()),
            "rows": own,
            "not_run": [entry for entry in found.not_run if entry["model"] == name],
        }
        path = output / name / "throughput.json"
        write_record(path, "throughput", folder=folder, settings=settings, results=results, device=device)
    replace_file(output / "throughput.csv", to_csv(COLUMNS, csv_rows(rows)))
    return write_page("throughput", [output / name / "throughput.json" for name in folders], output)
