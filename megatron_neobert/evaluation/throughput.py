"""Tokens per second of encoders against the length of documents, the batch size swept until memory ends.

All models under test are on the device together and take turns step by step, so that a slow phase of the machine
affects all of them. A model that is out of memory at a batch size takes no part in larger ones of that length. What a
model cannot compute is reported with its reason and left out, never replaced by something else.
Only tokens of documents count as tokens; slots include the padding. On a GPU the peak memory of PyTorch's tensors is
measured too. A group of turns is a unit of the ledger in OUTPUT/throughput.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from megatron_neobert.errors import ConfigError
from megatron_neobert.evaluation.ledger import Ledger, describe_machine, open_ledger, versions, write_record
from megatron_neobert.evaluation.models import LoadOptions, choose_device, fingerprint, load_model
from megatron_neobert.evaluation.options import ThroughputOptions
from megatron_neobert.evaluation.report import write_page
from megatron_neobert.evaluation.throughput_steps import (
    MASKED_SHARE,
    WEB_MEDIAN_TOKENS,
    Subject,
    Variant,
    build_batch,
    draw_lengths,
    has_memory_for,
    make_step,
    measure_memory,
    prepare,
    time_step,
    why_not,
)
from megatron_neobert.evaluation.throughput_tables import FORWARD, TRAINING, to_memory
from megatron_neobert.runtime.atomic_files import name_models

CPU_MAX_TOKENS = 16_384
MEASURED, OUT_OF_MEMORY = "measured", "out of memory"


@dataclass(frozen=True)
class ModelsUnderTest:
    """Models that are measured, and what is not measured: model, variant in words, reason."""

    variants: dict[Variant, Subject]
    not_run: list[dict[str, str]]


def evaluate(options: ThroughputOptions) -> str:
    """Measure what is not measured yet; write a record per model, and of all models a page and figures.

    Returns:
        The page as Markdown.

    Raises:
        ConfigError: Nothing can be measured, or a length is over --max-tokens.
        MissingInputError, ConversionError: A model cannot be loaded.
        OutputError: Another command is writing the output.
    """
    folders, device = name_models(options.model), choose_device(options.device)
    longest = max(options.lengths)
    limit = options.max_tokens or (math.inf if device.type == "cuda" else max(CPU_MAX_TOKENS, longest))
    if longest > limit:
        raise ConfigError(f"--lengths {longest} is over --max-tokens {limit}; leave it out or raise the limit.")
    found = load_models(folders, options, device)
    for line in found.not_run:
        print(f"not measured: {line['variant']}: {line['reason']}", flush=True)
    settings = {
        "models": {name: fingerprint(folder) for name, folder in folders.items()},
        "variants": [", ".join(asdict(variant).values()) for variant in found.variants],
        "steps": options.steps,
        "warmup": options.warmup,
        "lengths_distribution": options.lengths_distribution,
        "web_median_tokens": WEB_MEDIAN_TOKENS if options.lengths_distribution == "web" else None,
        "masked_share": MASKED_SHARE,
        "seed": options.seed,
        "device": str(device),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }
    groups = [
        (length, size) for length in options.lengths for size in sorted(options.batch_sizes) if length * size <= limit
    ]
    unit = {**settings, "machine": describe_machine(device), "versions": versions()}
    with open_ledger(options.output / "throughput") as ledger:
        rows = measure(found.variants, options, groups, unit=unit, device=device, ledger=ledger)
        page = _write_results(options.output, folders, found, settings, list(map(summarise, rows)), device)
    print(f"{page}\nwrote {options.output}")
    return page


def load_models(folders: Mapping[str, Path], options: ThroughputOptions, device: torch.device) -> ModelsUnderTest:
    """Return every model in every dtype, attention and layout; only --backward needs a masked-language-model head.

    Raises:
        MissingInputError, ConversionError: A model cannot be loaded as asked.
        ConfigError: Nothing is left to measure.
    """
    found = ModelsUnderTest({}, [])
    layouts = ("padded", "packed") if options.layout == "both" else (options.layout,)
    attentions = dict.fromkeys(options.attention or (None,))
    for name, dtype, attention in itertools.product(folders, dict.fromkeys(options.dtype), attentions):
        loading = LoadOptions(dtype=getattr(torch, dtype), device=device, attention=attention)
        model = load_model(folders[name], "AutoModelForMaskedLM" if options.backward else "AutoModel", loading)
        subject = Subject(name=name, dtype=dtype, model=model)
        longest = subject.longest
        too_long = [length for length in options.lengths if longest is not None and length > longest]
        reason = f"has learned positions for {longest} tokens only"
        found.not_run.extend({"model": name, "variant": f"{name}, {n:,}", "reason": reason} for n in too_long)
        for layout in layouts:
            if reason_against := why_not(subject, layout):
                what = f"{name}, {dtype}, {subject.attention}, {layout}"
                found.not_run.append({"model": name, "variant": what, "reason": reason_against})
            elif len(too_long) < len(options.lengths):
                common = {"model": name, "dtype": dtype, "attention": subject.attention, "layout": layout}
                for passes in (FORWARD, TRAINING) if options.backward else (FORWARD,):
                    found.variants[Variant(**common, passes=passes)] = subject
    if not found.variants:
        reasons = "; ".join(f"{entry['variant']}: {entry['reason']}" for entry in found.not_run)
        raise ConfigError(f"nothing can be measured ({reasons}); ask for another layout, dtype or length.")
    return found


def _write_results(
    output: Path,
    folders: Mapping[str, Path],
    found: ModelsUnderTest,
    settings: Mapping[str, Any],
    rows: Sequence[dict[str, Any]],
    device: torch.device,
) -> str:
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
    return write_page("throughput", [output / name / "throughput.json" for name in folders], output)


# --- turns


def measure(
    variants: Mapping[Variant, Subject],
    options: ThroughputOptions,
    groups: Sequence[tuple[int, int]],
    *,
    unit: Mapping[str, Any],
    device: torch.device,
    ledger: Ledger,
) -> list[dict[str, Any]]:
    """Measure the groups that the ledger does not hold.

    Args:
        groups: Lengths with batch sizes; each length from its smallest batch to its largest.
        unit: What every group depends on.

    Returns:
        One row per variant and group, see `_Turn.outcome`, those measured earlier included.
    """
    rows: list[dict[str, Any]] = []
    with tqdm(groups, unit="group", disable=None) as progress:
        for length, batch_size in progress:
            of_group = {**unit, "length": length, "batch_size": batch_size}
            result = ledger.find(of_group)
            if result is None:
                failed = {
                    Variant(**{field.name: row[field.name] for field in fields(Variant)})
                    for row in rows
                    if row["length"] == length and row["outcome"] == OUT_OF_MEMORY
                }
                entered = {
                    variant: subject
                    for variant, subject in variants.items()
                    if variant not in failed and (subject.longest is None or length <= subject.longest)
                }
                found = _measure_group(entered, options, length=length, batch_size=batch_size, device=device)
                result = ledger.add(of_group, {"rows": found})
                for row in map(summarise, found):
                    progress.write(to_line(row))
            rows += result["rows"]
    return rows


def to_line(row: dict[str, Any]) -> str:
    """Format the line about a variant that was just measured."""
    what = f"{row['model']} {row['dtype']} {row['attention']} {row['layout']} {row['passes']}"
    speed, memory = row["tokens_per_second"], row["peak_bytes"]
    result = row["outcome"] if speed is None else f"{speed:,.0f} tokens/s"
    return f"{row['length']} x {row['batch_size']} | {what} | {result}" + (f" | {to_memory(memory)}" if memory else "")


def summarise(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with tokens per second (median and quartiles over its steps) instead of the seconds of each step."""
    summary = {name: value for name, value in row.items() if name != "seconds"}
    speeds = [row["tokens"] / seconds for seconds in row["seconds"]]
    names = ("lower_quartile", "tokens_per_second", "upper_quartile")
    quartiles = np.quantile(speeds, (0.25, 0.5, 0.75)).tolist() if speeds else [None] * 3
    return summary | {"steps": len(speeds)} | dict(zip(names, quartiles, strict=True))


def _measure_group(
    variants: Mapping[Variant, Subject],
    options: ThroughputOptions,
    *,
    length: int,
    batch_size: int,
    device: torch.device,
) -> list[dict[str, Any]]:
    documents = draw_lengths(batch_size, longest=length, distribution=options.lengths_distribution, seed=options.seed)
    turns = [_Turn(variant, subject, options, documents, device) for variant, subject in variants.items()]
    for turn in turns:
        turn.attempt(turn.warm_up)
    for number in range(options.steps):
        start = number % max(1, len(turns))  # no model always follows the same one
        for turn in turns[start:] + turns[:start]:
            turn.attempt(turn.time)
    return [{**asdict(turn.variant), "length": length, "batch_size": batch_size, **turn.outcome()} for turn in turns]


class _Turn:
    """One variant at one length and batch size."""

    def __init__(
        self,
        variant: Variant,
        subject: Subject,
        options: ThroughputOptions,
        documents: Sequence[int],
        device: torch.device,
    ) -> None:
        self.variant, self.subject, self.options, self.documents = variant, subject, options, documents
        self.device, self.fits, self.slots = device, True, 0
        self.peak_bytes: int | None = None  # of a step without the weights, on a GPU
        self.seconds: list[float] = []  # of each timed step
        self.step: Callable[[], None] | None = None

    def attempt(self, work: Callable[[], None]) -> None:
        """Do the work unless this turn is out of memory already."""
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
            seed=self.options.seed,
            device=self.device,
        )
        self.slots = inputs["input_ids"].numel()
        self.step = make_step(self.subject, inputs, self.variant.passes)
        self.peak_bytes = measure_memory(self.step, self.device)  # the first step of the warm-up
        for _ in range(self.options.warmup - 1):
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
            "outcome": MEASURED if self.fits else OUT_OF_MEMORY,
            "seconds": self.seconds if self.fits else [],
            "peak_bytes": weights + self.peak_bytes if self.fits and self.peak_bytes is not None else None,
        }
