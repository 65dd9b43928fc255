"""The plan of a run that --dry-run prints. Needs no GPU and does not import torch.

All times and prices follow from steps that were measured on one H200, and from the communication that network.py
assumes.
"""

import itertools
import math
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path

from megatron_neobert.checkpoint.folder import iteration_of, list_checkpoints
from megatron_neobert.checkpoint.start import first_iteration
from megatron_neobert.config.cli import PlanOptions
from megatron_neobert.config.phases import fit_micro_batch
from megatron_neobert.config.schedule import describe_schedule, schedule_warnings
from megatron_neobert.config.schema import Settings
from megatron_neobert.data.batches.corpora import OpenedCorpora
from megatron_neobert.model.flops import GPUS, checkpoint_bytes, count_parameters, find_gpu
from megatron_neobert.planning.forecast import Forecast, assumptions, forecast_phases
from megatron_neobert.planning.memory import RankMemory
from megatron_neobert.planning.network import (
    GPUS_PER_NODE,
    NVLINK_GB_PER_S,
    REACHED,
    StepTime,
    plan_step,
    step_traffic,
    traffic_seconds,
)
from megatron_neobert.runtime.atomic_files import existing_parent
from megatron_neobert.text import approximate, counted, duration, in_bytes, percent, with_prefix

_INDENT = 12  # columns for the name of a section
# Terminals have at least 80 columns.
_WRAPPER = textwrap.TextWrapper(
    width=80 - _INDENT, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
)
_LARGE_TRUNCATION = 0.1  # share of truncated tokens from which on the plan warns
_MANY_EPOCHS = 5  # epochs above which the plan warns
_CPU_FLOPS = 50e9  # FLOP/s of a core, assumed for the time of an iteration on a CPU
GPU = "H100 80GB HBM3"
_SHOWN_GPUS = {"A100-SXM4-80GB": False, GPU: True, "H200": True}  # -> has FP8
# Seconds of a step that do not depend on its tokens, measured on one H200 with 28 x 768: docs/performance.md.
FIXED_SECONDS = 0.010
# Share of the bf16 peak during the rest of a step, by precision: from docs/performance.md, machine A.
MEASURED_SHARE = {
    "bf16": 0.42,
    "bf16 with local layers": 0.39,
    "FP8 tensorwise": 0.45,
    "FP8 delayed": 0.49,
    "FP8 blockwise": 0.41,
}
_WIDE = 768  # the width that was measured in each precision
# Of all narrower models: from 12 x 512 in bf16 with local layers, docs/results.md. No narrower model was measured.
_NARROW_SHARE, _NARROWEST = 0.26, 512


def start_warnings(
    settings: Settings, opened: Sequence[OpenedCorpora], *, world_size: int, cpu_cores: int | None
) -> list[str]:
    """Return the plan's warnings for a fresh run: about data, disk space, and iterations of over a minute on a CPU.

    Only the first window of each phase is sampled.

    Args:
        cpu_cores: Number of cores of a run on the CPU; None for a run on GPUs.
    """
    forecasts = forecast_phases(settings, opened, done=0, world_size=world_size, windows=1)
    lines = [
        line for each in forecasts for line in (*iteration_lines(each, world_size=world_size), *corpus_lines(each))
    ]
    lines += checkpoint_lines(settings, vocab_size=opened[0].tokenizer.vocab_size, done=0)
    warnings = [line for line in lines if line.startswith("warning: ")]
    seconds = forecasts[0].flops / (_CPU_FLOPS * cpu_cores) if cpu_cores else 0.0
    if seconds > 60:
        warnings.append(
            f"warning: about {duration(seconds)} per iteration at an assumed {_CPU_FLOPS / 1e9:.0f} GFLOP/s per core "
            f"({counted(cpu_cores or 0, 'core')}); on a CPU use a small recipe such as --config tiny"
        )
    return list(dict.fromkeys(warnings))


def print_plan(settings: Settings, opened: Sequence[OpenedCorpora], options: PlanOptions, *, world_size: int) -> int:
    """Print the plan of a run on `world_size` ranks, for which `settings` must be valid. Return exit code 0."""
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
            phase, tokens = forecast.phase, forecast.iterations * forecast.sample.tokens
            lines = [f"iterations {phase.first:,} to {phase.last:,}: {approximate(tokens)} tokens of documents"]
            lines += [settings.training.phases[phase.number - 1].flags] if phase.number else []
            sections.append((f"phase {phase.number}", lines))
        sections.append(("iteration", iteration_lines(forecast, world_size=world_size)))
        sections.append(("corpus", corpus_lines(forecast)))
    sizes = {"vocab_size": vocab_size, "world_size": world_size}
    sections += [
        ("run", [run_line(settings, forecasts, done=done)]),
        ("rate", [describe_schedule(settings), *schedule_warnings(settings)]),
        ("memory", memory_lines(fullest.memory, stages=settings.parallel.pipeline_model_parallel_size)),
        ("GPUs", gpu_lines(forecasts, fullest.memory, options, **sizes)),
        *([("network", network_lines(fullest.phase.settings, options, **sizes))] if world_size > 1 else []),
        *([("scaling", scaling_lines(forecasts, options, **sizes))] if _precision(settings) in MEASURED_SHARE else []),
        ("checkpoints", checkpoint_lines(settings, vocab_size=vocab_size, done=done)),
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
        f"parameters {count.total:,} ({count.blocks:,} in {model.num_layers} layers of width {model.hidden_size:,}, "
        f"{count.total - count.blocks:,} in embedding, last norm and head), vocabulary {vocab_size:,} (padded to "
        f"{padded:,})"
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
    return f"{world_size} = {' x '.join(factors)}" if len(factors) > 1 else factors[0]


def iteration_lines(forecast: Forecast, *, world_size: int) -> list[str]:
    settings, sample = forecast.phase.settings, forecast.sample
    training, data = settings.training, settings.data
    micro_batches = counted(settings.micro_batches_per_rank(world_size), "micro-batch", "micro-batches")
    lines = [
        f"{training.global_batch_size:,} packed sequences x {data.seq_length:,} tokens = "
        f"{settings.tokens_per_iteration:,} tokens, in {micro_batches} of {training.micro_batch_size:,} per rank",
        f"about {sample.pieces:,.{0 if sample.pieces >= 10 else 1}f} documents or pieces of "
        f"{sample.tokens / sample.pieces:,.0f} tokens with [CLS] and [SEP]; packing efficiency "
        f"{percent(sample.packing_efficiency, digits=2)}",
    ]
    if sample.truncated >= 0.0005:
        warning = "warning: " if sample.truncated >= _LARGE_TRUNCATION else ""
        lines.append(
            f"{warning}{percent(sample.truncated)} of the tokens are never read, because long documents are cut at "
            f"{data.seq_length:,} (uncut, a sampled document has {sample.document_tokens:,.0f} on average, without "
            "[CLS] and [SEP]); --long-documents chunk reads them"
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


def run_line(settings: Settings, forecasts: Sequence[Forecast], *, done: int) -> str:
    iterations = counted(settings.training.train_iters, "iteration") + (f", {done:,} of them done" if done else "")
    tokens = sum(forecast.iterations * forecast.sample.tokens for forecast in forecasts)
    flops = sum(forecast.iterations * forecast.flops for forecast in forecasts)
    return f"{iterations}: {approximate(tokens)} tokens of documents, {flops:.3g} FLOP".replace("e+", "e") + (
        " to go" if done else ""
    )


def memory_lines(memory: RankMemory, *, stages: int) -> list[str]:
    """Format a rank's memory in GiB, with a line for each use. If `stages` > 1, add a line with the rank's stage."""
    uses = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activations,
        "head and loss": memory.head,
        "working memory": memory.work,
        "CUDA, NCCL (assumed)": memory.context,
        "total per GPU": memory.total,
    }
    lines = [f"{use:<20}{size / (1 << 30):>10,.2f} GiB" for use, size in uses.items()]
    return lines + ([f"fullest pipeline stage: {memory.stage + 1} of {stages}"] if stages > 1 else [])


def gpu_lines(
    forecasts: Sequence[Forecast], memory: RankMemory, options: PlanOptions, *, vocab_size: int, world_size: int
) -> list[str]:
    """Format a table with a line for each GPU model: run time at the measured rate, and spare or missing memory."""
    settings = forecasts[0].phase.settings
    precision, tokens = _precision(settings), sum(each.iterations * each.sample.tokens for each in forecasts)
    is_measured = precision in MEASURED_SHARE
    header = f"{'bf16 peak':>13}{'tokens/s':>10}{'time':>12}" if is_measured else ""
    lines = [f"{f'{world_size:,} x':<14}{header}  memory, GiB"]
    for gpu in GPUS:
        if gpu.name not in _SHOWN_GPUS or (settings.compute.fp8_format and not _SHOWN_GPUS[gpu.name]):
            continue
        speed = ""
        if is_measured:
            steps = _plan_steps(world_size, forecasts, options, vocab_size=vocab_size, gpu=gpu.name)
            seconds = _run_seconds(forecasts, steps)
            rate = with_prefix(tokens / seconds, "") if seconds else "-"
            speed = f"{gpu.bf16_tflops:>5,.0f} TFLOP/s{rate:>10}{duration(seconds):>12}"
        spare = gpu.memory_gib - memory.total / (1 << 30)
        room = f"fits, {spare:,.1f} free" if spare >= 0 else f"lacks {-spare:,.1f}"
        lines.append(f"{gpu.name:<14}{speed}  {room}")
    note = f"Times are shown for --bf16, and no run in {precision} has been measured."
    if is_measured:
        share, width = _peak_share(settings), settings.model.hidden_size
        source = f"{precision} with 28 x {_WIDE}" if width >= _WIDE else f"bf16 with 12 x {_NARROWEST}"
        if width < _NARROWEST:
            source += "; narrower models have not been measured and may be slower"
        note = (
            f"time: per step {1e3 * FIXED_SECONDS:.0f} ms, FLOP / (GPUs x peak x {percent(share, digits=0)}), and the "
            f"wait for the network. One H200 reached this in {source}. Other GPUs, and several, have not been measured"
        )
    return [*lines, note]


def _precision(settings: Settings) -> str:
    """Return the name of a run's precision. MEASURED_SHARE contains the name if this precision has been measured."""
    compute = settings.compute
    if not settings.training.bf16:
        return "float32"
    if compute.fp8_format is not None:
        return f"FP8 {compute.fp8_recipe}"
    return "bf16 with local layers" if compute.transformer_impl == "local" else "bf16"


def checkpoint_lines(settings: Settings, *, vocab_size: int, done: int) -> list[str]:
    """Format the number and size of checkpoints after iteration `done`. Warn if they do not fit on the disk of --save.

    The disk needs space for one checkpoint more than --keep-last, because a save deletes old checkpoints at its end.
    """
    size, checkpoint = checkpoint_bytes(settings, vocab_size=vocab_size), settings.checkpoint
    last, interval, keep_last = settings.training.train_iters, checkpoint.save_interval, checkpoint.keep_last
    before = done // interval
    saves = len(range((before + 1) * interval, last, interval)) + (done < last)
    most, kept = saves, "all"
    if keep_last is not None:
        most, kept = min(saves, keep_last + 1), f"the last {keep_last}"
        if checkpoint.keep_every is not None:
            multiple = math.lcm(interval, checkpoint.keep_every)
            most += len(range((done // multiple + 1) * multiple, (before + saves - most) * interval + 1, multiple))
            kept += f" and multiples of {checkpoint.keep_every:,}"
    line = (
        f"{saves:,} of {in_bytes(size)}, one every {counted(interval, 'iteration')}, and {kept} are kept: at most "
        f"{most:,} at a time, {in_bytes(most * size)}"
    )
    if checkpoint.save is None:
        return [f"{line}; none is saved without --save"]
    save = Path(checkpoint.save).resolve()
    folder, present = existing_parent(save), map(iteration_of, list_checkpoints(save))
    deleted = sum(keep_last is not None and iteration % (checkpoint.keep_every or last) > 0 for iteration in present)
    free, needed = shutil.disk_usage(folder).free, (most - deleted) * size
    lines = [f"{line}; {in_bytes(free)} free in {folder}"]
    if needed > free:
        lines.append(
            f"warning: {in_bytes(needed)} of checkpoints do not fit into {in_bytes(free)}; set --keep-last, raise "
            "--save-interval, or make room"
        )
    return lines


# ---- communication, and time and price by number of GPUs


def network_lines(settings: Settings, options: PlanOptions, *, vocab_size: int, world_size: int) -> list[str]:
    """Format a rank's traffic per step: a line for each group and operation, and a line with the assumptions."""
    lines = [f"{'per rank and step':<28}{'GB':>9}{'calls':>9}{'ms':>9}"]
    for each in step_traffic(settings, vocab_size=vocab_size, world_size=world_size):
        seconds = traffic_seconds(settings, each, world_size=world_size, network_gbps=options.network_gbps)
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
    """Format a table with a line for each number of GPUs.

    The step time is for the phase with the most FLOPs. Run time and price are sums over all phases.
    """
    main = max(range(len(forecasts)), key=lambda number: forecasts[number].flops * forecasts[number].iterations)
    price_header = "" if options.price is None else f"{'price':>10}"
    lines = [f"{'GPUs':>6}{'micro-batches':>14}{'step':>8}{'network':>9}{'busy':>6}{'time':>13}{price_header}"]
    for gpus in options.gpus or (world_size,):
        planned = _plan_steps(gpus, forecasts, options, vocab_size=vocab_size)
        if not planned:
            lines.append(f"{gpus:>6,}  the global batch is no multiple of the data-parallel ranks")
            continue
        settings, (total, exposed) = planned[main]
        seconds = _run_seconds(forecasts, planned)
        micro_batches = f"{settings.micro_batches_per_rank(gpus):,} x {settings.tokens_per_micro_batch:,}"
        shown_step = f"{total:,.2f} s" if total >= 1 else f"{1e3 * total:,.0f} ms"
        busy = percent(compute_seconds(gpus, settings, forecasts[main].flops) / total, digits=0)
        price = (options.price or 0.0) * gpus * seconds / 3600
        shown_price = "" if options.price is None else f"{price:>10,.{0 if price >= 10 else 2}f}"
        lines.append(
            f"{gpus:>6,}{micro_batches:>14}{shown_step:>8}{percent(exposed / total):>9}{busy:>6}"
            f"{duration(seconds):>13}{shown_price}"
        )
    lines.append(
        f"on {GPU}. micro-batches: number x tokens, per GPU and step; network: share of the step in which only the "
        "network works; busy: share in which the GPU computes. If it is low, use fewer GPUs or a larger "
        "--global-batch-size" + ("" if options.price is None else f". price: GPUs x hours x {options.price:g}")
    )
    return lines


def _plan_steps(
    gpus: int, forecasts: Sequence[Forecast], options: PlanOptions, *, vocab_size: int, gpu: str = GPU
) -> list[tuple[Settings, StepTime]]:
    """Return (settings, iteration time) for each phase, or [] if a global batch cannot be divided among the GPUs."""
    planned = []
    for forecast in forecasts:
        settings = fit_micro_batch(forecast.phase.settings, world_size=gpus)
        if settings is None:
            return []
        step = step_on(
            gpus, settings, forecast.flops, vocab_size=vocab_size, network_gbps=options.network_gbps, gpu=gpu
        )
        planned.append((settings, step))
    return planned


def _run_seconds(forecasts: Sequence[Forecast], planned: Sequence[tuple[Settings, StepTime]]) -> float:
    return sum(each.iterations * step.total for each, (_, step) in zip(forecasts, planned, strict=True))


def step_on(
    gpus: int, settings: Settings, flops: float, *, vocab_size: int, network_gbps: float = 400, gpu: str = GPU
) -> StepTime:
    """Return the iteration time on `gpus` GPUs for `flops` operations and settings from `fit_micro_batch`."""
    busy = compute_seconds(gpus, settings, flops, gpu=gpu)
    step = plan_step(settings, vocab_size=vocab_size, world_size=gpus, compute_seconds=busy, network_gbps=network_gbps)
    return step._replace(total=step.total + FIXED_SECONDS)


def compute_seconds(gpus: int, settings: Settings, flops: float, *, gpu: str = GPU) -> float:
    """Return the seconds that `gpus` GPUs compute for `flops` operations, without communication and FIXED_SECONDS."""
    kind = find_gpu(gpu)
    assert kind is not None, gpu
    return flops / (gpus * kind.bf16_tflops * 1e12 * _peak_share(settings))


def _peak_share(settings: Settings) -> float:
    """Return the share of the bf16 peak that an H200 reached while computing, for this width and precision."""
    share = MEASURED_SHARE[_precision(settings)]
    return share if settings.model.hidden_size >= _WIDE else min(share, _NARROW_SHARE)
