"""The plan of a run, by arithmetic: the answer to --dry-run. Needs no GPU and does not import torch.

Documents, packing efficiency and epochs come from whole windows of rows, packed as training packs them; everything else
from the settings. Times are given for several shares of a GPU's peak rate, because only a run shows its own share.
"""

import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megatron_neobert.checkpoint.start import first_iteration
from megatron_neobert.config.phases import Phase, resolve_phases
from megatron_neobert.config.schema import Settings
from megatron_neobert.data.batches.inputs import Inputs, batch_settings, open_phases
from megatron_neobert.data.batches.order import COMPONENT_SHIFT
from megatron_neobert.data.batches.rows import count_windows, documents_in_window, pack_window, usual_masked
from megatron_neobert.model.flops import checkpoint_bytes, count_parameters, training_flops_per_token
from megatron_neobert.model.gpus import GPUS
from megatron_neobert.planning.memory import RankMemory, plan_memory
from megatron_neobert.runtime.atomic_files import existing_parent
from megatron_neobert.text import counted, duration, in_bytes, percent

_INDENT = 12  # columns for a line's name
_COLUMNS = 80  # of a terminal
_MOST_WINDOWS = 8  # 32,768 documents
_LARGE_CUT = 0.1  # share of tokens that are never read
_MANY_EPOCHS = 5
_SHOWN_GPUS = ("A100-SXM4-80GB", "H100 80GB HBM3", "H200")
_SHOWN_MFU = (0.1, 0.15, 0.2)  # the paper's own run had about 15 %


@dataclass(frozen=True)
class IterationSample:
    """An iteration, on average."""

    documents: float  # one that is cut into several counts once
    tokens: float  # of documents, [CLS] and [SEP] included
    packing_efficiency: float  # share of the token capacity that holds one
    truncated: float  # share of the documents' tokens that no row has room for
    tokens_of_a_tokens_document: float  # how many tokens the average token attends to
    token_shares: tuple[float, ...]  # of each component
    epochs: tuple[float, ...]


@dataclass(frozen=True)
class Forecast:
    """Figures of the iterations of a phase that are still to be trained."""

    phase: Phase  # cut to these iterations; none are left where `last` is before `first`
    inputs: Inputs
    sample: IterationSample
    memory: RankMemory
    flops: float  # of an iteration

    @property
    def left(self) -> int:
        """Iterations."""
        return (self.phase.last or 0) - self.phase.first + 1


def forecast_phase(phase: Phase, inputs: Inputs, *, first: int, world_size: int) -> Forecast:
    """Return the figures of a phase of which `first` iterations of the run are done."""
    settings, vocab_size = phase.settings, inputs.tokenizer.vocab_size
    begin, end = max(phase.first, first + 1), settings.training.train_iters
    last = end if phase.last is None else min(phase.last, end)
    sample = sample_iteration(settings, inputs)
    per_token = training_flops_per_token(
        settings, vocab_size=vocab_size, document_tokens=sample.tokens_of_a_tokens_document
    )
    slots = settings.tokens_per_micro_batch // settings.parallel.context_parallel_size
    # A GPU gets batches of one shape, with room for nearly every number of masked tokens.
    masked = usual_masked(slots, probability=settings.data.mask_prob)
    memory = plan_memory(settings, vocab_size=vocab_size, world_size=world_size, masked_tokens=masked)
    phase = replace(phase, first=begin, last=max(last, begin - 1))
    return Forecast(phase, inputs, sample, memory, per_token * sample.tokens)


def print_plan(settings: Settings, *, world_size: int) -> int:
    """Print the plan of a legal run and return 0."""
    inputs = open_phases(settings)
    vocab_size, first = inputs[0].tokenizer.vocab_size, first_iteration(settings.checkpoint)
    last, phases = settings.training.train_iters, resolve_phases(settings)
    left = [phase for phase in phases if phase.first <= last and (phase.last is None or phase.last > first)]
    forecasts = [
        forecast_phase(phase, inputs[phase.number], first=first, world_size=world_size) for phase in left or phases[-1:]
    ]
    fullest = max(forecasts, key=lambda forecast: forecast.memory.total)
    sections = [
        ("model", [model_line(settings, vocab_size)]),
        ("ranks", [describe_ranks(settings, world_size)]),
    ]
    for forecast in forecasts:
        if len(forecasts) > 1:
            sections.append((f"phase {forecast.phase.number}", phase_lines(forecast, settings)))
        sections.append(("iteration", iteration_lines(forecast, world_size=world_size)))
        sections.append(("corpus", corpus_lines(forecast.inputs, forecast.sample, left=forecast.left)))
    flops = sum(forecast.left * forecast.flops for forecast in forecasts)
    sections += [
        ("run", run_lines(settings, forecasts, first=first)),
        ("memory", memory_lines(fullest.memory, stages=settings.parallel.pipeline_model_parallel_size)),
        ("GPUs", gpu_lines(settings, fullest.memory, flops=flops, world_size=world_size)),
        ("checkpoints", checkpoint_lines(settings, vocab_size=vocab_size)),
    ]
    for name, lines in sections:
        folded = [part for line in lines for part in _fold(line)]
        for label, line in zip([name, *[""] * len(folded)], folded, strict=False):
            print(f"{label:<{_INDENT}}{line}".rstrip())
    return 0


# ---- lines


def model_line(settings: Settings, vocab_size: int) -> str:
    model, count = settings.model, count_parameters(settings.model, vocab_size=vocab_size)
    padded = model.padded_vocab_size(vocab_size, tensor_parallel=settings.parallel.tensor_model_parallel_size)
    return (
        f"parameters {count.total:,} ({count.blocks:,} in {model.num_layers} layers of width {model.hidden_size:,}), "
        f"vocabulary {vocab_size:,} (padded to {padded:,})"
    )


def describe_ranks(settings: Settings, world_size: int) -> str:
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
        f"{training.global_batch_size:,} rows x {data.seq_length:,} tokens = {settings.tokens_per_iteration:,} tokens, "
        f"in {micro_batches} of {counted(training.micro_batch_size, 'row')} per rank",
        f"about {sample.documents:,.{0 if sample.documents >= 10 else 1}f} documents of {mean:,.0f} tokens; packing "
        f"efficiency {percent(sample.packing_efficiency, digits=2)}",
    ]
    if sample.truncated >= 0.0005:
        warning = "warning: " if sample.truncated >= _LARGE_CUT else ""
        lines.append(
            f"{warning}{percent(sample.truncated)} of the tokens are never read, because long documents are cut at "
            f"{settings.data.seq_length:,}; --long-documents chunk reads them"
        )
    return lines


def corpus_lines(inputs: Inputs, sample: IterationSample, *, left: int) -> list[str]:
    lines = [
        f"{percent(tokens, digits=2)} of the tokens, about {epochs * left:,.2f} epochs of {line}"
        for line, tokens, epochs in zip(inputs.description, sample.token_shares, sample.epochs, strict=True)
    ]
    if (most := max(sample.epochs) * left) > _MANY_EPOCHS:
        lines.append(
            f"warning: documents are read up to {most:,.0f} times; repetitions beyond the first few add little. "
            "Use fewer --train-iters or more data"
        )
    return lines


def phase_lines(forecast: Forecast, settings: Settings) -> list[str]:
    phase = forecast.phase
    flags = settings.training.phases[phase.number - 1].flags if phase.number else ""
    tokens = forecast.left * forecast.sample.tokens
    return [
        f"iterations {phase.first:,} to {phase.last:,}: {tokens:.3e} tokens of documents",
        *([flags] if flags else []),
        flops_line(forecast.flops, forecast.sample.tokens, left=forecast.left),
    ]


def flops_line(flops: float, tokens: float, *, left: int) -> str:
    return f"{flops / tokens:.3e} FLOPs per token, {flops:.3e} per iteration, {flops * left:.3e} in all"


def run_lines(settings: Settings, forecasts: Sequence[Forecast], *, first: int) -> list[str]:
    done = f", {first:,} of them done" if first else ""
    tokens = sum(one.left * one.sample.tokens for one in forecasts)
    flops = f"{sum(one.left * one.flops for one in forecasts):.3e} FLOPs in all"
    if len(forecasts) == 1:
        flops = flops_line(forecasts[0].flops, forecasts[0].sample.tokens, left=forecasts[0].left)
    return [
        f"{counted(settings.training.train_iters, 'iteration')}{done}: {tokens:.3e} tokens of documents"
        f"{' to go' if first else ''}",
        flops,
    ]


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
    lines.append(
        "The paper's own run had about 15 % MFU." if shares else "Times are stated for bfloat16 alone (--bf16)."
    )
    return lines


def checkpoint_lines(settings: Settings, *, vocab_size: int) -> list[str]:
    """Format the size of a checkpoint and the number of them that the disk has room for."""
    size, checkpoint = checkpoint_bytes(settings, vocab_size=vocab_size), settings.checkpoint
    if checkpoint.save is None:
        return [f"{in_bytes(size)} each; none is saved without --save"]
    folder = existing_parent(Path(checkpoint.save).resolve())
    free = shutil.disk_usage(folder).free
    kept = "all are kept" if checkpoint.keep_last is None else f"the last {checkpoint.keep_last} are kept"
    return [
        f"{in_bytes(size)} each, every {counted(checkpoint.save_interval, 'iteration')}; {kept}; {in_bytes(free)} free "
        f"in {folder}, which is room for {free // size:,}"
    ]


# ---- what an iteration reads


def sample_iteration(settings: Settings, inputs: Inputs) -> IterationSample:
    """Pack windows as training packs them; lengths alone are read, no token, so this takes milliseconds.

    An epoch of a few windows is packed entirely; of a longer one, and of a blend, the first windows are a sample of
    all, since documents are shuffled.
    """
    decisive, sources = batch_settings(settings, inputs.tokenizer), inputs.training
    rows, squares, given, read = 0, 0, 0, 0
    documents_c, tokens_c = np.zeros(len(sources)), np.zeros(len(sources))
    for window in range(min(count_windows(sources, decisive), _MOST_WINDOWS)):
        given += int(documents_in_window(sources, decisive, epoch=0, window=window)[2].sum())
        packed = pack_window(sources, decisive, epoch=0, window=window)
        segments, slots_n = packed.segments, packed.segments.slots_n
        components_n = segments.documents_n >> COMPONENT_SHIFT
        begins_n = segments.has_cls_n & (segments.starts_n == 0)  # once a document, however it is cut
        rows += len(packed)
        read += int(segments.lengths_n.sum())
        documents_c += np.bincount(components_n[begins_n], minlength=len(sources))
        tokens_c += np.bincount(components_n, weights=slots_n, minlength=len(sources))
        # A concatenated row is one document to attention.
        together = slots_n if decisive.batch_layout == "packed" else np.add.reduceat(slots_n, packed.row_offsets[:-1])
        squares += int(together @ together)
    share = decisive.global_batch_size / rows  # of these windows
    documents, tokens = float(documents_c.sum()), float(tokens_c.sum())
    return IterationSample(
        documents=share * documents,
        tokens=share * tokens,
        packing_efficiency=share * tokens / settings.tokens_per_iteration,
        truncated=1 - read / given,
        tokens_of_a_tokens_document=squares / tokens,
        token_shares=tuple((tokens_c / tokens).tolist()),
        epochs=tuple(
            share * own / len(source.documents) for own, source in zip(documents_c.tolist(), sources, strict=True)
        ),
    )


def _fold(line: str) -> list[str]:
    """Lines that fit a terminal, unless a word is longer; what fits stays as it is."""
    if len(line) <= _COLUMNS - _INDENT:
        return [line]
    return textwrap.wrap(
        line, width=_COLUMNS - _INDENT, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
