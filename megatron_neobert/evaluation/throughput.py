"""Tokens per second of encoders against the length of documents, the batch size swept until memory ends.

One model after the other is alone on the device. Batches hold the same documents for every model, layout and dtype. A
padded batch has one document per row, filled up to the longest; a packed one has a single packed sequence of documents
end to end. Only tokens of documents count as tokens. On a GPU the peak memory of PyTorch's tensors is measured too.

A length with a batch size is a unit of the ledger in OUTPUT/NAME/throughput. Where memory ends, larger batches of the
length are left out; the next start tries again. What a model cannot compute is reported with its reason and left out.

Shapes: `b` documents of a padded batch, `s` tokens.
"""

import gc
import inspect
import itertools
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

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
from megatron_neobert.evaluation.report import write_page
from megatron_neobert.evaluation.throughput_tables import FORWARD, TRAINING, to_cell
from megatron_neobert.runtime.atomic_files import name_models

CPU_MAX_TOKENS = 16_384
WEB_MEDIAN_TOKENS = 368  # of RefinedWeb's documents
# RefinedWeb has mean / median = 640 / 368, which is exp(sigma^2 / 2) of a log-normal.
WEB_SIGMA = math.sqrt(2 * math.log(640 / WEB_MEDIAN_TOKENS))
MASKED_SHARE = 0.2  # of the tokens, as NeoBERT's pre-training
_IGNORED = -100
# Messages of other libraries on a GPU, and of PyTorch on a CPU, when memory is at its end.
_NO_MEMORY = ("out of memory", "ALLOC_FAILED", "can't allocate memory")


def evaluate(options: ThroughputOptions) -> None:
    """Measure what is not measured yet; write a record per model, and a page and figures of all models.

    Raises:
        ConfigError: Nothing can be measured of a model, or a length is over --max-tokens.
        MissingInputError, ConversionError: A model cannot be loaded.
        OutputError: Another command is writing the output.
    """
    folders, device = name_models(options.model), choose_device(options.device)
    longest = max(options.lengths)
    limit = options.max_tokens or (math.inf if device.type == "cuda" else max(CPU_MAX_TOKENS, longest))
    if longest > limit:
        raise ConfigError(f"--lengths {longest} is over --max-tokens {limit}; leave it out or raise the limit.")
    groups = [(length, size) for length in options.lengths for size in options.batch_sizes if length * size <= limit]
    records = [evaluate_model(name, folder, options, groups, device) for name, folder in folders.items()]
    print(f"{write_page('throughput', records, options.output)}\nwrote {options.output}")


def evaluate_model(
    name: str, folder: Path, options: ThroughputOptions, groups: Sequence[tuple[int, int]], device: torch.device
) -> Path:
    """Measure a model in each layout and each group of a length and a batch size, and return its record."""
    loading = LoadOptions(dtype=getattr(torch, options.dtype), device=device, attention=options.attention)
    model = load_model(folder, "AutoModelForMaskedLM" if options.backward else "AutoModel", loading)
    attention = str(model.base_model.config._attn_implementation)
    settings = {
        "model": fingerprint(folder),
        "dtype": options.dtype,
        "attention": attention,
        "steps": options.steps,
        "warmup": options.warmup,
        "lengths_distribution": options.lengths_distribution,
        "seed": options.seed,
        "device": str(device),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }
    layouts = ["padded", "packed"] if options.layout == "both" else [options.layout]
    not_run = find_gaps(model, layouts, options.lengths, attention=attention, dtype=options.dtype)
    for what, reason in not_run.items():
        print(f"not measured: {name}, {what}: {reason}", flush=True)
    layouts = [layout for layout in layouts if layout not in not_run]
    groups = [(length, size) for length, size in sorted(groups) if f"{length:,}" not in not_run]
    if not layouts or not groups:
        reasons = "; ".join(f"{what}: {reason}" for what, reason in not_run.items())
        raise ConfigError(f"{name}: nothing can be measured ({reasons}); ask for another layout, dtype or length.")
    kinds = (FORWARD, TRAINING) if options.backward else (FORWARD,)
    rows, lines, full = list[dict[str, Any]](), list[Line](), set[tuple[str, str, int]]()
    with open_ledger(options.output / name / "throughput", device) as ledger:
        for layout, passes, (length, size) in itertools.product(layouts, kinds, groups):
            if (layout, passes, length) in full:
                continue
            way = {"layout": layout, "passes": passes, "length": length, "batch_size": size}
            unit = {**settings, **way, "machine": describe_machine(device), "versions": versions()}
            result = ledger.find(unit)
            if result is None:
                found = measure(model, options, layout, passes, length=length, batch_size=size, device=device)
                result = found and ledger.add(unit, found)
                print(f"{name}, {layout}, {passes}, {length:,} tokens: {to_cell(size, result)}", flush=True)
            if result is None:
                full.add((layout, passes, length))
            else:
                lines.append(ledger.lines[key_of(unit)])
            rows.append({"model": name, **way, "measured": result})
    parameters = sum(parameter.numel() for parameter in model.parameters())
    results = {"parameters": parameters, "rows": rows, "not_run": not_run}
    record = options.output / name / "throughput.json"
    write_record(record, "throughput", folder=folder, settings=settings, results=results, lines=lines)
    return record


def find_gaps(
    model: Any, layouts: Sequence[str], lengths: Sequence[int], *, attention: str, dtype: str
) -> dict[str, str]:
    """Return the layouts and lengths in which a model cannot compute, with the reasons."""
    longest, gaps = count_learned_positions(model), dict[str, str]()
    for length in lengths:
        if longest is not None and length > longest:
            gaps[f"{length:,}"] = f"the model has learned positions for {longest} tokens only"
    if "packed" in layouts and "cu_seqlens" not in inspect.signature(model.base_model.forward).parameters:
        gaps["packed"] = "its forward takes no cu_seqlens, the documents of a packed sequence"
    if "flash" in attention and dtype == "float32":
        gaps |= dict.fromkeys(layouts, f"{attention} computes in float16 and bfloat16 only")
    return gaps


# --- batches


def draw_lengths(count: int, *, longest: int, distribution: str, seed: int) -> list[int]:
    """Return the tokens of each document; a larger batch begins with the documents of a smaller one.

    Args:
        distribution: full: each has `longest` tokens; web: log-normal as web pages, truncated there.
    """
    if distribution == "full":
        return [longest] * count
    rng = random.Random(f"{seed} {longest}")
    return [min(int(rng.lognormvariate(math.log(WEB_MEDIAN_TOKENS), WEB_SIGMA)) + 1, longest) for _ in range(count)]


def build_batch(
    lengths: Sequence[int], *, layout: str, labels: bool, config: Any, seed: int, device: torch.device | str
) -> dict[str, Any]:
    """Return the inputs of a model: documents of these lengths; with labels, a fifth of the tokens is predicted.

    Args:
        config: Of the model: its vocabulary, and the padding that no document may contain, because some models
            take their positions from it.
    """
    generator = torch.Generator().manual_seed(seed)
    pad, tokens = config.pad_token_id or 0, sum(lengths)
    ids_s = torch.randint(0, config.vocab_size - 1, (tokens,), generator=generator)
    ids_s += ids_s >= pad  # every token but the padding
    targets_s = torch.where(torch.rand(tokens, generator=generator) < MASKED_SHARE, ids_s, _IGNORED)
    targets_s[0] = ids_s[0]  # a loss without any token would be no loss

    def lay_out(values_s: Tensor, filling: int) -> Tensor:
        if layout == "packed":
            return values_s[None].to(device)
        return pad_sequence(list(values_s.split(list(lengths))), batch_first=True, padding_value=filling).to(device)

    inputs: dict[str, Any] = {"input_ids": lay_out(ids_s, pad)}
    if layout == "packed":
        starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        inputs |= {"cu_seqlens": starts.to(device), "max_seqlen": max(lengths)}
    else:
        inputs["attention_mask"] = lay_out(torch.ones_like(ids_s), 0)
    return inputs | ({"labels": lay_out(targets_s, _IGNORED)} if labels else {})


# --- steps


def measure(
    model: Any,
    options: ThroughputOptions,
    layout: str,
    passes: str,
    *,
    length: int,
    batch_size: int,
    device: torch.device,
) -> dict[str, Any] | None:
    """Return quartiles of the tokens per second, and on a GPU the peak memory; None if memory was at its end.

    Memory is free again then. Any other error is raised.
    """
    lengths = draw_lengths(batch_size, longest=length, distribution=options.lengths_distribution, seed=options.seed)
    labels = passes == TRAINING
    try:
        inputs = build_batch(
            lengths, layout=layout, labels=labels, config=model.config, seed=options.seed, device=device
        )
        return _run_steps(model, inputs, options, tokens=sum(lengths), device=device)
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and not any(words in str(error) for words in _NO_MEMORY):
            raise
    # Not in the handler: while the error lives, its traceback holds the tensors.
    model.zero_grad(set_to_none=True)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return None


def _run_steps(
    model: Any, inputs: dict[str, Any], options: ThroughputOptions, *, tokens: int, device: torch.device
) -> dict[str, Any]:
    on_gpu, seconds = device.type == "cuda", list[float]()
    model.train("labels" in inputs)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(options.warmup + options.steps):
        model.zero_grad(set_to_none=True)
        if on_gpu:
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        if "labels" in inputs:
            model(**inputs).loss.backward()
        else:
            with torch.no_grad():
                model.base_model(**inputs)
        if on_gpu:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    model.zero_grad(set_to_none=True)
    quartiles = np.quantile([tokens / each for each in seconds[options.warmup :]], (0.25, 0.5, 0.75)).tolist()
    return {
        "tokens": tokens,
        "tokens_per_second": quartiles,  # lower quartile, median, upper quartile
        "peak_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else None,
    }
