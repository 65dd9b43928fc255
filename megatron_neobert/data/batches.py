"""Global batch k, and the micro-batches of it that one rank trains on.

Batch k is a function of (corpus, range of documents, settings, k) alone. All ranks walk the same windows of the same
permuted documents and pack them alike, which reads only lengths; each rank then reads, masks and lays out the tokens
of its own micro-batches. A `Cursor` names the next unread row, and starting there costs the packing of one window.

Letters: `t` tokens of a micro-batch, `n` documents and dummy documents (plus one), `m` masked tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_neobert.data.corpus import Lengths
from megatron_neobert.data.masking import MaskingScheme, TokenIds, mask_tokens
from megatron_neobert.data.order import permute
from megatron_neobert.data.packing import (
    ADDED_TOKENS,
    LongDocuments,
    PackedRows,
    Segments,
    cut_documents,
    join_rows,
    pack_rows,
)
from megatron_neobert.errors import CheckpointError, ConfigError, DataError

# Packed together. Larger windows waste less but take longer to resume in: 4,096 web-like documents leave less than
# 0.1 % of rows of 1,024 unused and take 2 ms. A cursor is only valid for the value it was saved with.
WINDOW_DOCUMENTS = 4096


class Documents(Protocol):
    """What batches need of a corpus."""

    @property
    def lengths(self) -> Lengths:
        """Tokens of each document, at least 1."""

    def gather(
        self, documents: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> NDArray[Any]:
        """The ids of lengths[i] tokens from token starts[i] of documents[i], for all i end to end."""


@dataclass(frozen=True)
class BatchSettings:
    """Everything besides the documents that decides what batch k is."""

    seq_length: int  # tokens per row
    micro_batch_size: int  # rows
    global_batch_size: int  # rows
    long_documents: LongDocuments
    masking: MaskingScheme
    token_ids: TokenIds
    seed: int


@dataclass(frozen=True)
class Cursor:
    """The next unread row: row `row` of window `window` of epoch `epoch`, all counted from 0."""

    epoch: int = 0
    window: int = 0
    row: int = 0


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch: the documents of its rows end to end, [CLS] ... [SEP] each, then the unused slots.

    Unused slots hold [PAD] and form dummy documents at the end, usually one, never one above max_seqlen tokens.
    Position ids follow from cu_seqlens_n: they restart at every document.
    """

    tokens_t: Tensor  # int64
    labels_m: Tensor  # int64, original ids at the masked positions
    masked_positions_m: Tensor  # int64, increasing
    cu_seqlens_n: Tensor  # int32, from 0 to t; entries i and i + 1 bound document i
    max_seqlen: int  # tokens; the row length whatever the documents, so that kernels need not be chosen anew
    real_tokens: int  # tokens that are not in a dummy document

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "PackedBatch":
        return self._with_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "PackedBatch":
        """Called by torch's DataLoader."""
        return self._with_tensors(lambda tensor: tensor.pin_memory())

    def _with_tensors(self, change: Any) -> "PackedBatch":
        return replace(
            self,
            tokens_t=change(self.tokens_t),
            labels_m=change(self.labels_m),
            masked_positions_m=change(self.masked_positions_m),
            cu_seqlens_n=change(self.cu_seqlens_n),
        )


@dataclass(frozen=True)
class StepBatches:
    """What one rank trains on in one training step."""

    micro_batches: list[PackedBatch]
    cursor_after: Cursor  # where the next step starts, on every rank: what a checkpoint stores once this step is done

    @property
    def real_tokens(self) -> int:
        """Tokens of this rank's micro-batches that are not in a dummy document."""
        return sum(batch.real_tokens for batch in self.micro_batches)

    def pin_memory(self) -> "StepBatches":
        """Called by torch's DataLoader."""
        return replace(self, micro_batches=[batch.pin_memory() for batch in self.micro_batches])


@dataclass(frozen=True)
class BatchStream:
    """The batches of one data-parallel rank from a cursor on, epoch after epoch without an end.

    Micro-batch j of a step is rows [j, j + 1) * micro_batch_size of its global batch, and rank d of D trains on
    j = d, d + D, ...: the set of micro-batches does not depend on D.

    Raises:
        ConfigError: Batch sizes that the ranks cannot share evenly.
        DataError: No documents.
        CheckpointError: The cursor lies outside this corpus; raised when its window is read if only the row does.
    """

    corpus: Documents
    documents: range  # contiguous
    settings: BatchSettings
    cursor: Cursor = Cursor()
    data_parallel_rank: int = 0
    data_parallel_size: int = 1

    def __post_init__(self) -> None:
        settings, ranks = self.settings, self.data_parallel_size
        if settings.global_batch_size % (settings.micro_batch_size * ranks):
            raise ConfigError(
                f"--global-batch-size {settings.global_batch_size} is not a multiple of --micro-batch-size "
                f"{settings.micro_batch_size} × {ranks} data-parallel ranks = {settings.micro_batch_size * ranks}; "
                "every rank trains on the same number of micro-batches. Change one of the two sizes."
            )
        if not self.documents:
            raise DataError(
                f"documents {self.documents.start:,} to {self.documents.stop:,} of the corpus are none; "
                "batches need at least one document. Use a larger corpus or another --split."
            )
        if self.cursor.window >= self._windows:
            raise CheckpointError(
                f"the checkpoint continues at window {self.cursor.window:,} of an epoch, but {len(self.documents):,} "
                f"documents fill {self._windows:,} windows; the corpus or --split is not the one it was saved with. "
                "Resume with that corpus, or start at its beginning with a new run."
            )

    @property
    def _windows(self) -> int:
        return -(-len(self.documents) // WINDOW_DOCUMENTS)

    def steps(self, *, first: int = 0, every: int = 1) -> Iterator[StepBatches]:
        """Steps first, first + every, ... counted from the cursor; those between are packed but not read.

        Raises:
            CheckpointError: The cursor names a row that its window does not have.
        """
        rows_per_step = range(0, self.settings.global_batch_size, self.settings.micro_batch_size)
        own_rows = rows_per_step[self.data_parallel_rank :: self.data_parallel_size]
        for rows, cursor_after in islice(self.global_batches(), first, None, every):
            micro_batches = [
                build_micro_batch(
                    self.corpus, rows.take(row, row + self.settings.micro_batch_size).segments, settings=self.settings
                )
                for row in own_rows
            ]
            yield StepBatches(micro_batches, cursor_after)

    def global_batches(self) -> Iterator[tuple[PackedRows, Cursor]]:
        """The rows of each step for all ranks, and the cursor behind them. Batches run on across windows and epochs."""
        parts: list[PackedRows] = []
        missing = self.settings.global_batch_size
        row = self.cursor.row
        for epoch, window in self._windows_from_cursor():
            rows = self._pack_window(epoch, window)
            if row > len(rows):
                raise CheckpointError(
                    f"the checkpoint continues at row {row:,} of window {window:,}, which has {len(rows):,} rows; the "
                    "corpus, --split, --seq-length, --long-documents or --seed is not the one it was saved with. "
                    "Resume with the same, or start at the corpus's beginning with a new run."
                )
            while row < len(rows):
                taken = min(missing, len(rows) - row)
                parts.append(rows.take(row, row + taken))
                row += taken
                missing -= taken
                if not missing:
                    yield join_rows(parts), self._cursor_at(epoch, window, row, rows_of_window=len(rows))
                    parts, missing = [], self.settings.global_batch_size
            row = 0

    def _windows_from_cursor(self) -> Iterator[tuple[int, int]]:
        epoch, first_window = self.cursor.epoch, self.cursor.window
        while True:
            for window in range(first_window, self._windows):
                yield epoch, window
            epoch, first_window = epoch + 1, 0

    def _cursor_at(self, epoch: int, window: int, row: int, *, rows_of_window: int) -> Cursor:
        if row < rows_of_window:
            return Cursor(epoch, window, row)
        return Cursor(epoch, window + 1) if window + 1 < self._windows else Cursor(epoch + 1)

    def _pack_window(self, epoch: int, window: int) -> PackedRows:
        settings = self.settings
        first = window * WINDOW_DOCUMENTS
        indices = np.arange(first, min(first + WINDOW_DOCUMENTS, len(self.documents)))
        documents = self.documents.start + permute(indices, size=len(self.documents), seed=settings.seed, epoch=epoch)
        segments = cut_documents(
            documents,
            self.corpus.lengths[documents],
            epoch=epoch,
            seq_length=settings.seq_length,
            long_documents=settings.long_documents,
        )
        return pack_rows(segments, seq_length=settings.seq_length, seed=settings.seed, epoch=epoch, window=window)


def build_micro_batch(corpus: Documents, segments: Segments, *, settings: BatchSettings) -> PackedBatch:
    """Reads, masks and lays out the segments of micro_batch_size rows."""
    ids = settings.token_ids
    slots = settings.micro_batch_size * settings.seq_length
    ends_n = np.cumsum(segments.lengths_n + ADDED_TOKENS)
    starts_n = ends_n - segments.lengths_n - ADDED_TOKENS
    real_tokens = int(ends_n[-1])

    tokens_t = np.full(slots, ids.pad, dtype=np.int64)
    tokens_t[starts_n] = ids.cls
    tokens_t[ends_n - 1] = ids.sep
    content = corpus.gather(segments.documents_n, segments.starts_n, segments.lengths_n)
    read = 0
    for start, length in zip((starts_n + 1).tolist(), segments.lengths_n.tolist(), strict=True):
        tokens_t[start : start + length] = content[read : read + length]
        read += length

    masked = mask_tokens(tokens_t, segments, starts_n + 1, scheme=settings.masking, ids=ids, seed=settings.seed)
    tokens_t[masked.positions_m] = masked.replacements_m
    # More than one dummy document only where more than a row is unused: attention kernels rely on max_seqlen.
    dummy_starts = np.arange(real_tokens, slots, settings.seq_length)
    return PackedBatch(
        tokens_t=torch.from_numpy(tokens_t),
        labels_m=torch.from_numpy(masked.labels_m),
        masked_positions_m=torch.from_numpy(masked.positions_m),
        cu_seqlens_n=torch.from_numpy(np.concatenate([starts_n, dummy_starts, [slots]]).astype(np.int32)),
        max_seqlen=settings.seq_length,
        real_tokens=real_tokens,
    )
