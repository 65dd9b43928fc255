"""What a run would be, by arithmetic: the answer to --dry-run. Needs no GPU and does not import torch.

Documents, packing efficiency and epochs come from whole windows of rows, packed as training packs them; everything else
from the settings. Memory is that of the fullest rank. Times are stated for a share of a GPU's peak rate, which nobody
knows before a run has been measured.
"""

import math
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from megatron_neobert.checkpoint.start import first_iteration
from megatron_neobert.cli import flag_of
from megatron_neobert.config.phases import resolve_phases
from megatron_neobert.config.schema import Settings
from megatron_neobert.data.batches.inputs import Inputs, batch_settings, open_phases
from megatron_neobert.data.batches.order import COMPONENT_SHIFT
from megatron_neobert.data.batches.rows import count_windows, documents_in_window, pack_window
from megatron_neobert.model.flops import count_parameters, training_flops_per_token
from megatron_neobert.planning.costs import checkpoint_lines, gpu_lines, memory_lines, plan_memories
from megatron_neobert.planning.memory import Kernels, RankMemory
from megatron_neobert.text import counted, percent

_INDENT = 12  # columns for a line's name
_COLUMNS = 80  # of a terminal
_CURVE_COLUMNS, _CURVE_LINES = 58, 5
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_MOST_WINDOWS = 8  # 32,768 documents
_LARGE_CUT = 0.1  # share of tokens that are never read
_MANY_EPOCHS = 5


@dataclass(frozen=True)
class IterationSample:
    """An iteration, on average."""

    documents: float  # one that is cut into several counts once
    tokens: float  # of documents, [CLS] and [SEP] included
    packing_efficiency: float  # share of the token capacity that holds one
    truncated: float  # share of the documents' tokens that no row has room for
    tokens_of_a_tokens_document: float  # how many tokens the average token attends to
    document_shares: tuple[float, ...]  # of each component
    token_shares: tuple[float, ...]
    epochs: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class PlannedPhase:
    """A stretch of iterations that share their settings, as far as they are still to be trained."""

    number: int  # 0: before the first of --phases
    words: str  # what changes with it
    first: int
    last: int
    settings: Settings
    inputs: Inputs
    sample: IterationSample
    memories: dict[Kernels, RankMemory]

    @property
    def left(self) -> int:
        """Iterations."""
        return self.last - self.first + 1

    @property
    def flops(self) -> float:
        """Of an iteration."""
        return flops_per_iteration(self.settings, self.inputs, self.sample)


def plan_phases(settings: Settings, inputs: Sequence[Inputs], *, first: int, world_size: int) -> list[PlannedPhase]:
    """What is to be trained behind `first` iterations: one phase where --phases changes nothing in between."""
    last_of_run = settings.training.train_iters
    words = ["", *(change.flags for change in settings.training.phases)]
    spans = [(max(one.first, first + 1), min(one.last or last_of_run, last_of_run)) for one in resolve_phases(settings)]
    left = [number for number, (begin, end) in enumerate(spans) if begin <= end]
    planned = []
    for number in left or [len(spans) - 1]:  # of a run that has nothing left, the last one, with no iteration
        own, phase_settings = inputs[number], resolve_phases(settings)[number].settings
        begin, end = spans[number]
        planned.append(
            PlannedPhase(
                number=number,
                words=words[number],
                first=begin,
                last=max(end, begin - 1),
                settings=phase_settings,
                inputs=own,
                sample=sample_iteration(phase_settings, own),
                memories=plan_memories(phase_settings, vocab_size=own.tokenizer.vocab_size, world_size=world_size),
            )
        )
    return planned


def print_plan(settings: Settings, *, world_size: int) -> int:
    """Prints the plan of a legal run and returns 0.

    Raises:
        MissingInputError, DataError, ConfigError: As `open_phases`.
    """
    inputs = open_phases(settings)
    vocab_size, first = inputs[0].tokenizer.vocab_size, first_iteration(settings.checkpoint)
    phases = plan_phases(settings, inputs, first=first, world_size=world_size)
    fullest = max(phases, key=lambda phase: next(iter(phase.memories.values())).total)
    sections = [
        ("settings", settings_lines(settings)),
        ("model", model_lines(settings, inputs[0])),
        ("ranks", [describe_ranks(settings, world_size)]),
    ]
    for phase in phases:
        if len(phases) > 1:
            sections.append((f"phase {phase.number}", phase_lines(phase)))
        sections.append(("iteration", iteration_lines(phase.settings, phase.sample, world_size=world_size)))
        sections.append(("corpus", corpus_lines(phase.inputs, phase.sample, left=phase.left)))
        if len(phases) > 1:
            lines = gpu_lines(phase.settings, phase.memories, flops=phase.left * phase.flops, world_size=world_size)
            sections.append(("GPUs", lines))
    memories, flops = fullest.memories, sum(phase.left * phase.flops for phase in phases)
    stages = settings.parallel.pipeline_model_parallel_size
    sections += [
        ("run", run_lines(settings, phases, first=first)),
        ("rate", rate_lines(settings, first=first)),
        ("memory", memory_lines(memories, stages=stages)),
        ("GPUs", gpu_lines(settings, memories, flops=flops, world_size=world_size)),
        ("checkpoints", checkpoint_lines(settings, vocab_size=vocab_size, first=first)),
    ]
    if len(phases) > 1:
        sections[-3][1].append(f"in phase {fullest.number}, which takes most")
    for name, lines in sections:
        folded = [part for line in lines for part in _fold(line)]
        for label, line in zip([name, *[""] * len(folded)], folded, strict=False):
            print(f"{label:<{_INDENT}}{line}".rstrip())
    return 0


# ---- what is run


def settings_lines(settings: Settings) -> list[str]:
    """The flags that differ from the defaults, such that they can be pasted."""
    words = [word for section in fields(settings) for word in _differing(getattr(settings, section.name))]
    return ["  ".join(words) or "the defaults, all of them"]


def _differing(section: Any) -> Iterator[str]:
    for item in fields(section):
        value, flag = getattr(section, item.name), flag_of(item.name)
        if value == item.default:
            continue
        if item.name == "phases":
            value = f"[{', '.join(map(str, value))}]"
        if isinstance(value, bool):
            yield flag if value else flag.replace("--", "--no-", 1)
        else:
            values = value if isinstance(value, tuple) else (value,)
            yield f"{flag} {shlex.join(str(one) for one in values)}"


def model_lines(settings: Settings, inputs: Inputs) -> list[str]:
    model, vocab_size = settings.model, inputs.tokenizer.vocab_size
    count = count_parameters(model, vocab_size=vocab_size)
    padded = model.padded_vocab_size(vocab_size, tensor_parallel=settings.parallel.tensor_model_parallel_size)
    return [
        f"parameters {count.total:,} ({count.blocks:,} in {model.num_layers} layers of width {model.hidden_size:,}), "
        f"vocabulary {vocab_size:,} (padded to {padded:,})",
    ]


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


def iteration_lines(settings: Settings, sample: IterationSample, *, world_size: int) -> list[str]:
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
        f"about {_rounded(epochs * left)} epochs of {line}"
        for line, epochs in zip(inputs.description, sample.epochs, strict=True)
    ]
    if len(lines) > 1:
        shares = zip(lines, sample.document_shares, sample.token_shares, strict=True)
        lines = [
            f"{percent(documents, digits=2)} of the documents, {percent(tokens, digits=2)} of the tokens: {line}"
            for line, documents, tokens in shares
        ]
    if (most := max(sample.epochs) * left) > _MANY_EPOCHS:
        lines.append(
            f"warning: documents are read up to {_rounded(most)} times; repetitions beyond the first few add little. "
            "Use fewer --train-iters or more data"
        )
    return lines


def flops_per_iteration(settings: Settings, inputs: Inputs, sample: IterationSample) -> float:
    per_token = training_flops_per_token(
        settings, vocab_size=inputs.tokenizer.vocab_size, document_tokens=sample.tokens_of_a_tokens_document
    )
    return per_token * sample.tokens


def phase_lines(phase: PlannedPhase) -> list[str]:
    return [
        f"iterations {phase.first:,} to {phase.last:,}: {phase.left * phase.sample.tokens:.3e} tokens of documents",
        *([phase.words] if phase.words else []),
        flops_line(phase),
    ]


def flops_line(phase: PlannedPhase) -> str:
    flops = phase.flops
    per_token = flops / phase.sample.tokens
    return f"{per_token:.3e} FLOPs per token, {flops:.3e} per iteration, {flops * phase.left:.3e} in all"


def run_lines(settings: Settings, phases: Sequence[PlannedPhase], *, first: int) -> list[str]:
    done = f", {first:,} of them done" if first else ""
    tokens = sum(phase.left * phase.sample.tokens for phase in phases)
    flops = sum(phase.left * phase.flops for phase in phases)
    return [
        f"{counted(settings.training.train_iters, 'iteration')}{done}: {tokens:.3e} tokens of documents"
        f"{' to go' if first else ''}",
        flops_line(phases[0]) if len(phases) == 1 else f"{flops:.3e} FLOPs in all",
    ]


# ---- what an iteration reads


def sample_iteration(settings: Settings, inputs: Inputs) -> IterationSample:
    """Packs windows as training packs them; lengths alone are read, no token, so this takes milliseconds.

    The packed sequences of one iteration are too few to stand for a corpus: how many a corpus fills is known of
    whole windows. An epoch of a few windows is packed entirely; of a longer one, and of a blend, the first windows
    stand for all, since documents are shuffled.
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
        document_shares=tuple((documents_c / documents).tolist()),
        token_shares=tuple((tokens_c / tokens).tolist()),
        epochs=tuple(
            share * own / len(source.documents) for own, source in zip(documents_c.tolist(), sources, strict=True)
        ),
    )


# ---- the learning rate

# Of the way from the peak rate to the lowest what is left, by the share of the decay that is done.
_LEFT: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "exponential": lambda done: 2 * 0.5**done - 1,
    "minus_sqrt": lambda done: 1 - math.sqrt(done),
}


def learning_rate(settings: Settings, iteration: int) -> float:
    """Behind `iteration` updates; what Megatron's scheduler gives (tests/unit/planning/test_plan.py compares them)."""
    optimizer, end = settings.optimizer, settings.lr_decay_end
    if optimizer.lr_warmup_iters > 0 and iteration <= optimizer.lr_warmup_iters:
        return optimizer.lr * iteration / optimizer.lr_warmup_iters
    if optimizer.lr_decay_style == "constant":
        return optimizer.lr
    if optimizer.lr_decay_style == "inverse-square-root":
        warmed_up = math.sqrt(max(optimizer.lr_warmup_iters, 1) / max(iteration, 1))
        return max(optimizer.min_lr, optimizer.lr * warmed_up if iteration <= end else 0.0)
    style, begin = optimizer.lr_decay_style, optimizer.lr_warmup_iters
    if style == "WSD":
        style, begin = optimizer.lr_wsd_decay_style, end - (optimizer.lr_wsd_decay_iters or 0)
    done = min(1.0, max(0.0, (iteration - begin) / (end - begin)))
    return optimizer.min_lr + (optimizer.lr - optimizer.min_lr) * _LEFT[style](done)


def draw_curve(values: Sequence[float], *, height: int, unicode: bool) -> list[str]:
    """Columns from 0 up to each value, the largest `height` lines high; ASCII rounds to whole lines.

    Args:
        values: At least one above 0.
    """
    eighths = [round(8 * height * value / max(values)) for value in values]
    lines = []
    for line in reversed(range(height)):
        cells = [min(8, max(0, column - 8 * line)) for column in eighths]
        lines.append("".join(_EIGHTHS[cell] if unicode else " #"[cell >= 4] for cell in cells).rstrip())
    return lines


def rate_lines(settings: Settings, *, first: int) -> list[str]:
    """The learning rate from the first iteration to the last, and where it is what."""
    last = max(settings.training.train_iters, first + 1)
    places = [first + round((last - first) * column / (_CURVE_COLUMNS - 1)) for column in range(_CURVE_COLUMNS)]
    rates = [learning_rate(settings, place) for place in places]
    if not max(rates):
        return ["0 throughout"]
    unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    rows = draw_curve(rates, height=_CURVE_LINES, unicode=unicode)
    labels = [f"{max(rates):.1e}", *[""] * (_CURVE_LINES - 2), "0"]
    lines = [f"{label:>7} |{row}" for label, row in zip(labels, rows, strict=True)]
    lines.append(f"{'':>7} +{'-' * _CURVE_COLUMNS}")
    lines.append(f"{'':>9}{f'iteration {first:,}':<{_CURVE_COLUMNS // 2}}{f'{last:,}':>{_CURVE_COLUMNS // 2}}")
    optimizer, decay = settings.optimizer, "constant"
    if optimizer.lr_decay_style != "constant":
        end, style = settings.lr_decay_end, optimizer.lr_decay_style
        if optimizer.lr_wsd_decay_iters is not None:
            style = f"constant to {end - optimizer.lr_wsd_decay_iters:,}, then {optimizer.lr_wsd_decay_style}"
        decay = f"{style} to {optimizer.min_lr:g} at {end:,}"
    warmup = f"0 to {optimizer.lr:g} by iteration {optimizer.lr_warmup_iters:,}"
    lines.append(f"{warmup if optimizer.lr_warmup_iters else f'{optimizer.lr:g}'}, then {decay}")
    return lines


# ---- words


def _fold(line: str) -> list[str]:
    """Lines that fit a terminal, unless a word is longer; what fits stays as it is."""
    if len(line) <= _COLUMNS - _INDENT:
        return [line]
    return textwrap.wrap(
        line, width=_COLUMNS - _INDENT, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def _rounded(number: float) -> str:
    """Format a number with three significant digits, at most two of them behind the point."""
    if number < 0.01:
        return f"{number:.1e}"
    rounded = float(f"{number:.3g}")
    return f"{rounded:,.{2 if rounded < 10 else 1 if rounded < 100 else 0}f}"
