"""The batches of a run, in order (BatchStream): packed sequences of all ranks, and the micro-batches of one rank.

Batch k depends on (sources, settings, k) only, so iteration and cursor suffice to resume. All ranks pack the same
sequences, which reads only lengths. Each rank then reads, masks and lays out the tokens of its micro-batches.
Ranks of the same replica of the model (tensor, pipeline, context) all do this work, which costs less
than sending the result.

Letters: `t` tokens of a micro-batch, `n` documents and dummy documents (plus one), `m` masked tokens.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_neobert.config.phases import resolve_phases
from megatron_neobert.config.schema import Settings
from megatron_neobert.data.batches.corpora import OpenedCorpora
from megatron_neobert.data.batches.masking import mask_tokens
from megatron_neobert.data.batches.packing import PackedSequences, Segments, join_sequences
from megatron_neobert.data.batches.windows import (
    IGNORED_LABEL,
    BatchPhase,
    Cursor,
    Source,
    document_capacity,
    masked_capacity,
    pad_to_capacity,
    token_ids_of,
)
from megatron_neobert.data.corpus.reader import Corpus

_REMOTE_BATCHES_AHEAD = 4  # batches whose blocks are fetched from object storage while a batch is trained on


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch: the documents of its packed sequences end to end, each [CLS] ... [SEP], then padding.

    The padding is [PAD] tokens in dummy documents of at most max_seqlen tokens; usually one dummy is enough. Position
    ids restart at every document, so they follow from cu_seqlens_n. In the concatenated layout, cu_seqlens_n treats a
    whole packed sequence as one document. A context-parallel rank has a share of the tokens, but all of cu_seqlens_n.

    With BatchStream.pads_to_capacity, cu_seqlens_n is padded with empty documents, masked_positions_m with 0 and
    labels_m with IGNORED_LABEL.
    """

    tokens_t: Tensor  # int64
    labels_m: Tensor  # int64, original ids at the masked positions; with is_causal, the next tokens
    masked_positions_m: Tensor  # int64 indices into tokens_t, increasing up to the padding
    cu_seqlens_n: Tensor  # int32, from 0 to the token capacity; entries i and i + 1 bound document i
    max_seqlen: int  # seq_length, not the longest document: attention kernels are chosen once
    real_tokens: int  # entries of tokens_t outside dummy documents
    is_causal: bool = False  # a token attends to the tokens before it and to itself

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "MicroBatch":
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "MicroBatch":
        """Return a copy in pinned memory."""
        return self.map_tensors(lambda tensor: tensor.pin_memory())

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> "MicroBatch":
        """Return a copy in which `function(tensor)` replaces each tensor."""
        tensors = {name: function(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)  # type: ignore[arg-type]


@dataclass(frozen=True)
class RankBatches:
    """The micro-batches of one rank for one iteration."""

    micro_batches: list[MicroBatch]
    # Start of the next iteration, the same on every rank. A checkpoint stores it once this iteration is done.
    cursor_after: Cursor

    @property
    def real_tokens(self) -> int:
        """Tokens of these micro-batches outside dummy documents."""
        return sum(batch.real_tokens for batch in self.micro_batches)

    def pin_memory(self) -> "RankBatches":
        """Return a copy in pinned memory. torch's DataLoader calls this method."""
        return replace(self, micro_batches=[batch.pin_memory() for batch in self.micro_batches])


class RankPosition(NamedTuple):
    """Position of a rank among the ranks that share a global batch.

    Micro-batch j of a global batch contains packed sequences [j, j + 1) * micro_batch_size. Data-parallel rank d of
    D trains on micro-batches d, d + D, ..., so the set of micro-batches does not depend on D. Context-parallel rank c
    of C gets tokens [c, c + 1) * t / C of each micro-batch. The settings are checked, so all bounds are whole numbers.
    """

    data_parallel_rank: int = 0
    data_parallel_size: int = 1
    context_parallel_rank: int = 0
    context_parallel_size: int = 1


@dataclass(frozen=True)
class GlobalBatch:
    """Packed sequences of all ranks for one iteration. No token has been read yet."""

    phase: BatchPhase
    packed: PackedSequences
    cursor_after: Cursor
    pads_to_capacity: bool = False

    def for_rank(self, rank: RankPosition) -> RankBatches:
        """Read, mask and lay out the micro-batches of a rank.

        Raise DataError if a corpus is damaged, and StorageError if a remote corpus cannot be read.
        """
        micro_batches = []
        for packed in self._sequences_of(rank):
            batch = build_micro_batch(self.phase, packed)
            micro_batches.append(_take_share(batch, rank) if rank.context_parallel_size > 1 else batch)
        return RankBatches(self._pad(micro_batches) if self.pads_to_capacity else micro_batches, self.cursor_after)

    def prefetch(self, rank: RankPosition) -> None:
        """Start fetching a rank's documents from object storage, and return without waiting."""
        for packed in self._sequences_of(rank):
            for corpus, members in _group_by_corpus(self.phase.sources, packed.segments):
                corpus.prefetch(packed.segments.numbers_n[members])

    def _sequences_of(self, rank: RankPosition) -> list[PackedSequences]:
        size = self.phase.settings.training.micro_batch_size
        firsts = range(0, len(self.packed), size)[rank.data_parallel_rank :: rank.data_parallel_size]
        return [self.packed.take(first, first + size) for first in firsts]

    def _pad(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        """Return copies, padded to the capacities for masked positions and for the documents of all ranks."""
        settings, size = self.phase.settings, self.phase.settings.training.micro_batch_size
        tokens, is_packed = settings.tokens_per_micro_batch, settings.data.batch_layout == "packed"
        offsets = self.packed.offsets[::size]
        ends_n = np.append(0, np.cumsum(self.packed.segments.packed_lengths_n))
        unused = tokens - np.diff(ends_n[offsets])
        documents = (np.diff(offsets) if is_packed else size) + -(-unused // settings.data.seq_length)
        capacity = document_capacity(int(documents.max()))
        padded = []
        for batch in micro_batches:
            masked = masked_capacity(len(batch.tokens_t), probability=settings.data.predicted_share)
            bounds = batch.cu_seqlens_n.numpy()
            bounds = np.concatenate([bounds[:1], pad_to_capacity(bounds[1:], capacity, tokens)])
            padded.append(
                replace(
                    batch,
                    labels_m=torch.from_numpy(pad_to_capacity(batch.labels_m.numpy(), masked, IGNORED_LABEL)),
                    masked_positions_m=torch.from_numpy(pad_to_capacity(batch.masked_positions_m.numpy(), masked, 0)),
                    cu_seqlens_n=torch.from_numpy(bounds),
                )
            )
        return padded


def build_micro_batch(phase: BatchPhase, packed: PackedSequences) -> MicroBatch:
    """Read, mask and lay out micro_batch_size packed sequences on the CPU, without padding to capacities."""
    data, ids, segments = phase.settings.data, phase.token_ids, packed.segments
    capacity = phase.settings.tokens_per_micro_batch
    ends_n = np.cumsum(segments.packed_lengths_n)
    starts_n = ends_n - segments.packed_lengths_n
    text_starts_n = starts_n + segments.has_cls_n
    real_tokens = int(ends_n[-1])

    tokens_t = np.full(capacity, ids.pad, dtype=np.int64)
    tokens_t[starts_n[segments.has_cls_n]] = ids.cls
    tokens_t[ends_n[segments.has_sep_n] - 1] = ids.sep
    for corpus, members in _group_by_corpus(phase.sources, segments):
        of_corpus = segments[members]
        text = corpus.gather(of_corpus.numbers_n, of_corpus.starts_n, of_corpus.lengths_n)
        read = 0
        for start, length in zip(text_starts_n[members].tolist(), of_corpus.lengths_n.tolist(), strict=True):
            tokens_t[start : start + length] = text[read : read + length]
            read += length

    # Attention kernels rely on max_seqlen, so padding longer than that is several dummy documents.
    dummy_starts = np.arange(real_tokens, capacity, data.seq_length)
    bounds = starts_n if data.batch_layout == "packed" else starts_n[packed.offsets[:-1]]
    if data.objective == "clm":
        # All tokens but the last one of each document.
        positions_m = np.delete(np.arange(real_tokens), np.append(bounds[1:], real_tokens) - 1)
        labels_m = tokens_t[positions_m + 1]
    else:
        # In the concatenated layout, a segment can consist of [CLS] or [SEP] alone.
        has_text_n = segments.lengths_n > 0
        masked = mask_tokens(
            tokens_t,
            segments[has_text_n],
            text_starts_n[has_text_n],
            mask_prob=data.mask_prob,
            mask_replacement=data.mask_replacement,
            ids=ids,
            seed=phase.settings.training.seed,
        )
        tokens_t[masked.positions_m] = masked.replacements_m
        positions_m, labels_m = masked.positions_m, masked.labels_m
    return MicroBatch(
        tokens_t=torch.from_numpy(tokens_t),
        labels_m=torch.from_numpy(labels_m),
        masked_positions_m=torch.from_numpy(positions_m),
        cu_seqlens_n=torch.from_numpy(np.concatenate([bounds, dummy_starts, [capacity]]).astype(np.int32)),
        max_seqlen=data.seq_length,
        real_tokens=real_tokens,
        is_causal=data.objective == "clm",
    )


def _group_by_corpus(sources: tuple[Source, ...], segments: Segments) -> list[tuple[Corpus, slice | NDArray[np.int64]]]:
    """Return (corpus, indices of its segments) for each corpus with segments. Sources of one corpus share an entry."""
    corpora = list({id(source.corpus): source.corpus for source in sources}.values())
    if len(corpora) == 1:
        return [(corpora[0], slice(None))]
    corpus_of_source = np.array([next(i for i, c in enumerate(corpora) if c is source.corpus) for source in sources])
    corpus_n = corpus_of_source[segments.components_n]
    return [(corpora[number], np.flatnonzero(corpus_n == number)) for number in np.unique(corpus_n).tolist()]


def _take_share(batch: MicroBatch, rank: RankPosition) -> MicroBatch:
    """Return one context-parallel rank's share of a micro-batch. Masked positions count from the start of the share."""
    count = len(batch.tokens_t) // rank.context_parallel_size
    first = rank.context_parallel_rank * count
    positions = batch.masked_positions_m
    inside = (positions >= first) & (positions < first + count)
    return replace(
        batch,
        tokens_t=batch.tokens_t[first : first + count].clone(),
        labels_m=batch.labels_m[inside],
        masked_positions_m=positions[inside] - first,
        real_tokens=min(max(batch.real_tokens - first, 0), count),
    )


@dataclass(frozen=True)
class BatchStream:
    """Endless batches of a run, over all phases and epochs. The first batch starts at `cursor`, after `iteration`.

    The order of the documents continues from phase to phase as long as corpora, weights, seed and block size stay the
    same. If `seq_length` changes, the new phase begins with the next window, because a window is packed as a whole; the
    unread rest of the window, fewer than 4,096 documents, is skipped. If the documents change, their order begins at
    its start.
    """

    phases: tuple[BatchPhase, ...]
    iteration: int = 0  # iterations that are done
    cursor: Cursor = Cursor()  # noqa: RUF009  immutable; position after these iterations
    rank: RankPosition = RankPosition()  # noqa: RUF009  immutable
    pads_to_capacity: bool = False  # pad all micro-batches to few shapes, see windows.py

    @property
    def bytes_per_token(self) -> float | None:
        """UTF-8 bytes of text per token in the first phase's corpus. None for a blend, or if the number is unknown."""
        sources = self.phases[0].sources
        return sources[0].corpus.manifest.bytes_per_token if len(sources) == 1 else None

    def with_settings(self, settings: Settings) -> "BatchStream":
        """Return a copy with these settings in all phases."""
        return replace(self, phases=tuple(replace(phase, settings=settings) for phase in self.phases))

    def phase_at(self, iteration: int) -> BatchPhase:
        """Return the phase of an iteration, counted from 1; iteration 0 is in the first phase."""
        return next((phase for phase in reversed(self.phases) if phase.first <= iteration), self.phases[0])

    def rank_batches(self, *, first: int = 0, every: int = 1) -> Iterator[RankBatches]:
        """Yield this rank's batches for iterations first, first + every, ..., counted from 0 after `self.iteration`.

        Skipped iterations are packed, but their tokens are not read.
        """
        sources = [source for phase in self.phases for source in phase.sources]
        ahead = _REMOTE_BATCHES_AHEAD if any(source.corpus.is_remote for source in sources) else 0
        waiting = deque[GlobalBatch]()
        for batch in islice(self.global_batches(), first, None, every):
            waiting.append(batch)
            if ahead:
                batch.prefetch(self.rank)
            if len(waiting) > ahead:
                yield waiting.popleft().for_rank(self.rank)

    def global_batches(self) -> Iterator[GlobalBatch]:
        """Yield the global batches after `self.iteration`, endlessly. Only document lengths are read, no tokens.

        A batch may extend over several windows and epochs.
        """
        iteration, cursor, window = self.iteration, self.cursor, None
        previous = self.phase_at(iteration)
        while True:
            iteration += 1
            phase = self.phase_at(iteration)
            if phase is not previous:
                cursor = phase.start_after(previous.settings, previous.corpus_sha256, cursor)
                window, previous = None, phase
            taken: list[PackedSequences] = []
            missing = phase.settings.training.global_batch_size
            while missing:
                window = window or phase.pack_window_at(cursor)
                stop = min(cursor.sequence + missing, len(window))
                taken.append(window.take(cursor.sequence, stop))
                missing -= stop - cursor.sequence
                cursor = replace(cursor, sequence=stop)
                if stop == len(window):
                    cursor, window = phase.next_window(cursor), None
            yield GlobalBatch(phase, join_sequences(taken), cursor, self.pads_to_capacity)

    def global_batch(self, iteration: int) -> GlobalBatch:
        """Return the batch of `iteration`, which must be above `self.iteration`. Earlier ones are packed, not read."""
        return next(islice(self.global_batches(), iteration - self.iteration - 1, None))


def build_stream(settings: Settings, opened: Sequence[OpenedCorpora], *, pads_to_capacity: bool = False) -> BatchStream:
    """Return the stream of a run's training batches from iteration 1, for a single rank.

    Args:
        opened: Result of `open_phases`.
        pads_to_capacity: Pad all micro-batches to few shapes, see windows.py.
    """
    phases = [
        BatchPhase(corpora.training, phase.settings, token_ids_of(corpora.tokenizer), phase.first, corpora.sha256)
        for phase, corpora in zip(resolve_phases(settings), opened, strict=True)
    ]
    return BatchStream(tuple(phases), pads_to_capacity=pads_to_capacity)
