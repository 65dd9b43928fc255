"""Figures of the remaining phases of a run, from whole windows that are packed as in training.

Only lengths are read, which takes milliseconds. Neither torch nor a GPU is needed. For a run without --data-path, a
plan assumes RefinedWeb's documents and bert-base-uncased's vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray
from tokenizers import models

from megatron_neobert.config.data_path import Component, parse_data_path, whole_weights
from megatron_neobert.config.phases import Phase, resolve_phases
from megatron_neobert.config.schema import DataConfig, Settings
from megatron_neobert.data.batches.corpora import OpenedCorpora, open_phases
from megatron_neobert.data.batches.order import split_documents
from megatron_neobert.data.batches.windows import BatchPhase, Source, token_ids_of
from megatron_neobert.data.corpus.reader import Corpus
from megatron_neobert.data.tokenizer.files import STANDARD_NAMES, build_bert_backend
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from megatron_neobert.errors import ConfigError
from megatron_neobert.model.flops import training_flops_per_token
from megatron_neobert.planning.memory import RankMemory, plan_memory
from megatron_neobert.text import approximate

_MOST_WINDOWS = 8  # 32,768 documents
# tiiuae/falcon-refinedweb has 968 million rows, and about 600 billion tokens (arXiv 2306.01116).
DOCUMENTS = 968_000_000
# Of its documents in tokens of bert-base-uncased; their lengths are nearly log-normal.
MEDIAN_TOKENS, MEAN_TOKENS = 368, 640
VOCAB_SIZE = 30_522
_DRAWN = 1 << 18


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

    An epoch with fewer windows is packed completely. Otherwise, the first windows are a random sample, because
    documents are shuffled.
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


# ---- assumed data


class AssumedCorpus:
    """Document lengths like RefinedWeb's. Replaces a `Corpus` in a plan, which reads only lengths."""

    def __init__(self, component: Component) -> None:
        lengths, longest = _draw_lengths(), component.maximum or math.inf
        self.lengths = lengths[(lengths >= component.minimum) & (lengths <= longest)]
        self.documents = DOCUMENTS * len(self.lengths) // _DRAWN
        if not self.documents:
            raise ConfigError(f"{component}: no web document has such a length; plan with --data-path, or change it.")

    def lengths_of(self, documents: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the number of tokens of each document."""
        return self.lengths[documents % len(self.lengths)]


@cache
def _draw_lengths() -> NDArray[np.int32]:
    sigma = math.sqrt(2 * math.log(MEAN_TOKENS / MEDIAN_TOKENS))
    return np.random.default_rng(0).lognormal(math.log(MEDIAN_TOKENS), sigma, _DRAWN).clip(1).astype(np.int32)


def assumptions(settings: Settings) -> list[str]:
    """Return a sentence about the assumed data, or [] if the run has a --data-path."""
    if settings.data.data_path:
        return []
    vocabulary = f" and a vocabulary of {VOCAB_SIZE:,} ids" if settings.data.tokenizer_model is None else ""
    return [
        f"no --data-path, so documents like RefinedWeb's (median {MEDIAN_TOKENS} tokens, mean {MEAN_TOKENS})"
        f"{vocabulary}; --data-path and --tokenizer-model plan with your data"
    ]


def open_or_assume_phases(settings: Settings) -> list[OpenedCorpora]:
    """Return the opened data of each phase, or assumed data for a plan without --data-path.

    Assumed documents have lengths like RefinedWeb's. If --tokenizer-model is not given, a tokenizer of VOCAB_SIZE ids
    is assumed. Weights, `min` and `max` in a phase's data_path apply to the assumed documents; no corpus is opened.
    """
    if settings.data.data_path:
        return open_phases(settings)
    path = settings.data.tokenizer_model
    if path is None:
        names = {role: names[0] for role, names in STANDARD_NAMES.items()}
        words = [*names.values(), *(f"w{number}" for number in range(VOCAB_SIZE - len(names)))]
        vocabulary = {word: number for number, word in enumerate(words)}
        tokenizer = Tokenizer(build_bert_backend(models.WordPiece(vocabulary), lowercase=True), names)
    else:
        tokenizer = load_tokenizer(Path(path))
    return [_assume(phase.settings.data, tokenizer) for phase in resolve_phases(settings)]


def _assume(data: DataConfig, tokenizer: Tokenizer) -> OpenedCorpora:
    components = parse_data_path(data.data_path or ("RefinedWeb",))
    corpora = [AssumedCorpus(component) for component in components]
    return OpenedCorpora(
        tokenizer=tokenizer,
        training=tuple(
            Source(cast(Corpus, corpus), split_documents(corpus.documents, data.share_of_data_path)[0], weight)
            for corpus, weight in zip(corpora, whole_weights(components), strict=True)
        ),
        validation={},
        sha256="",
        description=[
            f"assumed for {component}: {approximate(corpus.documents)} documents "
            f"({approximate(corpus.documents * float(corpus.lengths.mean()))} tokens before any cut)"
            for component, corpus in zip(components, corpora, strict=True)
        ],
    )
