"""Costs of a run as lines of --dry-run: memory of a rank, time on known GPUs, checkpoints on disk."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from megatron_neobert.checkpoint.folder import iteration_of, list_checkpoints
from megatron_neobert.config.schema import Settings
from megatron_neobert.model.flops import checkpoint_bytes
from megatron_neobert.model.gpus import GPUS
from megatron_neobert.planning.memory import RankMemory
from megatron_neobert.runtime.atomic_files import existing_parent
from megatron_neobert.text import counted, duration, in_bytes, percent

_SHOWN_GPUS = ("A100-SXM4-80GB", "H100 80GB HBM3", "H200")
_SHOWN_MFU = (0.1, 0.15, 0.2)  # the paper's own run had about 15 %


def memory_lines(memory: RankMemory, *, stages: int) -> list[str]:
    """Format a line for each part of the memory of the fullest rank."""
    parts = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activations,
        "head, loss": memory.head,
        "at work": memory.work,
        "CUDA, NCCL (assumed)": memory.context,
        "together": memory.total,
    }
    lines = [f"{part:<20}{size / (1 << 30):>10,.2f} GiB" for part, size in parts.items()]
    return lines + ([f"fullest pipeline stage: {memory.stage + 1} of {stages}"] if stages > 1 else [])


def gpu_lines(settings: Settings, memory: RankMemory, *, flops: float, world_size: int) -> list[str]:
    """Format a table of GPUs: the time of the run at some shares of the peak rate, and whether the memory suffices."""
    shares = _SHOWN_MFU if settings.training.bf16 else ()
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
    note = "The paper's own run had about 15 % MFU; measure this machine before you plan with a share."
    lines.append(note if shares else "Times are stated for bfloat16 alone (--bf16).")
    return lines


def kept_checkpoints(settings: Settings, *, first: int, there: Sequence[int]) -> int:
    """Return the number of checkpoints on disk at the fullest moment, the one that is being written among them.

    Args:
        first: The iteration that the run counts on from.
        there: Iterations of the checkpoints in --save.
    """
    checkpoint, last = settings.checkpoint, settings.training.train_iters
    saves = len(there) - (-max(0, last - first) // checkpoint.save_interval)
    if checkpoint.keep_last is None:
        return saves
    kept = checkpoint.keep_last + 1
    if (every := checkpoint.keep_every) is not None:
        kept += last // every - first // every + sum(iteration % every == 0 for iteration in there)
    return min(saves, kept)


def checkpoint_lines(settings: Settings, *, vocab_size: int, first: int) -> list[str]:
    """Format the size and number of the checkpoints, and whether the disk has room for them."""
    size = checkpoint_bytes(settings, vocab_size=vocab_size)
    each = f"{in_bytes(size)} each"
    if settings.checkpoint.save is None:
        return [f"{each}; none is saved without --save"]
    save = Path(settings.checkpoint.save).resolve()
    folder, iterations = existing_parent(save), [iteration_of(one) for one in list_checkpoints(save)]
    free = shutil.disk_usage(folder).free
    kept, there = kept_checkpoints(settings, first=first, there=iterations), len(iterations)
    lines = [
        f"{each}, every {counted(settings.checkpoint.save_interval, 'iteration')}; at most {kept:,} at a time: "
        f"{in_bytes(kept * size)}, {there:,} of them there already; {in_bytes(free)} free in {folder}"
    ]
    more = free // size
    if kept - there > more:
        remedy = "Lower --keep-last, raise --keep-every"
        if there + more < 3:  # --keep-last 2, the least, keeps three while the newest is written
            remedy = "Make room"
        elif settings.checkpoint.keep_last is None:
            remedy = "Add --keep-last 2"
        lines.append(f"warning: no room for more than {more:,} more of them. {remedy}, or --save elsewhere.")
    return lines
