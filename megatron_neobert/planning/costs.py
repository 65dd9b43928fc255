"""What a run costs, in the words of --dry-run: memory of a rank, time on known GPUs, checkpoints on disk."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from megatron_neobert.checkpoint.folder import iteration_of, list_checkpoints
from megatron_neobert.config.schema import Settings
from megatron_neobert.data.batches.rows import usual_masked
from megatron_neobert.model.flops import checkpoint_bytes
from megatron_neobert.model.gpus import GPUS
from megatron_neobert.planning.memory import Kernels, RankMemory, plan_memory
from megatron_neobert.runtime.atomic_files import existing_parent
from megatron_neobert.text import counted, duration, in_bytes, percent

_SHOWN_GPUS = ("A100-SXM4-80GB", "H100 80GB HBM3", "H200")
_SHOWN_MFU = (0.1, 0.15, 0.2)  # the paper's own run had about 15 %
_KERNEL_NAMES: dict[Kernels, str] = {
    "transformer_engine": "Transformer Engine",
    "gpu": "torch on GPU",
    "cpu": "torch on CPU",
}


def plan_memories(settings: Settings, *, vocab_size: int, world_size: int) -> dict[Kernels, RankMemory]:
    """The fullest rank with each kind of layers that these settings can end up with; the likeliest first."""
    compute, slots = settings.compute, settings.tokens_per_micro_batch // settings.parallel.context_parallel_size
    kinds: list[Kernels] = []
    if compute.transformer_impl == "transformer_engine" or (
        compute.transformer_impl == "auto" and settings.training.bf16
    ):
        kinds.append("transformer_engine")
    if compute.transformer_impl != "transformer_engine":
        kinds += ["gpu", "cpu"]
    probability = settings.data.mask_prob
    return {
        kernels: plan_memory(
            settings,
            vocab_size=vocab_size,
            world_size=world_size,
            # A GPU gets batches of one shape, with room for nearly every number of masked tokens.
            masked_tokens=(
                round(slots * probability) if kernels == "cpu" else usual_masked(slots, probability=probability)
            ),
            kernels=kernels,
        )
        for kernels in kinds
    }


def memory_lines(memories: dict[Kernels, RankMemory], *, stages: int) -> list[str]:
    """Format a table with a column for each kind of layers and a line for each part; 68 characters wide at most."""
    parts = {
        "weights": [memory.weights for memory in memories.values()],
        "gradients": [memory.gradients for memory in memories.values()],
        "optimizer": [memory.optimizer for memory in memories.values()],
        "activations": [memory.activations for memory in memories.values()],
        "head, loss": [memory.head for memory in memories.values()],
        "at work": [memory.work for memory in memories.values()],
        "CUDA, NCCL (assumed)": [memory.context for memory in memories.values()],
        "together": [memory.total for memory in memories.values()],
    }
    largest = max(memory.total - memory.context for memory in memories.values())
    unit, divisor = ("GiB", 1 << 30) if largest >= 1 << 30 else ("MiB", 1 << 20)
    names = [_KERNEL_NAMES[kernels] for kernels in memories]
    widths = [len(name) + 2 for name in names]
    lines = [f"{f'{unit}, fullest rank':<20}" + "".join(f"  {name}" for name in names)]
    for part, sizes in parts.items():
        cells = (f"{size / divisor:>{width},.2f}" for size, width in zip(sizes, widths, strict=True))
        lines.append(f"{part:<20}" + "".join(cells))
    if stages > 1:
        places = ", ".join(f"{memory.stage + 1}" for memory in memories.values())
        lines.append(f"{'pipeline stage':<20}  {places} of {stages}")
    return lines


def gpu_lines(settings: Settings, memories: dict[Kernels, RankMemory], *, flops: float, world_size: int) -> list[str]:
    """Format a table of GPUs: the time of the run at some shares of the peak rate, and whether the memory suffices."""
    memory = next(iter(memories.values()))
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
    """Checkpoints on disk at the fullest moment, the one that is being written among them.

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
    """How large, how many, and whether the disk has room for them."""
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
