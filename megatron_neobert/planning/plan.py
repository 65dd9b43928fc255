"""The plan of a run that --dry-run prints. Needs no GPU and does not import torch.

Times on GPUs are printed for several values of MFU, because only a run can measure its MFU. Communication and the table
by number of GPUs are for H100 GPUs at a fixed MFU, with the assumptions of network.py.
"""

import itertools
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_neobert.checkpoint.start import first_iteration
from megatron_neobert.config.cli import PlanOptions
from megatron_neobert.config.phases import fit_micro_batch
from megatron_neobert.config.schedule import describe_schedule, schedule_warnings
from megatron_neobert.config.schema import Settings
from megatron_neobert.data.batches.corpora import OpenedCorpora
from megatron_neobert.model.flops import checkpoint_bytes, count_parameters
from megatron_neobert.model.gpus import GPUS, find_gpu
from megatron_neobert.planning.assumed_data import assumptions
from megatron_neobert.planning.forecast import Forecast, forecast_phases
from megatron_neobert.planning.memory import RankMemory
from megatron_neobert.planning.network import (
    GPUS_PER_NODE,
    NVLINK_GB_PER_S,
    REACHED,
    StepTime,
    collective_seconds,
    plan_step,
    step_traffic,
)
from megatron_neobert.runtime.atomic_files import existing_parent
from megatron_neobert.text import approximate, counted, duration, in_bytes, percent

_INDENT = 12  # columns for the name of a section
# Terminals have at least 80 columns.
_WRAPPER = textwrap.TextWrapper(
    width=80 - _INDENT, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
)
_LARGE_TRUNCATION = 0.1  # share of truncated tokens from which on the plan warns
_MANY_EPOCHS = 5  # epochs above which the plan warns
_CPU_FLOPS = 50e9  # FLOP/s of a core, assumed for the time of an iteration on a CPU
GPU = "H100 80GB HBM3"
# One H200 reached it in bf16 (docs/performance.md). The faster GPUs compute, the more the network matters.
MFU = 0.4
_SHOWN_GPUS = ("A100-SXM4-80GB", GPU, "H200")
_SHOWN_MFU = (0.15, 0.25, MFU)  # 15 % is that of the paper's run


def start_warnings(
    settings: Settings, opened: Sequence[OpenedCorpora], *, world_size: int, cpu_cores: int | None
) -> list[str]:
    """Return the plan's warnings about the data of a fresh run, and about an iteration of over a minute on a CPU.

    Only first windows are sampled, which the run reads at its start anyway.

    Args:
        opened: Data of each phase.
        cpu_cores: Number of cores of a run on the CPU; None for a run on GPUs.
    """
    forecasts = forecast_phases(settings, opened, done=0, world_size=world_size, windows=1)
    lines = [
        line for each in forecasts for line in (*iteration_lines(each, world_size=world_size), *corpus_lines(each))
    ]
    warnings = [line for line in lines if line.startswith("warning: ")]
    seconds = forecasts[0].flops / (_CPU_FLOPS * cpu_cores) if cpu_cores else 0.0
    if seconds > 60:
        warnings.append(
            f"warning: about {duration(seconds)} per iteration at an assumed {_CPU_FLOPS / 1e9:.0f} GFLOP/s per core "
            f"({counted(cpu_cores or 0, 'core')}); on a CPU use a small recipe such as --config tiny"
        )
    return list(dict.fromkeys(warnings))


def print_plan(settings: Settings, opened: Sequence[OpenedCorpora], options: PlanOptions, *, world_size: int) -> int:
    """Print the plan of a run on `world_size` ranks and return exit code 0. `settings` must fit this number of ranks.

    Args:
        opened: Data of each phase.
    """
    vocab_size, done = opened[0].tokenizer.vocab_size, first_iteration(settings.checkpoint)
    forecasts = forecast_phases(settings, opened, done=done, world_size=world_size)
    fullest = max(forecasts, key=lambda forecast: forecast.memory.total)
    sections = [
        ("assumed", assumptions(settings)),
        ("model", [model_line(settings, vocab_size)]),
        ("ranks", [ranks_line(settings, world_size)]),
    ]
    for forecast in forecasts:
        if len(forecasts) > 1:
            sections.append((f"phase {forecast.phase.number}", phase_lines(forecast, settings)))
        sections.append(("iteration", iteration_lines(forecast, world_size=world_size)))
        sections.append(("corpus", corpus_lines(forecast)))
    sizes = {"vocab_size": vocab_size, "world_size": world_size}
    sections += [
        ("run", [run_line(settings, forecasts, done=done)]),
        ("rate", [describe_schedule(settings), *schedule_warnings(settings)]),
        ("memory", memory_lines(fullest.memory, stages=settings.parallel.pipeline_model_parallel_size)),
        ("GPUs", gpu_lines(forecasts, fullest.memory, world_size=world_size)),
        *([("network", network_lines(fullest.phase.settings, options, **sizes))] if world_size > 1 else []),
        *([("scaling", scaling_lines(forecasts, options, **sizes))] if settings.training.bf16 else []),
        ("checkpoints", [checkpoint_line(settings, vocab_size=vocab_size)]),
    ]
    for name, lines in sections:
        for number, line in enumerate(itertools.chain.from_iterable(map(_WRAPPER.wrap, lines))):
            print(f"{'' if number else name:<{_INDENT}}{line}".rstrip())
    return 0


# ---- lines


def model_line(settings: Settings, vocab_size: int) -> str:
    model, count = settings.model, count_parameters(settings.model, vocab_size=vocab_size)
    padded = model.padded_vocab_size(vocab_size, tensor_parallel=settings.parallel.tensor_model_parallel_size)
    return (
        f"parameters {count.total:,} ({count.blocks:,} in {model.num_layers} layers of width {model.hidden_size:,}), "
        f"vocabulary {vocab_size:,} (padded to {padded:,})"
    )


def ranks_line(settings: Settings, world_size: int) -> str:
    parallel = settings.parallel
    shares = {
        "tensor-parallel": parallel.tensor_model_parallel_size,
        "pipeline stages": parallel.pipeline_model_parallel_size,
        "context-parallel": parallel.context_parallel_size,
    }
    factors = [f"{settings.data_parallel_size(world_size)} data-parallel"]
    factors += [f"{size} {name}" for name, size in shares.items() if size > 1]
    return f"{world_size} = {' x '.join(factors)}"


def iteration_lines(forecast: Forecast, *, world_size: int) -> list[str]:
    settings, sample = forecast.phase.settings, forecast.sample
    training, data = settings.training, settings.data
    micro_batches = counted(settings.micro_batches_per_rank(world_size), "micro-batch", "micro-batches")
    mean = sample.tokens / sample.documents
    lines = [
        f"{training.global_batch_size:,} packed sequences x {data.seq_length:,} tokens = "
        f"{settings.tokens_per_iteration:,} tokens, in {micro_batches} of {training.micro_batch_size:,} per rank",
        f"about {sample.documents:,.{0 if sample.documents >= 10 else 1}f} documents of {mean:,.0f} tokens; packing "
        f"efficiency {percent(sample.packing_efficiency, digits=2)}",
    ]
    if sample.truncated >= 0.0005:
        warning = "warning: " if sample.truncated >= _LARGE_TRUNCATION else ""
        lines.append(
            f"{warning}{percent(sample.truncated)} of the tokens are never read, because long documents are cut at "
            f"{data.seq_length:,}; --long-documents chunk reads them"
        )
    return lines


def corpus_lines(forecast: Forecast) -> list[str]:
    sample, iterations = forecast.sample, forecast.iterations
    lines = [
        f"{line}; read about {approximate(epochs * iterations)} times"
        + (f", {percent(tokens, digits=2)} of the tokens" if len(sample.epochs) > 1 else "")
        for line, tokens, epochs in zip(forecast.opened.description, sample.token_shares, sample.epochs, strict=True)
    ]
    if (most := max(sample.epochs) * iterations) > _MANY_EPOCHS:
        lines.append(
            f"warning: documents are read up to {approximate(most)} times; repetitions beyond the first few add "
            "little. Use fewer --train-iters or more data"
        )
    return lines


def phase_lines(forecast: Forecast, settings: Settings) -> list[str]:
    phase = forecast.phase
    flags = settings.training.phases[phase.number - 1].flags if phase.number else ""
    tokens = forecast.iterations * forecast.sample.tokens
    lines = [f"iterations {phase.first:,} to {phase.last:,}: {approximate(tokens)} tokens of documents"]
    return lines + ([flags] if flags else [])


def run_line(settings: Settings, forecasts: Sequence[Forecast], *, done: int) -> str:
    iterations = counted(settings.training.train_iters, "iteration") + (f", {done:,} of them done" if done else "")
    tokens = sum(forecast.iterations * forecast.sample.tokens for forecast in forecasts)
    return f"{iterations}: {approximate(tokens)} tokens of documents{' to go' if done else ''}"


def memory_lines(memory: RankMemory, *, stages: int) -> list[str]:
    """Format the memory of the fullest rank in GiB, a line per use, and a line with its stage if `stages` > 1."""
    uses = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activations,
        "head and loss": memory.head,
        "working memory": memory.work,
        "CUDA, NCCL (assumed)": memory.context,
        "total": memory.total,
    }
    lines = [f"{use:<20}{size / (1 << 30):>10,.2f} GiB" for use, size in uses.items()]
    return lines + ([f"fullest pipeline stage: {memory.stage + 1} of {stages}"] if stages > 1 else [])


def gpu_lines(forecasts: Sequence[Forecast], memory: RankMemory, *, world_size: int) -> list[str]:
    """Format a table of GPUs: the time of the run at several MFU, and whether the memory suffices."""
    flops = sum(forecast.iterations * forecast.flops for forecast in forecasts)
    shares = _SHOWN_MFU if forecasts[0].phase.settings.training.bf16 else ()
    header = "".join(f"{f'{percent(mfu, digits=0)} MFU':>12}" for mfu in shares)
    lines = [f"{f'{world_size:,} x':<14}{header}  memory, GiB"]
    for gpu in GPUS:
        if gpu.name not in _SHOWN_GPUS:
            continue
        peak = world_size * gpu.bf16_tflops * 1e12
        times = "".join(f" {duration(flops / (peak * mfu)):>11}" for mfu in shares)
        spare = gpu.memory_gib - memory.total / (1 << 30)
        room = f"fits, {spare:,.1f} free" if spare >= 0 else f"lacks {-spare:,.1f}"
        lines.append(f"{gpu.name:<14}{times}  {room}")
    note = f"The paper's run had about 15 % MFU; {percent(MFU, digits=0)} is what our measured runs reached."
    lines.append(note if shares else "Times are shown for bfloat16 only (--bf16).")
    return lines


def checkpoint_line(settings: Settings, *, vocab_size: int) -> str:
    """Format the size of a checkpoint, and how many checkpoints the disk of --save has room for."""
    size, checkpoint = checkpoint_bytes(settings, vocab_size=vocab_size), settings.checkpoint
    if checkpoint.save is None:
        return f"{in_bytes(size)} each; none is saved without --save"
    folder = existing_parent(Path(checkpoint.save).resolve())
    free = shutil.disk_usage(folder).free
    retention = "all are kept" if checkpoint.keep_last is None else f"the last {checkpoint.keep_last} are kept"
    return (
        f"{in_bytes(size)} each, every {counted(checkpoint.save_interval, 'iteration')}; {retention}; "
        f"{in_bytes(free)} free in {folder}, which is room for {free // size:,}"
    )


# ---- communication, and time and price by number of GPUs


def network_lines(settings: Settings, options: PlanOptions, *, vocab_size: int, world_size: int) -> list[str]:
    """Format the traffic of a rank per step: a line per group and operation, and a line with the assumptions."""
    network: dict[str, Any] = {"world_size": world_size, "network_gbps": options.network_gbps}
    lines = [f"{'per rank and step':<28}{'GB':>9}{'calls':>9}{'ms':>9}"]
    for each in step_traffic(settings, vocab_size=vocab_size, world_size=world_size):
        size = each.bytes / each.calls
        seconds = each.calls * collective_seconds(settings, each.group, each.operation, size, **network)
        name = f"{each.group:<12}{each.operation}"
        lines.append(f"{name:<28}{each.bytes / 1e9:>9,.2f}{each.calls:>9,}{1e3 * seconds:>9,.1f}")
    lines.append(
        f"assumed: nodes of {GPUS_PER_NODE} GPUs with {NVLINK_GB_PER_S} GB/s NVLink, {options.network_gbps:g} Gb/s per "
        f"GPU between nodes, {percent(REACHED, digits=0)} of both reached, latencies of NCCL"
    )
    return lines


def scaling_lines(
    forecasts: Sequence[Forecast], options: PlanOptions, *, vocab_size: int, world_size: int
) -> list[str]:
    """Format a table with a line per number of GPUs.

    Steps are those of the phase with the most FLOPs; hours and price are those of all phases.
    """
    main = max(range(len(forecasts)), key=lambda number: forecasts[number].flops * forecasts[number].iterations)
    price = "" if options.price is None else f"{'price':>10}"
    lines = [f"{'GPUs':>6}{'micro-batches':>14}{'step':>8}{'network':>9}{'busy':>6}{'hours':>8}{price}"]
    for gpus in options.gpus or (world_size,):
        fitted = [fit_micro_batch(forecast.phase.settings, world_size=gpus) for forecast in forecasts]
        fitting = [settings for settings in fitted if settings is not None]
        if len(fitting) < len(fitted):
            lines.append(f"{gpus:>6,}  the global batch is no multiple of the data-parallel ranks")
            continue
        steps = [
            step_on(gpus, each, forecast.flops, vocab_size=vocab_size, network_gbps=options.network_gbps)
            for each, forecast in zip(fitting, forecasts, strict=True)
        ]
        hours = sum(step.total * each.iterations for step, each in zip(steps, forecasts, strict=True)) / 3600
        total, exposed = steps[main]
        micro_batches = f"{fitting[main].micro_batches_per_rank(gpus):,} x {fitting[main].tokens_per_micro_batch:,}"
        shown_step = f"{total:,.2f} s" if total >= 1 else f"{1e3 * total:,.0f} ms"
        busy = percent(compute_seconds(gpus, forecasts[main].flops) / total, digits=0)
        shown_price = "" if options.price is None else f"{options.price * gpus * hours:>10,.0f}"
        shown_hours = f"{hours:,.0f}" if hours >= 100 else f"{hours:.1f}"
        lines.append(
            f"{gpus:>6,}{micro_batches:>14}{shown_step:>8}{percent(exposed / total):>9}{busy:>6}{shown_hours:>8}"
            f"{shown_price}"
        )
    lines.append(
        f"{GPU} at {percent(MFU, digits=0)} MFU. network: share of the step in which only the network works; busy: "
        "share in which the GPU computes. If it is low, use fewer GPUs or a larger --global-batch-size"
    )
    return lines


def step_on(gpus: int, settings: Settings, flops: float, *, vocab_size: int, network_gbps: float = 400) -> StepTime:
    """Return the time of an iteration of `flops` operations on H100 GPUs, for settings whose micro-batches fit."""
    return plan_step(
        settings,
        vocab_size=vocab_size,
        world_size=gpus,
        compute_seconds=compute_seconds(gpus, flops),
        network_gbps=network_gbps,
    )


def compute_seconds(gpus: int, flops: float) -> float:
    """Return the seconds of `flops` operations on H100 GPUs that only compute, at the assumed MFU."""
    gpu = find_gpu(GPU)
    assert gpu is not None, GPU
    return flops / (gpus * gpu.bf16_tflops * 1e12 * MFU)
