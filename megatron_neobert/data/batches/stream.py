"""Global batch k, and the micro-batches of it that one rank trains on.

Batch k depends on (sources, settings, k) only. All ranks pack the same sequences in the same order, which reads only
lengths. Each rank then reads, masks and lays out the tokens of its micro-batches. Ranks of the same replica of the
model (tensor, pipeline, context) all do this work, which costs less than sending the result.

Letters: `t` tokens of a micro-batch, `n` documents and dummy documents (plus one), `m` masked tokens.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_neobert.data.batches.masking import mask_tokens
from megatron_neobert.data.batches.packing import PackedSequences, Segments, join_sequences
from megatron_neobert.data.batches.windows import (
    IGNORED_LABEL,
    BatchSettings,
    Cursor,
    Source,
    count_windows,
    document_capacity,
    masked_capacity,
    next_window,
    pack_window,
    pad_to_capacity,
)
from megatron_neobert.data.corpus.reader import Corpus
from megatron_neobert.errors import CheckpointError

_REMOTE_STEPS_AHEAD = 4  # steps whose blocks are fetched from object storage while a step is trained


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch: the documents of its packed sequences end to end, each [CLS] ... [SEP], then padding.

    The padding is [PAD] tokens in dummy documents of at most max_seqlen tokens; usually one dummy is enough. Position
    ids restart at every document, so they follow from cu_seqlens_n. In the concatenated layout, cu_seqlens_n treats a
    whole packed sequence as one document. A context-parallel rank has a share of the tokens, but all of cu_seqlens_n.

    With fixed shapes, cu_seqlens_n is padded with empty documents, masked_positions_m with 0 and labels_m with
    IGNORED_LABEL.
    """

    tokens_t: Tensor  # int64
    labels_m: Tensor  # int64, original ids at the masked positions; with is_causal, the next tokens
    masked_positions_m: Tensor  # int64 indices into tokens_t, increasing up to the padding
    cu_seqlens_n: Tensor  # int32, from 0 to the token capacity; entries i and i + 1 bound document i
    max_seqlen: int  # seq_length, not the longest document: attention kernels are chosen once
    real_tokens: int  # entries of tokens_t outside dummy documents
    is_causal: bool = False  # a token attends to the tokens before it and to itself

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "PackedBatch":
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "PackedBatch":
        """Return a copy in pinned memory."""
        return self.map_tensors(lambda tensor: tensor.pin_memory())

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> "PackedBatch":
        """Return a copy with the results of `function` for all tensors."""
        tensors = {name: function(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)  # type: ignore[arg-type]


@dataclass(frozen=True)
class StepBatches:
    """Micro-batches of one rank for one training step."""

    micro_batches: list[PackedBatch]
    # Start of the next step, the same on every rank. A checkpoint stores it once this step is done.
    cursor_after: Cursor

    @property
    def real_tokens(self) -> int:
        """Tokens of these micro-batches outside dummy documents."""
        return sum(batch.real_tokens for batch in self.micro_batches)

    def pin_memory(self) -> "StepBatches":
        """Return a copy in pinned memory. torch's DataLoader calls this method."""
        return replace(self, micro_batches=[batch.pin_memory() for batch in self.micro_batches])


StreamBatch = tuple["BatchStream", PackedSequences, Cursor]  # a global batch of a stream, and the cursor after it


@dataclass(frozen=True)
class BatchStream:
    """Endless batches of one rank, from a cursor on, epoch after epoch.

    Micro-batch j of a step has packed sequences [j, j + 1) * micro_batch_size of the global batch. Data-parallel rank d
    of D trains on j = d, d + D, ..., so the set of micro-batches does not depend on D. Context-parallel rank c of C has
    tokens [c, c + 1) * t / C of each. The rules of the settings ensure that these are whole numbers.
    """

    sources: tuple[Source, ...]  # a single source, or the components of a blend
    settings: BatchSettings
    cursor: Cursor = Cursor()  # noqa: RUF009  frozen
    data_parallel_rank: int = 0
    data_parallel_size: int = 1
    context_parallel_rank: int = 0
    context_parallel_size: int = 1

    @property
    def bytes_per_token(self) -> float | None:
        """UTF-8 bytes of text per token of the corpus; None if it is not known, and for a blend."""
        return self.sources[0].corpus.manifest.bytes_per_token if len(self.sources) == 1 else None

    def with_objective(self, objective: Literal["mlm", "clm"]) -> "BatchStream":
        return replace(self, settings=replace(self.settings, objective=objective))

    def steps(self, *, first: int = 0, every: int = 1) -> Iterator[StepBatches]:
        """Yield steps first, first + every, ..., without end. Step 0 begins at `self.cursor`.

        Skipped steps are packed, but their tokens are not read.

        Raises:
            CheckpointError: While iterating: the sources have no packed sequence at the cursor.
            DataError, StorageError: While iterating: a corpus is damaged, or a remote corpus cannot be read.
        """
        batches = ((self, packed, cursor_after) for packed, cursor_after in self.global_batches())
        return build_steps(islice(batches, first, None, every), ahead=self.steps_ahead)

    def global_batches(self) -> Iterator[tuple[PackedSequences, Cursor]]:
        """Yield the packed sequences of each global batch, for all ranks, and the cursor after it, without end.

        A batch may extend over several windows and epochs. No token is read.

        Raises:
            CheckpointError: While iterating: the sources have no packed sequence at the cursor.
            DataError: While iterating: the index of a corpus is damaged.
        """
        cursor, window = self.cursor, None
        while True:
            taken: list[PackedSequences] = []
            missing = self.settings.global_batch_size
            while missing:
                window = window or self._window_at(cursor)
                stop = min(cursor.row + missing, len(window))
                taken.append(window.take(cursor.row, stop))
                missing -= stop - cursor.row
                cursor = replace(cursor, row=stop)
                if stop == len(window):
                    cursor, window = next_window(self.sources, self.settings, cursor), None
            yield join_sequences(taken), cursor

    def _window_at(self, cursor: Cursor) -> PackedSequences:
        if cursor.window < count_windows(self.sources, self.settings):
            packed = pack_window(self.sources, self.settings, epoch=cursor.epoch, window=cursor.window)
            if cursor.row <= len(packed):
                return packed
        raise CheckpointError(
            f"the checkpoint continues at packed sequence {cursor.row:,} of window {cursor.window:,}, which these "
            "documents do not have. Resume with the corpus, --split, --seq-length, --long-documents and --seed that it "
            "was saved with, or start a new run."
        )

    @property
    def steps_ahead(self) -> int:
        """Number of steps by which documents are prefetched from object storage; 0 for local corpora."""
        return _REMOTE_STEPS_AHEAD if any(source.corpus.is_remote for source in self.sources) else 0

    def build(self, packed: PackedSequences) -> list[PackedBatch]:
        """Return this rank's micro-batches of a global batch."""
        documents = self._count_documents(packed) if self.settings.fixed_shapes else 0
        return [self._build_micro_batch(sequences, documents) for sequences in self._micro_batches_of_rank(packed)]

    def prefetch(self, packed: PackedSequences) -> None:
        """Start to fetch this rank's documents of a global batch from object storage, without waiting."""
        for sequences in self._micro_batches_of_rank(packed):
            for corpus, members in _group_by_corpus(self.sources, sequences.segments):
                corpus.prefetch(sequences.segments.numbers_n[members])

    def _micro_batches_of_rank(self, packed: PackedSequences) -> list[PackedSequences]:
        size = self.settings.micro_batch_size
        firsts = range(0, self.settings.global_batch_size, size)[self.data_parallel_rank :: self.data_parallel_size]
        return [packed.take(first, first + size) for first in firsts]

    def _count_documents(self, packed: PackedSequences) -> int:
        """Return the largest number of documents in a micro-batch of any rank, dummies included."""
        settings = self.settings
        offsets = packed.offsets[:: settings.micro_batch_size]
        ends_n = np.append(0, np.cumsum(packed.segments.packed_lengths_n))
        unused = settings.tokens_per_micro_batch - np.diff(ends_n[offsets])
        is_packed = settings.batch_layout == "packed"
        documents = np.diff(offsets) if is_packed else np.full(len(unused), settings.micro_batch_size)
        return int((documents + -(-unused // settings.seq_length)).max())

    def _build_micro_batch(self, packed: PackedSequences, documents: int) -> PackedBatch:
        settings, ranks = self.settings, self.context_parallel_size
        batch = build_micro_batch(self.sources, packed, settings=settings)
        capacity = settings.tokens_per_micro_batch
        if ranks > 1:
            batch = _take_tokens(batch, first=self.context_parallel_rank * capacity // ranks, count=capacity // ranks)
        if not settings.fixed_shapes:
            return batch
        share = 1.0 if settings.objective == "clm" else settings.masking.probability
        masked = masked_capacity(capacity // ranks, probability=share)
        bounds = batch.cu_seqlens_n.numpy()
        bounds = np.concatenate([bounds[:1], pad_to_capacity(bounds[1:], document_capacity(documents), capacity)])
        return replace(
            batch,
            labels_m=torch.from_numpy(pad_to_capacity(batch.labels_m.numpy(), masked, IGNORED_LABEL)),
            masked_positions_m=torch.from_numpy(pad_to_capacity(batch.masked_positions_m.numpy(), masked, 0)),
            cu_seqlens_n=torch.from_numpy(bounds),
        )


def build_steps(batches: Iterator[StreamBatch], *, ahead: int) -> Iterator[StepBatches]:
    """Yield for each global batch the micro-batches of one rank. Different batches may come from different streams.

    While iterating, raise DataError if a corpus is damaged, and StorageError if a remote corpus cannot be read.

    Args:
        ahead: Number of following batches whose documents are prefetched before a step is built. If `batches` ends, its
            last `ahead` batches are not built.
    """
    waiting = deque[StreamBatch]()
    for batch in batches:
        waiting.append(batch)
        if ahead:
            stream, packed, _ = batch
            stream.prefetch(packed)
        if len(waiting) > ahead:
            stream, packed, cursor_after = waiting.popleft()
            yield StepBatches(stream.build(packed), cursor_after)


def build_micro_batch(sources: tuple[Source, ...], packed: PackedSequences, *, settings: BatchSettings) -> PackedBatch:
    """Read, mask and lay out micro_batch_size packed sequences on the CPU, without padding to fixed shapes.

    Raise DataError if a corpus is damaged, and StorageError if a remote corpus cannot be read.
    """
    ids, segments, capacity = settings.token_ids, packed.segments, settings.tokens_per_micro_batch
    ends_n = np.cumsum(segments.packed_lengths_n)
    starts_n = ends_n - segments.packed_lengths_n
    text_starts_n = starts_n + segments.has_cls_n
    real_tokens = int(ends_n[-1])

    tokens_t = np.full(capacity, ids.pad, dtype=np.int64)
    tokens_t[starts_n[segments.has_cls_n]] = ids.cls
    tokens_t[ends_n[segments.has_sep_n] - 1] = ids.sep
    _read_text(sources, segments, text_starts_n, tokens_t)

    # Attention kernels rely on max_seqlen, so padding longer than that is several dummy documents.
    dummy_starts = np.arange(real_tokens, capacity, settings.seq_length)
    bounds = starts_n if settings.batch_layout == "packed" else starts_n[packed.offsets[:-1]]
    if settings.objective == "clm":
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
            scheme=settings.masking,
            ids=ids,
            seed=settings.seed,
        )
        tokens_t[masked.positions_m] = masked.replacements_m
        positions_m, labels_m = masked.positions_m, masked.labels_m
    return PackedBatch(
        tokens_t=torch.from_numpy(tokens_t),
        labels_m=torch.from_numpy(labels_m),
        masked_positions_m=torch.from_numpy(positions_m),
        cu_seqlens_n=torch.from_numpy(np.concatenate([bounds, dummy_starts, [capacity]]).astype(np.int32)),
        max_seqlen=settings.seq_length,
        real_tokens=real_tokens,
        is_causal=settings.objective == "clm",
    )


def _group_by_corpus(sources: tuple[Source, ...], segments: Segments) -> list[tuple[Corpus, slice | NDArray[np.int64]]]:
    """Return each corpus that has segments, and the indices of these segments. Sources of one corpus share an entry."""
    corpora = list({id(source.corpus): source.corpus for source in sources}.values())
    if len(corpora) == 1:
        return [(corpora[0], slice(None))]
    corpus_of_source = np.array([next(i for i, c in enumerate(corpora) if c is source.corpus) for source in sources])
    corpus_n = corpus_of_source[segments.components_n]
    return [(corpora[number], np.flatnonzero(corpus_n == number)) for number in np.unique(corpus_n).tolist()]


def _read_text(
    sources: tuple[Source, ...],
    segments: Segments,
    text_starts_n: NDArray[np.int64],
    tokens_t: NDArray[np.int64],
) -> None:
    """Read the tokens of every segment i, and write them to `tokens_t` from index text_starts_n[i] on."""
    for corpus, members in _group_by_corpus(sources, segments):
        of_corpus = segments[members]
        text = corpus.gather(of_corpus.numbers_n, of_corpus.starts_n, of_corpus.lengths_n)
        read = 0
        for start, length in zip(text_starts_n[members].tolist(), of_corpus.lengths_n.tolist(), strict=True):
            tokens_t[start : start + length] = text[read : read + length]
            read += length


def _take_tokens(batch: PackedBatch, *, first: int, count: int) -> PackedBatch:
    """Return tokens [first, first + count) of a micro-batch, which are the share of one context-parallel rank.

    Masked positions count from `first`; cu_seqlens_n still describes the whole micro-batch.
    """
    positions = batch.masked_positions_m
    inside = (positions >= first) & (positions < first + count)
    return replace(
        batch,
        tokens_t=batch.tokens_t[first : first + count].clone(),
        labels_m=batch.labels_m[inside],
        masked_positions_m=positions[inside] - first,
        real_tokens=min(max(batch.real_tokens - first, 0), count),
    )
