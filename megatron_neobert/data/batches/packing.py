"""Packing of documents, or pieces of documents, into rows (packed sequences).

Pure functions of lengths: they read no token. A window of documents is cut into segments that fit a row together with
their [CLS] and [SEP], the segments are packed by best-fit decreasing, and the rows are shuffled (best-fit decreasing
makes rows of long documents first). Windows of 4,096 web-like documents leave less than 0.1 % of rows of 1,024
tokens unused. About 2 M documents per second on one core. The other layout concatenates the documents of a window and
cuts rows wherever they are full, through documents.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.data.batches.order import COMPONENT_SHIFT
from megatron_neobert.data.batches.philox import Stream, draw_words

ADDED_TOKENS = 2  # [CLS] before and [SEP] after each segment

LongDocuments = Literal["truncate", "chunk"]
BatchLayout = Literal["packed", "concatenated"]


@dataclass(frozen=True)
class Segments:
    """Pieces of documents, n of them."""

    documents_n: NDArray[np.int64]  # number in the corpus; of a blend with the component from bit 48 on
    epochs_n: NDArray[np.int64]
    starts_n: NDArray[np.int64]  # first token, counted in the document
    lengths_n: NDArray[np.int64]  # tokens of the document, without [CLS] and [SEP]
    has_cls_n: NDArray[np.bool_]  # whether [CLS] stands before the tokens; only a concatenated row begins without
    has_sep_n: NDArray[np.bool_]  # and [SEP] behind them

    @property
    def components_n(self) -> NDArray[np.int64]:
        """The component of the blend that each is of; 0 of a single corpus."""
        return self.documents_n >> COMPONENT_SHIFT

    @property
    def numbers_n(self) -> NDArray[np.int64]:
        """The document's number inside its corpus."""
        return self.documents_n & ((1 << COMPONENT_SHIFT) - 1)

    @property
    def slots_n(self) -> NDArray[np.int64]:
        """Tokens of a row that each takes."""
        return self.lengths_n + self.has_cls_n + self.has_sep_n

    def __len__(self) -> int:
        return len(self.documents_n)

    def __getitem__(self, index: slice | NDArray[np.int64] | NDArray[np.bool_]) -> "Segments":
        return Segments(*(values[index] for values in vars(self).values()))


@dataclass(frozen=True)
class PackedRows:
    """Rows one after another: row r holds segments [row_offsets[r], row_offsets[r + 1])."""

    segments: Segments
    row_offsets: NDArray[np.int64]  # rows + 1 entries

    def __len__(self) -> int:
        return len(self.row_offsets) - 1

    def take(self, start: int, stop: int) -> "PackedRows":
        """Rows [start, stop)."""
        first, last = self.row_offsets[start], self.row_offsets[stop]
        return PackedRows(self.segments[first:last], self.row_offsets[start : stop + 1] - first)

    def shuffle(self, *, seed: int, epoch: int, window: int) -> "PackedRows":
        """Return the rows in the random order of a window."""
        keys = draw_words(Stream.ROW_ORDER, seed=seed, epoch=epoch, item=window, index=np.arange(len(self)))
        rows = np.argsort(keys.view(np.uint64)[:, 0], kind="stable")
        segments_of_row = np.diff(self.row_offsets)[rows]
        offsets = np.concatenate([[0], np.cumsum(segments_of_row)])
        shift_of_row = self.row_offsets[rows] - offsets[:-1]
        return PackedRows(self.segments[np.arange(offsets[-1]) + np.repeat(shift_of_row, segments_of_row)], offsets)


def join_rows(parts: Sequence[PackedRows]) -> PackedRows:
    """The rows of all parts, in their order."""
    segments_of_rows = np.concatenate([np.diff(part.row_offsets) for part in parts])
    columns = zip(*(vars(part.segments).values() for part in parts), strict=True)
    return PackedRows(
        Segments(*(np.concatenate(column) for column in columns)),
        row_offsets=np.concatenate([[0], np.cumsum(segments_of_rows)]),
    )


def cut_documents(
    documents_n: NDArray[np.int64],
    lengths_n: NDArray[np.int32],
    epochs_n: NDArray[np.int64],
    *,
    seq_length: int,
    long_documents: LongDocuments,
) -> Segments:
    """Documents as segments of at most seq_length tokens including [CLS] and [SEP].

    Args:
        lengths_n: Tokens of each document, at least 1.
        long_documents: `truncate` keeps the first segment of each document, `chunk` keeps all.
    """
    segment_tokens = seq_length - ADDED_TOKENS
    segments_n = -(-lengths_n.astype(np.int64) // segment_tokens)
    if long_documents == "truncate":
        segments_n = np.minimum(segments_n, 1)
    source = np.repeat(np.arange(len(segments_n)), segments_n)
    place_in_document = np.arange(len(source)) - np.repeat(np.cumsum(segments_n) - segments_n, segments_n)
    starts = place_in_document * segment_tokens
    return Segments(
        documents_n=documents_n[source],
        epochs_n=epochs_n[source],
        starts_n=starts,
        lengths_n=np.minimum(lengths_n[source] - starts, segment_tokens),
        has_cls_n=np.ones(len(source), dtype=np.bool_),
        has_sep_n=np.ones(len(source), dtype=np.bool_),
    )


def pack_rows(segments: Segments, *, seq_length: int) -> PackedRows:
    """Return the segments of one window in rows of at most seq_length tokens, rows of long segments first."""
    by_decreasing_length = np.argsort(-segments.lengths_n, kind="stable")
    tokens = segments.lengths_n[by_decreasing_length] + ADDED_TOKENS
    row_of_segment = np.array(best_fit_decreasing(tokens.tolist(), row_tokens=seq_length), dtype=np.int64)
    return PackedRows(
        segments[by_decreasing_length[np.argsort(row_of_segment, kind="stable")]],
        row_offsets=np.concatenate([[0], np.cumsum(np.bincount(row_of_segment))]),
    )


def concatenate_rows(
    documents_n: NDArray[np.int64],
    lengths_n: NDArray[np.int32],
    epochs_n: NDArray[np.int64],
    *,
    seq_length: int,
    long_documents: LongDocuments,
) -> PackedRows:
    """Return the documents of one window end to end, cut into rows of seq_length tokens.

    A document stands whole between one [CLS] and one [SEP] wherever rows cut it. All rows are full but the one that
    ends the window.

    Args:
        long_documents: `truncate` keeps what fits a row with [CLS] and [SEP] of each document, `chunk` keeps all.
    """
    kept_n = lengths_n.astype(np.int64)
    if long_documents == "truncate":
        kept_n = np.minimum(kept_n, seq_length - ADDED_TOKENS)
    ends_n = np.cumsum(kept_n + ADDED_TOKENS)
    begins_n = ends_n - kept_n - ADDED_TOKENS
    row_begins = np.arange(0, ends_n[-1], seq_length)
    # A piece begins where a document or a row does. Slot 0 of a document is its [CLS], slot 1 its first token.
    begins = np.union1d(begins_n, row_begins)
    source = np.searchsorted(begins_n, begins, side="right") - 1
    first_slots = begins - begins_n[source]
    end_slots = np.append(begins[1:], ends_n[-1]) - begins_n[source]
    has_cls, has_sep = first_slots == 0, end_slots == kept_n[source] + ADDED_TOKENS
    starts = first_slots - 1 + has_cls
    pieces = Segments(
        documents_n=documents_n[source],
        epochs_n=epochs_n[source],
        starts_n=starts,
        lengths_n=end_slots - 1 - has_sep - starts,
        has_cls_n=has_cls,
        has_sep_n=has_sep,
    )
    return PackedRows(pieces, np.append(np.searchsorted(begins, row_begins), len(begins)))


def best_fit_decreasing(tokens: list[int], *, row_tokens: int) -> list[int]:
    """The row of each segment: the fullest row that still has room, else a new one.

    Bit c of an integer marks that some row has exactly c free slots. Shifting it by the segment's size and taking the
    lowest bit finds the fullest row in one step of big-integer arithmetic, for any number of rows.

    Args:
        tokens: Size of each segment, decreasing, at most row_tokens.
    """
    smallest = tokens[-1]
    rows_by_free: list[list[int]] = [[] for _ in range(row_tokens + 1)]
    free_sizes = 0
    rows = 0
    row_of_segment = []
    for size in tokens:
        fitting = free_sizes >> size
        if fitting:
            free = size + (fitting & -fitting).bit_length() - 1
            candidates = rows_by_free[free]
            row = candidates.pop()
            if not candidates:
                free_sizes ^= 1 << free
        else:
            free = row_tokens
            row = rows
            rows += 1
        row_of_segment.append(row)
        free -= size
        if free >= smallest:
            rows_by_free[free].append(row)
            free_sizes |= 1 << free
    return row_of_segment
