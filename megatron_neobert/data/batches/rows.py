"""The packed rows of one corpus or of a blend, window after window, and the place that has been read to.

All ranks walk the same windows of the same permuted documents and pack them alike, which reads only lengths. Which
documents a window of a blend has follows from its number and the shares alone. A `Cursor` names the next unread row,
and starting there costs the packing of one window.

Where lengths must not change from one micro-batch to the next, for kernels and memory that are planned once, what
varies is filled up to a length that nearly every micro-batch stays below: six standard deviations above the mean. A
micro-batch that exceeds it gets the next multiple of that length.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.data.batches.masking import MaskingScheme, TokenIds
from megatron_neobert.data.batches.order import (
    COMPONENT_SHIFT,
    documents_between,
    documents_of_window,
    windows_of_epoch,
)
from megatron_neobert.data.batches.packing import (
    BatchLayout,
    LongDocuments,
    PackedRows,
    concatenate_rows,
    cut_documents,
    pack_rows,
)
from megatron_neobert.data.corpus.attributes import ChosenDocuments
from megatron_neobert.data.corpus.reader import Corpus

# Packed together. Larger windows waste less but take longer to resume in: 4,096 web-like documents leave less than
# 0.1 % of rows of 1,024 unused and take 2 ms. A cursor is only valid for the value it was saved with.
WINDOW_DOCUMENTS = 4096

IGNORED_LABEL = -100  # at a masked position that only fills up; torch's cross-entropy ignores the same
_DEVIATIONS = 6  # exceeded once in 10^9 draws, if they are normal
_MASKED_MULTIPLE = 128  # FP8 and tensor-core tiles want multiples of 16 and 128
_DOCUMENTS_MULTIPLE = 64  # few different numbers of documents, and few plans of kernels


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
    batch_layout: BatchLayout = "packed"
    document_block_size: int = 1  # neighbouring documents that are shuffled as one; above 1 they are read ahead
    fixed_shapes: bool = False  # fill up what varies in length, so that every micro-batch has the same shapes


@dataclass(frozen=True)
class Source:
    """Documents of a corpus, and their share of the documents of a blend."""

    corpus: Corpus
    documents: range | ChosenDocuments  # the range: contiguous
    weight: int = 1  # documents of every sum(weights) documents of the blend

    def numbers(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The numbers in the corpus of the documents at `indices`, each in [0, len(self.documents))."""
        if isinstance(self.documents, range):
            return self.documents.start + indices
        return self.documents.numbers(indices)


@dataclass(frozen=True)
class Cursor:
    """The next unread row: row `row` of window `window` of epoch `epoch`, all counted from 0.

    A blend has no epoch of its own, since each of its sources has; its windows are counted on without an end.
    """

    epoch: int = 0
    window: int = 0
    row: int = 0


def count_windows(sources: Sequence[Source], settings: BatchSettings) -> int:
    """Windows of an epoch of one source; of a blend more than any run reads, and as many as random draws can number."""
    if len(sources) > 1:
        return 1 << COMPONENT_SHIFT
    return windows_of_epoch(
        len(sources[0].documents), window_documents=WINDOW_DOCUMENTS, block_size=settings.document_block_size
    )


def next_window(sources: Sequence[Source], settings: BatchSettings, cursor: Cursor) -> Cursor:
    """The beginning of the first window of which nothing is read yet."""
    if cursor.row == 0:
        return cursor
    following = cursor.window + 1
    return Cursor(cursor.epoch, following) if following < count_windows(sources, settings) else Cursor(cursor.epoch + 1)


def pack_window(sources: Sequence[Source], settings: BatchSettings, *, epoch: int, window: int) -> PackedRows:
    """The rows of one window, whose documents are packed together from all sources.

    Documents are numbered with their component, which masks depend on through it.
    """
    documents_n, epochs_n, lengths_n = documents_in_window(sources, settings, epoch=epoch, window=window)
    seq_length, long_documents = settings.seq_length, settings.long_documents
    if settings.batch_layout == "concatenated":
        rows = concatenate_rows(documents_n, lengths_n, epochs_n, seq_length=seq_length, long_documents=long_documents)
    else:
        segments = cut_documents(documents_n, lengths_n, epochs_n, seq_length=seq_length, long_documents=long_documents)
        rows = pack_rows(segments, seq_length=seq_length)
    return rows.shuffle(seed=settings.seed, epoch=epoch, window=window)


def documents_in_window(
    sources: Sequence[Source], settings: BatchSettings, *, epoch: int, window: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
    """Number, epoch and length of each document of a window, in their order.

    One source gives its window of that epoch. A source with the share s of a blend has an order without an end, of one
    epoch after another, and gives documents floor(k n s) to floor((k + 1) n s) of it to window k of n documents. So of
    any m windows in a row it has floor or ceil of m n s documents, no other source can shift its place, and any window
    is found directly. n is a multiple of the sum of the weights where that is at most 4,096: then n s is whole, and
    every window has the shares exactly. Within a window the documents of each source are spread evenly.
    """
    period = sum(source.weight for source in sources)
    size = WINDOW_DOCUMENTS // period * period or WINDOW_DOCUMENTS
    columns = []
    for component, source in enumerate(sources):
        order: dict[str, int] = {
            "documents": len(source.documents),
            "block_size": settings.document_block_size,
            "seed": settings.seed,
            "component": component,
        }
        if len(sources) == 1:
            indices = documents_of_window(window, window_documents=WINDOW_DOCUMENTS, epoch=epoch, **order)
            epochs_n = np.full(len(indices), epoch)
        else:
            first, stop = (number * size * source.weight // period for number in (window, window + 1))
            per_window = max(1, size * source.weight // period)
            indices, epochs_n = documents_between(first, stop, window_documents=per_window, **order)
        numbers = source.numbers(indices)
        documents_n = numbers + (component << COMPONENT_SHIFT)
        places_n = (np.arange(len(numbers)) + 0.5) / max(1, len(numbers))
        columns.append((documents_n, epochs_n, source.corpus.lengths_of(numbers), places_n))
    documents_n, epochs_n, lengths_n, places_n = map(np.concatenate, zip(*columns, strict=True))
    evenly = np.argsort(places_n, kind="stable")
    return documents_n[evenly], epochs_n[evenly], lengths_n[evenly]


def usual_masked(tokens: int, *, probability: float) -> int:
    """Masked positions to make room for in `tokens` slots."""
    deviation = math.sqrt(tokens * probability * (1 - probability))
    return _round_up(tokens * probability + _DEVIATIONS * deviation, _MASKED_MULTIPLE)


def usual_documents(sources: Sequence[Source], settings: BatchSettings) -> int:
    """Documents to make room for in a micro-batch, dummy documents among them.

    Goes by the rows of the first window: how many documents share a row varies a hundredfold between web pages and
    single sentences, and empty documents cost attention kernels time. (Web pages in 64 rows of 1,024: 256 for 139 on
    average and at most 201 in 1,000 micro-batches; sentences: 5,376 for 3,804 and 4,231.)
    """
    if settings.batch_layout == "concatenated":
        return _round_up(settings.micro_batch_size + 1, _DOCUMENTS_MULTIPLE)
    documents_of_rows = np.diff(pack_window(sources, settings, epoch=0, window=0).row_offsets)
    mean, square = float(documents_of_rows.mean()), float((documents_of_rows**2).mean())
    rows_at_once = settings.micro_batch_size
    deviation = math.sqrt(rows_at_once * max(0.0, square - mean**2))
    return _round_up(rows_at_once * mean + _DEVIATIONS * deviation + 1, _DOCUMENTS_MULTIPLE)


def fill_up(values: NDArray[np.generic], usual: int, filler: int) -> NDArray[np.generic]:
    """The values and as many fillers as it takes to reach `usual` entries or the next multiple of that."""
    missing = usual * max(1, -(-len(values) // usual)) - len(values)
    return np.concatenate([values, np.full(missing, filler, dtype=values.dtype)])


def _round_up(number: float, multiple: int) -> int:
    return max(1, math.ceil(number / multiple)) * multiple
