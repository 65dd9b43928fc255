"""The lines of the plan about communication, and about the time and price of the run on several numbers of GPUs."""

from collections.abc import Sequence

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
# Bound of docs/performance.md for this GPU. The faster a GPU computes, the more the network matters.
MFU = 0.4


def masked_tokens(settings: Settings) -> int:
    """Return the masked tokens of a micro-batch on one context-parallel rank. On a GPU, batches have fixed shapes."""
    tokens = settings.tokens_per_micro_batch // settings.parallel.context_parallel_size
    return masked_capacity(tokens, probability=settings.data.mask_prob)


def fit_micro_batch(settings: Settings, world_size: int) -> Settings | None:
    """Return the settings with the largest micro-batch, up to their own, that divides the global batch on these ranks.

    Return None if the global batch is not a multiple of the data-parallel ranks.
    """
    replicas, rest = divmod(world_size, settings.parallel.ranks_per_model)
    if rest or not replicas or settings.training.global_batch_size % replicas:
        return None
    share = settings.training.global_batch_size // replicas
    sizes = range(min(settings.training.micro_batch_size, share), 0, -1)
    return settings.with_section("training", micro_batch_size=next(size for size in sizes if share % size == 0))


def step_on(
    settings: Settings, *, vocab_size: int, world_size: int, flops: float, network_gbps: float, mfu: float = MFU
) -> StepTime:
    """Return the time of a step of `flops` operations, over all ranks, on H100 GPUs at an assumed MFU."""
    gpu = find_gpu(GPU)
    assert gpu is not None, GPU
    return plan_step(
        settings,
        vocab_size=vocab_size,
        world_size=world_size,
        masked_tokens=masked_tokens(settings),
        compute_seconds=flops / (world_size * gpu.bf16_tflops * 1e12 * mfu),
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


def scaling_lines(
    runs: Sequence[tuple[Settings, float, int]], options: PlanOptions, *, vocab_size: int, world_size: int
) -> list[str]:
    """Format a table with a line per number of GPUs, and a warning if the host limits the speed.

    Args:
        runs: Settings, FLOPs per iteration and remaining iterations of each phase. Steps are those of the phase with
            the most FLOPs, hours and price are those of all phases.
    """
    main = max(runs, key=lambda run: run[1] * run[2])[0]
    price = f"{'price':>11}" if options.price is not None else ""
    lines = [f"{'GPUs':>6}{'micro-batches':>15}{'step':>9}{'network':>9}{'computes':>10}{'hours':>8}{price}"]
    warning = ""
    for gpus in options.gpus or (world_size,):
        seconds, shown = 0.0, None
        for settings, flops, iterations in runs:
            fitted = fit_micro_batch(settings, gpus)
            if fitted is None:
                break
            step = step_on(
                fitted, vocab_size=vocab_size, world_size=gpus, flops=flops, network_gbps=options.network_gbps
            )
            seconds += iterations * step.total
            if settings is main:
                shown = fitted, step
        else:
            assert shown is not None
            lines.append(_row(*shown, options, gpus=gpus, hours=seconds / 3600))
            warning = warning or _host_warning(*shown, gpus=gpus)
            continue
        lines.append(f"{gpus:>6,}  the global batch is no multiple of the data-parallel ranks")
    lines.append(
        f"{GPU} at {percent(MFU, digits=0)} MFU; network: share of the step in which only the network works, with "
        "overlap and without"
    )
    return lines + ([warning] if warning else [])


def _row(settings: Settings, step: StepTime, options: PlanOptions, *, gpus: int, hours: float) -> str:
    micro_batches = f"{settings.micro_batches_per_rank(gpus):,} x {settings.tokens_per_micro_batch:,}"
    duration = f"{step.total:,.2f} s" if step.total >= 1 else f"{1e3 * step.total:,.0f} ms"
    price = "" if options.price is None else f"{options.price * gpus * hours:>11,.0f}"
    network = f"{step.exposed / step.total:.1%}"
    return f"{gpus:>6,}{micro_batches:>15}{duration:>9}{network:>9}{step.efficiency:>10.0%}{hours:>8,.0f}{price}"


def _host_warning(settings: Settings, step: StepTime, *, gpus: int) -> str:
    """Return a warning if launching the kernels of a micro-batch takes longer than computing them, otherwise ""."""
    computing = step.compute / settings.micro_batches_per_rank(gpus)
    if step.host_per_micro_batch <= computing:
        return ""
    return (
        f"warning: from {gpus:,} GPUs on, the host is the limit: it launches the kernels of a micro-batch in about "
        f"{1e3 * step.host_per_micro_batch:.0f} ms, which the GPU computes in {1e3 * computing:.0f} ms. Use fewer GPUs "
        "or a larger --global-batch-size"
    )
