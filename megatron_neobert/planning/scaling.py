"""The lines of the plan about communication, and about the time and price of the run on several numbers of GPUs."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from megatron_neobert.config.cli import PlanOptions
from megatron_neobert.config.schema import Settings
from megatron_neobert.data.batches.windows import masked_capacity
from megatron_neobert.model.gpus import find_gpu
from megatron_neobert.planning.network import (
    GPUS_PER_NODE,
    NVLINK_GB_PER_S,
    REACHED,
    Cluster,
    StepTime,
    plan_step,
    step_traffic,
)
from megatron_neobert.text import percent

GPU = "H100 80GB HBM3"
# Bound of docs/performance.md for this GPU; an H200 reached it. The faster GPUs compute, the more the network matters.
MFU = 0.4


class PhaseCost(NamedTuple):
    """Settings and work of a phase of the run."""

    settings: Settings
    flops: float  # per iteration
    iterations: int


def masked_tokens(settings: Settings) -> int:
    """Return the predicted tokens of a micro-batch on one context-parallel rank, padded as for a GPU."""
    tokens = settings.tokens_per_micro_batch // settings.parallel.context_parallel_size
    return masked_capacity(tokens, probability=settings.data.predicted_share)


def fit_micro_batch(phase: PhaseCost, gpus: int) -> PhaseCost | None:
    """Return the phase with the largest micro-batch, up to its own, that divides the global batch on these GPUs.

    Return None if the global batch is not a multiple of the data-parallel ranks.
    """
    training, ranks_per_model = phase.settings.training, phase.settings.parallel.ranks_per_model
    replicas = gpus // ranks_per_model
    if gpus % ranks_per_model or training.global_batch_size % replicas:
        return None
    share = training.global_batch_size // replicas
    sizes = range(min(training.micro_batch_size, share), 0, -1)
    fitting = next(size for size in sizes if share % size == 0)
    return phase._replace(settings=phase.settings.with_section("training", micro_batch_size=fitting))


def step_on(
    gpus: int, phase: PhaseCost, *, vocab_size: int, network_gbps: float = 400, overlaps: bool = True, mfu: float = MFU
) -> StepTime:
    """Return the time of an iteration of a phase whose micro-batches fit, on H100 GPUs at an assumed MFU.

    Args:
        overlaps: False for --no-overlap-grad-reduce, whatever the settings say.
    """
    gpu = find_gpu(GPU)
    assert gpu is not None, GPU
    settings = phase.settings
    if not overlaps:
        settings = settings.with_section("parallel", overlap_grad_reduce=False)
    return plan_step(
        settings,
        vocab_size=vocab_size,
        world_size=gpus,
        masked_tokens=masked_tokens(settings),
        compute_seconds=phase.flops / (gpus * gpu.bf16_tflops * 1e12 * mfu),
        network_gbps=network_gbps,
    )


def network_lines(settings: Settings, options: PlanOptions, *, vocab_size: int, world_size: int) -> list[str]:
    """Format the traffic of a rank per step: a line per group and operation, and a line with the assumptions."""
    cluster = Cluster(settings, world_size=world_size, network_gbps=options.network_gbps)
    lines = [f"{'per rank and step':<28}{'GB':>9}{'calls':>9}{'ms':>9}"]
    for each in step_traffic(
        settings, vocab_size=vocab_size, world_size=world_size, masked_tokens=masked_tokens(settings)
    ):
        milliseconds = 1e3 * each.calls * cluster.seconds(each.group, each.operation, each.bytes / each.calls)
        name = f"{each.group:<12}{each.operation}"
        lines.append(f"{name:<28}{each.bytes / 1e9:>9,.2f}{each.calls:>9,}{milliseconds:>9,.1f}")
    lines.append(
        f"assumed: nodes of {GPUS_PER_NODE} GPUs with {NVLINK_GB_PER_S} GB/s NVLink, {options.network_gbps:g} Gb/s per "
        f"GPU between nodes, {percent(REACHED, digits=0)} of both reached, latencies of NCCL"
    )
    return lines


def scaling_lines(phases: Sequence[PhaseCost], options: PlanOptions, *, vocab_size: int, world_size: int) -> list[str]:
    """Format a table with a line per number of GPUs, and a warning if the host limits the speed.

    Steps are those of the phase with the most FLOPs; hours and price are those of all phases.
    """
    price = "" if options.price is None else f"{'price':>10}"
    lines = [f"{'GPUs':>6}{'micro-batches':>14}{'step':>8}{'network':>9}{'serial':>8}{'busy':>6}{'hours':>7}{price}"]
    warnings = []
    for gpus in options.gpus or (world_size,):
        fitted = [fit_micro_batch(phase, gpus) for phase in phases]
        if None in fitted:
            lines.append(f"{gpus:>6,}  the global batch is no multiple of the data-parallel ranks")
            continue
        fitting = [phase for phase in fitted if phase is not None]
        step = partial(step_on, gpus, vocab_size=vocab_size, network_gbps=options.network_gbps)
        main = max(fitting, key=lambda phase: phase.flops * phase.iterations)
        hours = sum(phase.iterations * step(phase).total for phase in fitting) / 3600
        lines.append(_row(gpus, main.settings, step(main), step(main, overlaps=False), hours, options.price))
        warnings += _host_warnings(gpus, main.settings, step(main))
    lines.append(
        f"{GPU} at {percent(MFU, digits=0)} MFU. network: share of the step in which only the network works; serial: "
        "the same with --no-overlap-grad-reduce; busy: share in which the GPU computes"
    )
    return lines + warnings[:1]


def _row(
    gpus: int, settings: Settings, step: StepTime, serial_step: StepTime, hours: float, price: float | None
) -> str:
    micro_batches = f"{settings.micro_batches_per_rank(gpus):,} x {settings.tokens_per_micro_batch:,}"
    duration = f"{step.total:,.2f} s" if step.total >= 1 else f"{1e3 * step.total:,.0f} ms"
    shares = (f"{percent(each.exposed / each.total)}" for each in (step, serial_step))
    shown_hours = f"{hours:,.0f}" if hours >= 100 else f"{hours:.1f}"
    shown_price = "" if price is None else f"{price * gpus * hours:>10,.0f}"
    return (
        f"{gpus:>6,}{micro_batches:>14}{duration:>8}{'{:>9}{:>8}'.format(*shares)}"
        f"{percent(step.efficiency, digits=0):>6}{shown_hours:>7}{shown_price}"
    )


def _host_warnings(gpus: int, settings: Settings, step: StepTime) -> list[str]:
    """Return a warning if launching the kernels of a micro-batch takes longer than computing them, otherwise []."""
    computing = step.compute / settings.micro_batches_per_rank(gpus)
    if step.host_per_micro_batch <= computing:
        return []
    return [
        f"warning: on {gpus:,} GPUs the host is the limit: it launches the kernels of a micro-batch in about "
        f"{1e3 * step.host_per_micro_batch:.0f} ms, and the GPU computes them in {1e3 * computing:.0f} ms. Use "
        "--cuda-graph-impl full_iteration, fewer GPUs or a larger --global-batch-size"
    ]
