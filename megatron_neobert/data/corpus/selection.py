"""The documents of a corpus whose lengths lie within limits, without a list of them.

One count per 256 documents leads to the block of the n-th of them, and the lengths of those 256 to its place: 31 MB for
10^9 documents for any share that is kept. Counting them reads every length once, 0.1 s for 10^8 that the page cache
holds, and looking up a window of 4,096 takes about 6 ms.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.data.corpus.reader import Corpus

_BLOCK = 256  # documents that share a count
_BLOCKS_AT_ONCE = 4096  # counted together


class KeptDocuments:
    """The documents of a range that have minimum to maximum tokens, numbered from 0 in the order of the corpus."""

    def __init__(self, corpus: Corpus, documents: range, *, minimum: int, maximum: int | None) -> None:
        self.corpus, self.documents, self.minimum, self.maximum = corpus, documents, minimum, maximum
        self._tables = _tables_of_lengths(corpus, documents)  # each with the document that its first entry belongs to
        counts = [self._count(lengths_bw) for _, lengths_bw in self._tables]
        self._ends = np.cumsum(np.concatenate([[0], *counts]))  # documents kept before each block; of all at the end
        self._first_blocks = np.cumsum([0, *(len(count) for count in counts)])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __reduce__(self) -> tuple[Any, ...]:
        return _select, (self.corpus, self.documents, self.minimum, self.maximum)  # another process counts for itself

    def numbers(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The numbers in the corpus of the kept documents `indices`, each in [0, len(self))."""
        blocks = np.searchsorted(self._ends, indices, side="right") - 1
        places = indices - self._ends[blocks]  # among the kept of the block
        tables = np.searchsorted(self._first_blocks, blocks, side="right") - 1
        numbers = np.empty(len(indices), dtype=np.int64)
        for table in np.unique(tables).tolist():
            own = np.flatnonzero(tables == table)
            first_document, lengths_bw = self._tables[table]
            local = blocks[own] - self._first_blocks[table]
            kept_before = np.cumsum(self._is_kept(lengths_bw[local]), axis=1, dtype=np.int16)
            in_block = np.argmax(kept_before > places[own, None], axis=1)
            numbers[own] = first_document + local * lengths_bw.shape[1] + in_block
        return numbers

    def _is_kept(self, lengths: NDArray[np.int32]) -> NDArray[np.bool_]:
        if self.maximum is None:
            return lengths >= self.minimum
        return (lengths >= self.minimum) & (lengths <= self.maximum)

    def _count(self, lengths_bw: NDArray[np.int32]) -> NDArray[np.int64]:
        """Kept documents of each block."""
        counts = np.empty(len(lengths_bw), dtype=np.int64)
        for first in range(0, len(lengths_bw), _BLOCKS_AT_ONCE):
            some = slice(first, first + _BLOCKS_AT_ONCE)
            counts[some] = np.count_nonzero(self._is_kept(lengths_bw[some]), axis=1)
        return counts


def _select(corpus: Corpus, documents: range, minimum: int, maximum: int | None) -> KeptDocuments:
    return KeptDocuments(corpus, documents, minimum=minimum, maximum=maximum)


def _tables_of_lengths(corpus: Corpus, documents: range) -> list[tuple[int, NDArray[np.int32]]]:
    """The lengths of a range as tables of whole blocks, one block a row, and of the rest of each volume."""
    tables = []
    first = 0
    for lengths in corpus.length_arrays():
        begin = max(documents.start - first, 0)
        own = lengths[begin : max(documents.stop - first, 0)]
        whole = len(own) - len(own) % _BLOCK
        tables.append((first + begin, own[:whole].reshape(-1, _BLOCK)))
        tables.append((first + begin + whole, own[whole:].reshape(1, -1)))
        first += len(lengths)
    return [(document, table) for document, table in tables if table.size]
