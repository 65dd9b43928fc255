"""The plan of a run that --dry-run prints. Needs no GPU and does not import torch.

Documents, packing efficiency and epochs come from whole windows, packed as in training; the other figures come from the
settings. Times are printed for several values of MFU, because only a run can measure its MFU.
"""

import itertools
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megatron_neobert.checkpoint.start import first_iteration
from megatron_neobert.config.cli import PlanOptions
from megatron_neobert.config.phases import Phase, resolve_phases
from megatron_neobert.config.schema import Settings
from megatron_neobert.data.batches.inputs import Inputs, batch_settings, open_phases
from megatron_neobert.data.batches.windows import count_windows, documents_in_window, pack_window
from megatron_neobert.model.flops import checkpoint_bytes, count_parameters, training_flops_per_token
from megatron_neobert.model.gpus import GPUS
from megatron_neobert.planning.memory import RankMemory, plan_memory
from megatron_neobert.planning.scaling import MFU, PhaseCost, masked_tokens, network_lines, scaling_lines
from megatron_neobert.runtime.atomic_files import existing_parent
from megatron_neobert.text import approximate, counted, duration, in_bytes, percent

_INDENT = 12  # columns for the name of a section
# Terminals have at least 80 columns.
_WRAPPER = textwrap.TextWrapper(
    width=80 - _INDENT, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
)
_MOST_WINDOWS = 8  # 32,768 documents
_LARGE_TRUNCATION = 0.1  # share of truncated tokens from which on the plan warns
_MANY_EPOCHS = 5  # epochs above which the plan warns
_CPU_FLOPS = 50e9  # FLOP/s of a core, assumed for the time of an iteration on a CPU
_SHOWN_GPUS = ("A100-SXM4-80GB", "H100 80GB HBM3", "H200")
_SHOWN_MFU = (0.15, 0.25, MFU)  # published runs: docs/performance.md


@dataclass(frozen=True)
class IterationSample:
    """Averages over iterations."""

    documents: float  # a document that is cut into several segments counts once
    tokens: float  # without padding, including [CLS] and [SEP]
    packing_efficiency: float  # tokens as a share of the token capacity
    truncated: float  # share of the documents' tokens that are never read
    attended_tokens: float  # tokens that the average token attends to
    token_shares: tuple[float, ...]  # share of the tokens per component of --data-path
    epochs: tuple[float, ...]  # epochs per component


@dataclass(frozen=True)
class Forecast:
    """Figures of one phase, without the iterations that are done."""

    phase: Phase  # with the remaining iterations; `last` is `first` - 1 if none remain
    inputs: Inputs
    sample: IterationSample
    memory: RankMemory
    flops: float  # per iteration

    @property
    def iterations(self) -> int:
        """Number of remaining iterations."""
        return (self.phase.last or 0) - self.phase.first + 1


def forecast_phases(
    settings: Settings, inputs: Sequence[Inputs], *, done: int, world_size: int, windows: int = _MOST_WINDOWS
) -> list[Forecast]:
    """Return the figures of the phases that remain after `done` iterations, or of the last phase if none remains."""
    end, phases, forecasts = settings.training.train_iters, resolve_phases(settings), []
    remaining = [phase for phase in phases if phase.first <= end and (phase.last is None or phase.last > done)]
    for phase in remaining or phases[-1:]:
        phase_inputs, sizes = inputs[phase.number], {"vocab_size": inputs[phase.number].tokenizer.vocab_size}
        sample = sample_iteration(phase.settings, phase_inputs, windows=windows)
        per_token = training_flops_per_token(phase.settings, document_tokens=sample.attended_tokens, **sizes)
        masked = masked_tokens(phase.settings)
        memory = plan_memory(phase.settings, world_size=world_size, masked_tokens=masked, **sizes)
        first, last = max(phase.first, done + 1), end if phase.last is None else min(phase.last, end)
        phase = replace(phase, first=first, last=max(last, first - 1))
        forecasts.append(Forecast(phase, phase_inputs, sample, memory, per_token * sample.tokens))
    return forecasts


def start_warnings(
    settings: Settings, inputs: Sequence[Inputs], *, world_size: int, cpu_cores: int | None
) -> list[str]:
    """Return the plan's warnings about the data of a fresh run, and about an iteration of over a minute on a CPU.

    Only first windows are sampled, which the run reads at its start anyway.

    Args:
        inputs: Data of each phase.
        cpu_cores: Number of cores of a run on the CPU; None for a run on GPUs.
    """
    forecasts = forecast_phases(settings, inputs, done=0, world_size=world_size, windows=1)
    lines = [
        line for each in forecasts for line in (*iteration_lines(each, world_size=world_size), *corpus_lines(each))
    ]
    warnings = [
        line for line in (*lines, *validation_lines(settings, inputs[0], windows=1)) if line.startswith("warning: ")
    ]
    seconds = forecasts[0].flops / (_CPU_FLOPS * cpu_cores) if cpu_cores else 0.0
    if seconds > 60:
        warnings.append(
            f"warning: about {duration(seconds)} per iteration at an assumed {_CPU_FLOPS / 1e9:.0f} GFLOP/s per core "
            f"({counted(cpu_cores or 0, 'core')}); on a CPU use a small recipe such as --config tiny"
        )
    return list(dict.fromkeys(warnings))


def print_plan(settings: Settings, options: PlanOptions | None = None, *, world_size: int) -> int:
    """Print the plan of a run on `world_size` ranks and return exit code 0. `settings` must fit this number of ranks.

    Raises:
        ConfigError, MissingInputError, DataError, StorageError: The inputs cannot be opened.
    """
    inputs = open_phases(settings)
    vocab_size, done = inputs[0].tokenizer.vocab_size, first_iteration(settings.checkpoint)
    forecasts = forecast_phases(settings, inputs, done=done, world_size=world_size)
    fullest = max(forecasts, key=lambda forecast: forecast.memory.total)
    sections = [
        ("model", [model_line(settings, vocab_size)]),
        ("ranks", [ranks_line(settings, world_size)]),
    ]
    for forecast in forecasts:
        if len(forecasts) > 1:
            sections.append((f"phase {forecast.phase.number}", phase_lines(forecast, settings)))
        sections.append(("iteration", iteration_lines(forecast, world_size=world_size)))
        sections.append(("corpus", corpus_lines(forecast)))
    flops = sum(forecast.iterations * forecast.flops for forecast in forecasts)
    phase_costs = [PhaseCost(forecast.phase.settings, forecast.flops, forecast.iterations) for forecast in forecasts]
    options, sizes = options or PlanOptions(), {"vocab_size": vocab_size, "world_size": world_size}
    sections += [
        ("validation", validation_lines(settings, inputs[0])),
        ("run", run_lines(settings, forecasts, done=done)),
        ("memory", memory_lines(fullest.memory, stages=settings.parallel.pipeline_model_parallel_size)),
        ("GPUs", gpu_lines(settings, fullest.memory, flops=flops, world_size=world_size)),
        *([("network", network_lines(fullest.phase.settings, options, **sizes))] if world_size > 1 else []),
        *([("scaling", scaling_lines(phase_costs, options, **sizes))] if settings.training.bf16 else []),
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
        f"{percent(tokens, digits=2)} of the tokens, about {approximate(epochs * iterations)} epochs of {line}"
        for line, tokens, epochs in zip(forecast.inputs.description, sample.token_shares, sample.epochs, strict=True)
    ]
    if (most := max(sample.epochs) * iterations) > _MANY_EPOCHS:
        lines.append(
            f"warning: documents are read up to {approximate(most)} times; repetitions beyond the first few add "
            "little. Use fewer --train-iters or more data"
        )
    return lines


def validation_lines(settings: Settings, inputs: Inputs, *, windows: int = _MOST_WINDOWS) -> list[str]:
    """Return a warning for each curve whose documents a validation repeats. `inputs` are those of the first phase."""
    lines, iterations = [], settings.training.eval_iters
    for name, sources in inputs.validation.items() if iterations else ():
        sample = sample_iteration(settings, replace(inputs, training=sources), windows=windows)
        if max(sample.epochs) * iterations > 1:
            held_out = "--split holds out" if name == "split" else f"{name} has"
            lines.append(
                f"warning: a validation (--eval-iters {iterations}) reads about "
                f"{approximate(iterations * sample.documents)} documents, but {held_out} only "
                f"{sum(len(source.documents) for source in sources):,}, so documents are repeated"
            )
    return lines


def phase_lines(forecast: Forecast, settings: Settings) -> list[str]:
    phase = forecast.phase
    flags = settings.training.phases[phase.number - 1].flags if phase.number else ""
    tokens = forecast.iterations * forecast.sample.tokens
    return [
        f"iterations {phase.first:,} to {phase.last:,}: {tokens:.3e} tokens of documents",
        *([flags] if flags else []),
        flops_line([forecast]),
    ]


def flops_line(forecasts: Sequence[Forecast]) -> str:
    """Format the FLOPs of all remaining iterations. A single phase also gets its FLOPs per token and per iteration."""
    total = f"{sum(forecast.iterations * forecast.flops for forecast in forecasts):.3e}"
    if len(forecasts) > 1:
        return f"{total} FLOPs in all"
    flops = forecasts[0].flops
    return f"{flops / forecasts[0].sample.tokens:.3e} FLOPs per token, {flops:.3e} per iteration, {total} in all"


def run_lines(settings: Settings, forecasts: Sequence[Forecast], *, done: int) -> list[str]:
    iterations = counted(settings.training.train_iters, "iteration") + (f", {done:,} of them done" if done else "")
    tokens = sum(forecast.iterations * forecast.sample.tokens for forecast in forecasts)
    return [f"{iterations}: {tokens:.3e} tokens of documents{' to go' if done else ''}", flops_line(forecasts)]


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


def gpu_lines(settings: Settings, memory: RankMemory, *, flops: float, world_size: int) -> list[str]:
    """Format a table of GPUs: the time for `flops` operations at several MFU, and whether the memory suffices."""
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
    note = f"The paper's run had about 15 % MFU; {percent(MFU, digits=0)} is the bound derived in docs/performance.md."
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


# ---- averages over iterations


def sample_iteration(settings: Settings, inputs: Inputs, *, windows: int = _MOST_WINDOWS) -> IterationSample:
    """Pack the first `windows` windows (blocks of documents) of epoch 0, and return averages per iteration.

    Only lengths are read, which takes milliseconds. A shorter epoch is packed as a whole; the first windows of a longer
    epoch or of a blend are a random sample, because documents are shuffled.
    """
    batch, sources = batch_settings(settings, inputs.tokenizer), inputs.training
    sequences, squares, offered_tokens, text_tokens = 0, 0, 0, 0
    documents_c, tokens_c = np.zeros(len(sources)), np.zeros(len(sources))
    for window in range(min(count_windows(sources, batch), windows)):
        offered = documents_in_window(sources, batch, epoch=0, window=window)
        packed = pack_window(sources, batch, epoch=0, window=window)
        segments, packed_lengths_n = packed.segments, packed.segments.packed_lengths_n
        # A document that is cut has one first segment.
        is_first_n = segments.has_cls_n & (segments.starts_n == 0)
        sequences += len(packed)
        offered_tokens += int(offered.lengths_n.sum())
        text_tokens += int(segments.lengths_n.sum())
        documents_c += np.bincount(segments.components_n[is_first_n], minlength=len(sources))
        tokens_c += np.bincount(segments.components_n, weights=packed_lengths_n, minlength=len(sources))
        # In the concatenated layout, tokens attend to their whole packed sequence.
        is_packed = batch.batch_layout == "packed"
        attended = packed_lengths_n if is_packed else np.add.reduceat(packed_lengths_n, packed.offsets[:-1])
        squares += int(attended @ attended)
    share = batch.global_batch_size / sequences  # an iteration as a share of these windows
    documents, tokens = float(documents_c.sum()), float(tokens_c.sum())
    sizes = [len(source.documents) for source in sources]
    return IterationSample(
        documents=share * documents,
        tokens=share * tokens,
        packing_efficiency=share * tokens / settings.tokens_per_iteration,
        truncated=1 - text_tokens / offered_tokens,
        attended_tokens=squares / tokens,
        token_shares=tuple((tokens_c / tokens).tolist()),
        epochs=tuple((share * documents_c / sizes).tolist()),
    )
