"""Figures of the remaining phases of a run, from whole windows that are packed as in training.

Only lengths are read, which takes milliseconds. Neither torch nor a GPU is needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_neobert.config.phases import Phase, resolve_phases
from megatron_neobert.config.schema import Settings
from megatron_neobert.data.batches.corpora import OpenedCorpora
from megatron_neobert.data.batches.windows import BatchPhase, token_ids_of
from megatron_neobert.model.flops import training_flops_per_token
from megatron_neobert.planning.memory import RankMemory, plan_memory

_MOST_WINDOWS = 8  # 32,768 documents


@dataclass(frozen=True)
class IterationSample:
    """Average figures per iteration, estimated from the first windows of an epoch."""

    pieces: float  # segments: whole documents, and each piece of the others
    tokens: float  # without padding, including [CLS] and [SEP]
    packing_efficiency: float  # tokens as a share of the token capacity
    document_tokens: float  # of the average document before any cut, without [CLS] and [SEP]
    truncated: float  # share of these tokens that are never read
    attended_tokens: float  # tokens that the average token attends to
    token_shares: tuple[float, ...]  # share of the tokens per component of --data-path
    epochs: tuple[float, ...]  # epochs per component


@dataclass(frozen=True)
class Forecast:
    """Figures of one phase, for the iterations that remain."""

    phase: Phase  # with the remaining iterations; `last` is `first` - 1 if none remain
    opened: OpenedCorpora
    sample: IterationSample
    memory: RankMemory
    flops: float  # per iteration

    @property
    def iterations(self) -> int:
        return (self.phase.last or 0) - self.phase.first + 1


def forecast_phases(
    settings: Settings, opened: Sequence[OpenedCorpora], *, done: int, world_size: int, windows: int = _MOST_WINDOWS
) -> list[Forecast]:
    """Return forecasts of the phases that remain after `done` iterations, or of the last phase if none remains."""
    end, phases, forecasts = settings.training.train_iters, resolve_phases(settings), []
    remaining = [phase for phase in phases if phase.first <= end and (phase.last is None or phase.last > done)]
    for phase in remaining or phases[-1:]:
        corpora, sizes = opened[phase.number], {"vocab_size": opened[phase.number].tokenizer.vocab_size}
        sample = sample_iteration(phase.settings, corpora, windows=windows)
        per_token = training_flops_per_token(phase.settings, document_tokens=sample.attended_tokens, **sizes)
        memory = plan_memory(phase.settings, world_size=world_size, **sizes)
        first, last = max(phase.first, done + 1), end if phase.last is None else min(phase.last, end)
        phase = replace(phase, first=first, last=max(last, first - 1))
        forecasts.append(Forecast(phase, corpora, sample, memory, per_token * sample.tokens))
    return forecasts


def sample_iteration(settings: Settings, opened: OpenedCorpora, *, windows: int = _MOST_WINDOWS) -> IterationSample:
    """Pack the first `windows` windows (blocks of documents) of epoch 0, and return averages per iteration.

    Only lengths are read, which takes milliseconds. An epoch with fewer windows is packed completely. Otherwise, the
    first windows are a random sample, because documents are shuffled.
    """
    sources = opened.training
    batches = BatchPhase(sources, settings, token_ids_of(opened.tokenizer))
    sequences, pieces, squares, offered_documents, offered_tokens, text_tokens = 0, 0, 0, 0, 0, 0
    documents_c, tokens_c = np.zeros(len(sources)), np.zeros(len(sources))
    for window in range(min(batches.windows, windows)):
        offered = batches.documents(epoch=0, window=window)
        packed = batches.pack(offered)
        segments, packed_lengths_n = packed.segments, packed.segments.packed_lengths_n
        # A document that is cut has one first segment.
        is_first_n = segments.has_cls_n & (segments.starts_n == 0)
        sequences += len(packed)
        pieces += len(segments)
        offered_documents += len(offered.lengths_n)
        offered_tokens += int(offered.lengths_n.sum())
        text_tokens += int(segments.lengths_n.sum())
        documents_c += np.bincount(segments.components_n[is_first_n], minlength=len(sources))
        tokens_c += np.bincount(segments.components_n, weights=packed_lengths_n, minlength=len(sources))
        # In the concatenated layout, tokens attend to their whole packed sequence.
        is_packed = settings.data.batch_layout == "packed"
        attended = packed_lengths_n if is_packed else np.add.reduceat(packed_lengths_n, packed.offsets[:-1])
        squares += int(attended @ attended)
    share = settings.training.global_batch_size / sequences  # an iteration as a share of these windows
    tokens = float(tokens_c.sum())
    sizes = [len(source.documents) for source in sources]
    return IterationSample(
        pieces=share * pieces,
        tokens=share * tokens,
        packing_efficiency=share * tokens / settings.tokens_per_iteration,
        document_tokens=offered_tokens / offered_documents,
        truncated=1 - text_tokens / offered_tokens,
        attended_tokens=squares / tokens,
        token_shares=tuple((tokens_c / tokens).tolist()),
        epochs=tuple((share * documents_c / sizes).tolist()),
    )
