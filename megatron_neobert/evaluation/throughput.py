"""Tokens per second of an encoder's forward pass by document length, with the fastest batch size for each length.

Models are measured one after another, each alone on the device. All documents of a batch have the same length. A unit
of the ledger in OUTPUT/MODEL/throughput is a length with a batch size. When a batch does not fit into memory, larger
batches of its length are skipped; this is not recorded, so the next start tries again. Lengths beyond a model's learned
positions are skipped with a message.
"""

import gc
import itertools
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_neobert.errors import ConfigError
from megatron_neobert.evaluation.ledger import Line, key_of, open_ledger, origin_of, write_record
from megatron_neobert.evaluation.models import count_learned_positions, fingerprint, load_model
from megatron_neobert.evaluation.options import ThroughputOptions
from megatron_neobert.evaluation.report import speed_cell, write_page
from megatron_neobert.huggingface.hub import find_models

# Limit of a batch of several documents on a CPU, where larger batches take minutes and are not faster.
CPU_MAX_TOKENS = 16_384
# Parts of the messages with which CUDA libraries, and PyTorch on a CPU, report that memory is full.
_OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED", "can't allocate memory")


def run_throughput(options: ThroughputOptions) -> None:
    """Measure each model. Write OUTPUT/MODEL/throughput.json, and OUTPUT/throughput.md and .png. Print the .md."""
    records = [evaluate_model(name, folder, options) for name, folder in find_models(options.model).items()]
    print(f"{write_page('throughput', records, options.output)}\nwrote {options.output}")


def evaluate_model(name: str, folder: Path, options: ThroughputOptions) -> Path:
    """Measure a model at each length and batch size, write its record, and return the record's path.

    On a CPU, batches with more tokens than the larger of CPU_MAX_TOKENS and the longest length are skipped. Raise
    ConfigError if no length remains or flash attention is used with float32.
    """
    model = load_model(folder, "AutoModel", options)
    device = model.device
    attention = str(model.config._attn_implementation)
    if "flash" in attention and options.dtype == "float32":
        raise ConfigError(f"{name}: {attention} supports only float16 and bfloat16; give --dtype bfloat16.")
    settings: dict[str, Any] = {
        "model": fingerprint(folder),
        "dtype": options.dtype,
        "attention": attention,
        "steps": options.steps,
        "warmup": options.warmup,
        "device": str(device),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }
    limit = math.inf if device.type == "cuda" else max(CPU_MAX_TOKENS, *options.lengths)
    longest = count_learned_positions(model) or math.inf
    sizes = [
        (length, batch_size)
        for length, batch_size in itertools.product(sorted(options.lengths), sorted(options.batch_sizes))
        if length <= longest and length * batch_size <= limit
    ]
    if skipped := [f"{length:,}" for length in options.lengths if length not in dict(sizes)]:
        limits = {"learned positions": longest, "tokens in a batch on a CPU": limit}
        rule = " and ".join(f"{value:,} {limit_name}" for limit_name, value in limits.items() if value < math.inf)
        if not sizes:
            raise ConfigError(
                f"{name}: no length can be measured (at most {rule}); give shorter --lengths or --batch-sizes 1."
            )
        print(f"not measured: {name}, {', '.join(skipped)} tokens; at most {rule}", flush=True)
    rows, lines, full = list[dict[str, Any]](), list[Line](), set[int]()
    with open_ledger(options.output / name / "throughput", device) as ledger:
        for length, batch_size in sizes:
            if length in full:
                continue
            size = {"length": length, "batch_size": batch_size}
            unit = {**settings, **size, **ledger.origin}
            row = {"model": name, **size, "measured": ledger.find(unit)}
            if row["measured"] is None:
                measured = measure_batch(model, options, length=length, batch_size=batch_size)
                row["measured"] = measured and ledger.add(unit, measured)
                print(f"{name}, {length:,} tokens: {speed_cell(row)}", flush=True)
            rows.append(row)
            if row["measured"] is None:
                full.add(length)
            else:
                lines.append(ledger.lines[key_of(unit)])
    parameters = sum(parameter.numel() for parameter in model.parameters())
    results = {"parameters": parameters, "rows": rows}
    path, origin = options.output / name / "throughput.json", origin_of(lines)
    write_record(path, folder=folder, fingerprint=settings["model"], settings=settings, results=results, origin=origin)
    return path


def measure_batch(model: Any, options: ThroughputOptions, *, length: int, batch_size: int) -> dict[str, Any] | None:
    """Time forward passes of one batch. Errors other than out-of-memory errors propagate.

    Returns:
        {"tokens_per_second": [lower quartile, median, upper quartile], "peak_bytes": GPU memory, None on a CPU}. None
        if the batch does not fit into memory, which is then free again.
    """
    try:
        return _run_steps(model, options, length=length, batch_size=batch_size)
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and not any(part in str(error) for part in _OUT_OF_MEMORY):
            raise
    # This is after the handler because the error's traceback holds the tensors.
    gc.collect()
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    return None


@torch.no_grad()
def _run_steps(model: Any, options: ThroughputOptions, *, length: int, batch_size: int) -> dict[str, Any]:
    device, on_gpu, seconds = model.device, model.device.type == "cuda", list[float]()
    pad, generator = model.config.pad_token_id or 0, torch.Generator().manual_seed(0)
    # Every id except padding's, because some models derive positions from padding.
    ids_bs = torch.randint(0, model.config.vocab_size - 1, (batch_size, length), generator=generator)
    ids_bs = (ids_bs + (ids_bs >= pad)).to(device)
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
    tokens_per_second = batch_size * length / np.array(seconds[options.warmup :])
    return {
        "tokens_per_second": np.quantile(tokens_per_second, (0.25, 0.5, 0.75)).tolist(),
        "peak_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else None,
    }
