"""Global batch k, and the micro-batches of it that one rank trains on.

Batch k is a function of (sources, settings, k) alone. All ranks pack the same rows in the same order, which reads only
lengths; each rank then reads, masks and lays out the tokens of its own micro-batches. The ranks of one copy of the
model (tensor, pipeline, context) do so each for itself, which costs less than sending.

Letters: `t` tokens of a micro-batch, `n` documents and dummy documents (plus one), `m` masked tokens.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_neobert.data.batches.masking import mask_tokens
from megatron_neobert.data.batches.packing import PackedRows, Segments, join_rows
from megatron_neobert.data.batches.rows import (
    IGNORED_LABEL,
    BatchSettings,
    Cursor,
    Source,
    count_windows,
    fill_up,
    next_window,
    pack_window,
    usual_documents,
    usual_masked,
)
from megatron_neobert.data.corpus.reader import Corpus
from megatron_neobert.errors import CheckpointError

_REMOTE_STEPS_AHEAD = 4  # whose blocks are being fetched while a step is trained


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch: the documents of its rows end to end, [CLS] ... [SEP] each, then the unused slots.

    Unused slots hold [PAD] and form dummy documents at the end, usually one, never one above max_seqlen tokens.
    Position ids follow from cu_seqlens_n: they restart at every document. In the concatenated layout a whole row counts
    as one document there. A context-parallel rank holds the t slots of its share, but all of cu_seqlens_n.

    With fixed shapes, documents without tokens follow unless bounds are exact, and masked positions 0 with the label
    IGNORED_LABEL.
    """

    tokens_t: Tensor  # int64
    labels_m: Tensor  # int64, original ids at the masked positions
    masked_positions_m: Tensor  # int64 in tokens_t, increasing up to those that only fill up
    cu_seqlens_n: Tensor  # int32, from 0 to all slots; entries i and i + 1 bound document i
    max_seqlen: int  # tokens; the row length unless bounds are exact, so that kernels need not be chosen anew
    real_tokens: int  # tokens of tokens_t that are not in a dummy document

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "PackedBatch":
        return self._with_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "PackedBatch":
        """Called by torch's DataLoader."""
        return self._with_tensors(lambda tensor: tensor.pin_memory())

    def _with_tensors(self, change: Any) -> "PackedBatch":
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **{name: change(tensor) for name, tensor in tensors.items()})


@dataclass(frozen=True)
class StepBatches:
    """Micro-batches of one rank for one training step."""

    micro_batches: list[PackedBatch]
    # Where the next step starts, on every rank: what a checkpoint stores once this step is done.
    cursor_after: Cursor

    @property
    def real_tokens(self) -> int:
        """Tokens of this rank's micro-batches that are not in a dummy document."""
        return sum(batch.real_tokens for batch in self.micro_batches)

    def pin_memory(self) -> "StepBatches":
        """Called by torch's DataLoader."""
        return replace(self, micro_batches=[batch.pin_memory() for batch in self.micro_batches])


StreamBatch = tuple["BatchStream", PackedRows, Cursor]  # a global batch, and the cursor behind it


@dataclass(frozen=True)
class BatchStream:
    """The batches of one rank from a cursor on, epoch after epoch without an end.

    Micro-batch j of a step is rows [j, j + 1) * micro_batch_size of its global batch, and data-parallel rank d of D
    trains on j = d, d + D, ...: the set of micro-batches does not depend on D. Context-parallel rank c of C has the
    slots [c, c + 1) * t / C of them. The rules of the settings make sure that these are whole numbers.
    """

    sources: tuple[Source, ...]  # one, or the parts of a blend
    settings: BatchSettings
    cursor: Cursor = Cursor()  # noqa: RUF009  frozen
    data_parallel_rank: int = 0
    data_parallel_size: int = 1
    context_parallel_rank: int = 0
    context_parallel_size: int = 1

    def steps(self, *, first: int = 0, every: int = 1) -> Iterator[StepBatches]:
        """Steps first, first + every, ... counted from the cursor; those between are packed but not read.

        Raises:
            CheckpointError: The cursor names a row that these sources do not have.
        """
        batches = ((self, rows, cursor_after) for rows, cursor_after in self.global_batches())
        return build_steps(islice(batches, first, None, every), ahead=self.steps_ahead)

    def global_batches(self) -> Iterator[tuple[PackedRows, Cursor]]:
        """The rows of each step for all ranks, and the cursor behind them. Batches run on across windows and epochs."""
        cursor, rows = self.cursor, None
        while True:
            parts: list[PackedRows] = []
            missing = self.settings.global_batch_size
            while missing:
                rows = rows or self._rows_of_window(cursor)
                stop = min(cursor.row + missing, len(rows))
                parts.append(rows.take(cursor.row, stop))
                missing -= stop - cursor.row
                cursor = replace(cursor, row=stop)
                if stop == len(rows):
                    cursor, rows = next_window(self.sources, self.settings, cursor), None
            yield join_rows(parts), cursor

    def _rows_of_window(self, cursor: Cursor) -> PackedRows:
        if cursor.window < count_windows(self.sources, self.settings):
            rows = pack_window(self.sources, self.settings, epoch=cursor.epoch, window=cursor.window)
            if cursor.row <= len(rows):
                return rows
        raise CheckpointError(
            f"the checkpoint continues at row {cursor.row:,} of window {cursor.window:,}, which these documents do not "
            "have; the corpus, --split, --seq-length, --long-documents or --seed is not the one it was saved with. "
            "Resume with the same, or start at the corpus's beginning with a new run."
        )

    @property
    def steps_ahead(self) -> int:
        """Number of steps by which documents are announced before their step is built; 0: never."""
        return _REMOTE_STEPS_AHEAD if any(source.corpus.is_remote for source in self.sources) else 0

    @property
    def _slots(self) -> int:
        """Token slots of a micro-batch over all context-parallel ranks."""
        return self.settings.micro_batch_size * self.settings.seq_length

    @cached_property
    def _usual_documents(self) -> int:
        return usual_documents(self.sources, self.settings)

    def build(self, rows: PackedRows) -> list[PackedBatch]:
        """This rank's micro-batches of a global batch."""
        return [self._build(part) for part in self.own_micro_batches(rows)]

    def announce(self, rows: PackedRows) -> None:
        """Have this rank's part of a global batch fetched from object storage, without waiting for it."""
        for part in self.own_micro_batches(rows):
            for corpus, members in _group_by_corpus(self.sources, part.segments):
                corpus.prefetch(part.segments.numbers_n[members])

    def own_micro_batches(self, rows: PackedRows) -> list[PackedRows]:
        """The rows of each of this rank's micro-batches of a global batch."""
        size = self.settings.micro_batch_size
        firsts = range(0, self.settings.global_batch_size, size)[self.data_parallel_rank :: self.data_parallel_size]
        return [rows.take(first, first + size) for first in firsts]

    def _build(self, rows: PackedRows) -> PackedBatch:
        settings, ranks = self.settings, self.context_parallel_size
        batch = build_micro_batch(self.sources, rows, settings=settings)
        if ranks > 1:
            batch = _take_slots(
                batch, first=self.context_parallel_rank * self._slots // ranks, count=self._slots // ranks
            )
        if not settings.fixed_shapes:
            return batch
        masked = usual_masked(self._slots // ranks, probability=settings.masking.probability)
        bounds = batch.cu_seqlens_n.numpy()
        bounds = np.concatenate([bounds[:1], fill_up(bounds[1:], self._usual_documents, self._slots)])
        return replace(
            batch,
            labels_m=torch.from_numpy(fill_up(batch.labels_m.numpy(), masked, IGNORED_LABEL)),
            masked_positions_m=torch.from_numpy(fill_up(batch.masked_positions_m.numpy(), masked, 0)),
            cu_seqlens_n=torch.from_numpy(bounds),
        )


def build_steps(batches: Iterator[StreamBatch], *, ahead: int) -> Iterator[StepBatches]:
    """The steps of some global batches without an end, whichever streams they are of.

    Args:
        ahead: Each is built after this rank's part of so many that follow has been announced.
    """
    waiting = deque[StreamBatch]()
    for batch in batches:
        waiting.append(batch)
        if ahead:
            stream, rows, _ = batch
            stream.announce(rows)
        if len(waiting) > ahead:
            stream, rows, cursor_after = waiting.popleft()
            yield StepBatches(stream.build(rows), cursor_after)


def build_micro_batch(sources: tuple[Source, ...], rows: PackedRows, *, settings: BatchSettings) -> PackedBatch:
    """Reads, masks and lays out micro_batch_size rows."""
    ids, segments = settings.token_ids, rows.segments
    slots = settings.micro_batch_size * settings.seq_length
    ends_n = np.cumsum(segments.slots_n)
    starts_n = ends_n - segments.slots_n
    text_starts_n = starts_n + segments.has_cls_n
    real_tokens = int(ends_n[-1])

    tokens_t = np.full(slots, ids.pad, dtype=np.int64)
    tokens_t[starts_n[segments.has_cls_n]] = ids.cls
    tokens_t[ends_n[segments.has_sep_n] - 1] = ids.sep
    _read_text(sources, segments, text_starts_n, tokens_t)

    has_text_n = segments.lengths_n > 0  # a row of the concatenated layout can be cut right before or behind the text
    masked = mask_tokens(
        tokens_t,
        segments[has_text_n],
        text_starts_n[has_text_n],
        scheme=settings.masking,
        ids=ids,
        seed=settings.seed,
    )
    tokens_t[masked.positions_m] = masked.replacements_m
    # More than one dummy document only where more than a row is unused: attention kernels rely on max_seqlen.
    dummy_starts = np.arange(real_tokens, slots, settings.seq_length)
    bounds = starts_n if settings.batch_layout == "packed" else starts_n[rows.row_offsets[:-1]]
    return PackedBatch(
        tokens_t=torch.from_numpy(tokens_t),
        labels_m=torch.from_numpy(masked.labels_m),
        masked_positions_m=torch.from_numpy(masked.positions_m),
        cu_seqlens_n=torch.from_numpy(np.concatenate([bounds, dummy_starts, [slots]]).astype(np.int32)),
        max_seqlen=settings.seq_length,
        real_tokens=real_tokens,
    )


def _group_by_corpus(sources: tuple[Source, ...], segments: Segments) -> list[tuple[Corpus, slice | NDArray[np.int64]]]:
    """Each corpus that the segments are read from, and which of them; sources may share one."""
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
    """Copies the tokens of every segment to its place in tokens_t."""
    for corpus, members in _group_by_corpus(sources, segments):
        own = segments[members]
        content = corpus.gather(own.numbers_n, own.starts_n, own.lengths_n)
        read = 0
        for start, length in zip(text_starts_n[members].tolist(), own.lengths_n.tolist(), strict=True):
            tokens_t[start : start + length] = content[read : read + length]
            read += length


def _take_slots(batch: PackedBatch, *, first: int, count: int) -> PackedBatch:
    """The part of a micro-batch that one context-parallel rank holds."""
    positions = batch.masked_positions_m
    own = (positions >= first) & (positions < first + count)
    return replace(
        batch,
        tokens_t=batch.tokens_t[first : first + count].clone(),
        labels_m=batch.labels_m[own],
        masked_positions_m=positions[own] - first,
        real_tokens=min(max(batch.real_tokens - first, 0), count),
    )
