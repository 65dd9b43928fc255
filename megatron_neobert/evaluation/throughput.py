"""Tokens per second of encoders' forward against the length of documents, the batch size swept until memory ends.

One model after the other is alone on the device; every row of a batch is a document of the same length. A length with a
batch size is a unit of the ledger in OUTPUT/NAME/throughput. Where memory ends, larger batches of the length are left
out; the next start tries again. Lengths beyond a model's learned positions are reported and left out.
"""

import gc
import itertools
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_neobert.errors import ConfigError
from megatron_neobert.evaluation.ledger import Line, describe_machine, key_of, open_ledger, versions, write_record
from megatron_neobert.evaluation.models import (
    LoadOptions,
    choose_device,
    count_learned_positions,
    fingerprint,
    load_model,
)
from megatron_neobert.evaluation.options import ThroughputOptions
from megatron_neobert.evaluation.report import speed_cell, write_page
from megatron_neobert.runtime.atomic_files import name_models

CPU_MAX_TOKENS = 16_384  # of a batch of several documents: larger ones take minutes and are no faster
# Messages of other libraries on a GPU, and of PyTorch on a CPU, when memory is at its end.
_NO_MEMORY = ("out of memory", "ALLOC_FAILED", "can't allocate memory")


def evaluate(options: ThroughputOptions) -> None:
    """Measure what is not measured yet; write a record per model, and a page and a figure of all models.

    Raises:
        ConfigError: Nothing can be measured of a model.
        MissingInputError, ConversionError: A model cannot be loaded.
        OutputError: Another command is writing the output.
    """
    folders, device = name_models(options.model), choose_device(options.device)
    records = [evaluate_model(name, folder, options, device) for name, folder in folders.items()]
    print(f"{write_page('throughput', records, options.output)}\nwrote {options.output}")


def evaluate_model(name: str, folder: Path, options: ThroughputOptions, device: torch.device) -> Path:
    """Measure a model with each length and batch size, and return its record."""
    loading = LoadOptions(dtype=getattr(torch, options.dtype), device=device, attention=options.attention)
    model = load_model(folder, "AutoModel", loading)
    attention = str(model.config._attn_implementation)
    if "flash" in attention and options.dtype == "float32":
        raise ConfigError(f"{name}: {attention} computes in float16 and bfloat16 only; give --dtype bfloat16.")
    settings = {
        "model": fingerprint(folder),
        "dtype": options.dtype,
        "attention": attention,
        "steps": options.steps,
        "warmup": options.warmup,
        "device": str(device),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }
    limit = math.inf if device.type == "cuda" else max(CPU_MAX_TOKENS, *options.lengths)
    not_run = find_gaps(model, options.lengths)
    smallest = min(options.batch_sizes)
    for length in options.lengths:
        if length * smallest > limit:
            not_run.setdefault(f"{length:,}", f"batches of {smallest} exceed {limit:,} tokens, the limit on a CPU")
    for gap, reason in not_run.items():
        print(f"not measured: {name}, {gap}: {reason}", flush=True)
    lengths = sorted(length for length in options.lengths if f"{length:,}" not in not_run)
    if not lengths:
        reason = next(iter(not_run.values()))
        raise ConfigError(
            f"{name}: nothing can be measured ({reason}); give shorter --lengths or smaller --batch-sizes."
        )
    rows, lines, full = list[dict[str, Any]](), list[Line](), set[int]()
    with open_ledger(options.output / name / "throughput", device) as ledger:
        for length, size in itertools.product(lengths, sorted(options.batch_sizes)):
            if length in full or length * size > limit:
                continue
            way = {"length": length, "batch_size": size}
            unit = {**settings, **way, "machine": describe_machine(device), "versions": versions()}
            result = ledger.find(unit)
            if result is None:
                found = measure(model, options, length=length, batch_size=size, device=device)
                result = found and ledger.add(unit, found)
                print(f"{name}, {length:,} tokens: {speed_cell(size, result)}", flush=True)
            if result is None:
                full.add(length)
            else:
                lines.append(ledger.lines[key_of(unit)])
            rows.append({"model": name, **way, "measured": result})
    parameters = sum(parameter.numel() for parameter in model.parameters())
    results = {"parameters": parameters, "rows": rows, "not_run": not_run}
    record = options.output / name / "throughput.json"
    write_record(record, "throughput", folder=folder, settings=settings, results=results, lines=lines)
    return record


def find_gaps(model: Any, lengths: Sequence[int]) -> dict[str, str]:
    """Return the lengths in which a model cannot compute, with the reason."""
    longest = count_learned_positions(model)
    reason = f"the model has learned positions for {longest} tokens only"
    return {f"{length:,}": reason for length in lengths if longest is not None and length > longest}


def measure(
    model: Any, options: ThroughputOptions, *, length: int, batch_size: int, device: torch.device
) -> dict[str, Any] | None:
    """Return quartiles of the tokens per second, and on a GPU the peak memory; None if memory was at its end.

    Memory is free again then. Any other error is raised.
    """
    try:
        return _run_steps(model, options, length=length, batch_size=batch_size, device=device)
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and not any(words in str(error) for words in _NO_MEMORY):
            raise
    # Not in the handler: while the error lives, its traceback holds the tensors.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return None


@torch.no_grad()
def _run_steps(
    model: Any, options: ThroughputOptions, *, length: int, batch_size: int, device: torch.device
) -> dict[str, Any]:
    on_gpu, seconds = device.type == "cuda", list[float]()
    pad, generator = model.config.pad_token_id or 0, torch.Generator().manual_seed(0)
    ids_bs = torch.randint(0, model.config.vocab_size - 1, (batch_size, length), generator=generator)
    ids_bs = (ids_bs + (ids_bs >= pad)).to(device)  # every token but the padding, which some models take positions from
    mask_bs = torch.ones_like(ids_bs)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(options.warmup + options.steps):
        if on_gpu:
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        model(input_ids=ids_bs, attention_mask=mask_bs)
        if on_gpu:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    tokens = batch_size * length
    quartiles = np.quantile([tokens / each for each in seconds[options.warmup :]], (0.25, 0.5, 0.75)).tolist()
    return {
        "tokens_per_second": quartiles,  # lower quartile, median, upper quartile
        "peak_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else None,
    }
