"""Which documents of a corpus are read: by the inputs and sources that they came from, by length, by a drop list."""

from bisect import bisect_right
from fnmatch import fnmatchcase
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.data.corpus.drop_list import DropList
from megatron_neobert.data.corpus.reader import Corpus
from megatron_neobert.data.corpus.sources import map_sources
from megatron_neobert.errors import DataError

_BLOCK = 256  # documents that share a count of those with a wanted length
_BLOCKS_AT_ONCE = 4096  # counted together


class KeptDocuments:
    """The documents of a range that some inputs and sources gave, of minimum to maximum tokens, left by a drop list.

    Numbered from 0. One count per 256 documents leads to the block of the n-th of them, and the lengths of those 256 to
    its place: 31 MB for 10^9 documents for any share that is kept. Counting them reads every length once, 0.1 s for
    10^8 that the page cache holds, and looking up a window of 4,096 takes about 6 ms. A drop list is mapped, a bit per
    document, and sources, two bytes each; inputs are ranges, looked up in the manifest.

    Raises:
        MissingInputError, DataError: There is no such drop list, input or source, or the list is not of this corpus.
    """

    def __init__(
        self,
        corpus: Corpus,
        documents: range,
        *,
        minimum: int,
        maximum: int | None,
        drop: str | None = None,
        inputs: str | None = None,
        sources: str | None = None,
    ) -> None:
        self.corpus, self.documents, self.minimum, self.maximum = corpus, documents, minimum, maximum
        self._drop, self._inputs, self._sources = drop, inputs, sources
        self.drop_list = None if drop is None else DropList(Path(drop), corpus.manifest, corpus.prefix)
        self.ranges = [documents] if inputs is None else documents_of_inputs(corpus, inputs, documents)
        self.source_names = list[str]()
        if sources is not None:
            self.source_names = names_of_sources(corpus, sources)
            self._source_of = map_sources(corpus.files.sources, corpus.manifest)
            self._is_wanted = np.zeros(1 << 16, dtype=np.bool_)  # by number
            for number, name in enumerate(corpus.manifest.sources):
                self._is_wanted[number] = name in self.source_names
        # Each with the document that its first entry belongs to.
        self._tables = [table for own in self.ranges for table in _tables_of_lengths(corpus, own)]
        counts = [self._count(first, lengths_bw) for first, lengths_bw in self._tables]
        self._ends = np.cumsum(np.concatenate([[0], *counts]))  # documents kept before each block; of all at the end
        self._first_blocks = np.cumsum([0, *(len(count) for count in counts)])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __reduce__(self) -> tuple[Any, ...]:
        anew = partial(KeptDocuments, self.corpus, self.documents, minimum=self.minimum, maximum=self.maximum)
        # Another process counts for itself.
        return partial(anew, drop=self._drop, inputs=self._inputs, sources=self._sources), ()

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
            begins = first_document + local * lengths_bw.shape[1]
            kept_before = np.cumsum(self._is_kept(begins, lengths_bw[local]), axis=1, dtype=np.int16)
            in_block = np.argmax(kept_before > places[own, None], axis=1)
            numbers[own] = begins + in_block
        return numbers

    def _is_kept(self, begins: NDArray[np.int64], lengths_bw: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Of blocks that begin with these documents."""
        kept = lengths_bw >= self.minimum
        if self.maximum is not None:
            kept &= lengths_bw <= self.maximum
        if self.drop_list is not None:
            kept &= ~self.drop_list.drops(begins, lengths_bw.shape[1])
        if self.source_names:
            kept &= self._is_wanted[self._source_of[begins[:, None] + np.arange(lengths_bw.shape[1])]]
        return kept

    def _count(self, first_document: int, lengths_bw: NDArray[np.int32]) -> NDArray[np.int64]:
        """Kept documents of each block."""
        begins = first_document + np.arange(len(lengths_bw)) * lengths_bw.shape[1]
        counts = np.empty(len(lengths_bw), dtype=np.int64)
        for first in range(0, len(lengths_bw), _BLOCKS_AT_ONCE):
            some = slice(first, first + _BLOCKS_AT_ONCE)
            counts[some] = np.count_nonzero(self._is_kept(begins[some], lengths_bw[some]), axis=1)
        return counts


def _tables_of_lengths(corpus: Corpus, documents: range) -> list[tuple[int, NDArray[np.int32]]]:
    """The lengths of a range as tables of whole blocks, one block a row, and of the rest of each volume."""
    tables = []
    arrays = corpus.length_arrays()
    ends = list(accumulate(map(len, arrays)))
    for number in range(bisect_right(ends, documents.start), len(arrays)):
        first, lengths = ends[number] - len(arrays[number]), arrays[number]
        if first >= documents.stop:
            break
        begin = max(documents.start - first, 0)
        own = lengths[begin : documents.stop - first]
        whole = len(own) - len(own) % _BLOCK
        tables.append((first + begin, own[:whole].reshape(-1, _BLOCK)))
        tables.append((first + begin + whole, own[whole:].reshape(1, -1)))
    return [(document, table) for document, table in tables if table.size]


def _fits(name: str, names: str) -> bool:
    """Match a name against `*` and `?`. File names may have brackets, which fnmatch would read as a set of letters."""
    return fnmatchcase(name, names.replace("[", "[[]"))


def documents_of_inputs(corpus: Corpus, names: str, documents: range) -> list[range]:
    """Those of a range that came from the inputs that `names` fits, as ranges that do not touch.

    Raises:
        DataError: It fits none of the inputs, or these were not counted.
    """
    ranges, first, fits = list[range](), 0, False
    for name, record in corpus.manifest.inputs.items():
        if record.documents is None:
            raise DataError(
                f"{corpus.prefix}: documents were not counted by input when it was written, so :inputs={names} finds "
                "none; preprocess it again, or leave that out"
            )
        stop = first + record.documents
        if _fits(name, names):
            fits, own = True, range(max(first, documents.start), min(stop, documents.stop))
            if own and ranges and ranges[-1].stop == own.start:
                ranges[-1] = range(ranges[-1].start, own.stop)
            elif own:
                ranges.append(own)
        first = stop
    if not fits:
        examples = ", ".join(list(corpus.manifest.inputs)[:3]) or "none, since it was adopted"
        raise DataError(
            f"{corpus.prefix}: none of its {len(corpus.manifest.inputs):,} inputs is called {names}; they are "
            f"{examples} and so on (neobert inspect data --inputs); * stands for any characters, ? for one"
        )
    return ranges


def names_of_sources(corpus: Corpus, names: str) -> list[str]:
    """The sources that `names` fits.

    Raises:
        DataError: It fits none of them, or the corpus does not say which document is of which.
    """
    manifest = corpus.manifest
    if manifest.sources_sha256 is None:
        raise DataError(
            f"{corpus.prefix} does not have the sources of its documents, so :sources={names} finds none; preprocess "
            "it again with --source-key, or leave that out"
        )
    if not (fitting := [name for name in manifest.sources if _fits(name, names)]):
        raise DataError(
            f"{corpus.prefix}: none of its {len(manifest.sources):,} sources is called {names}; they are "
            f"{', '.join(list(manifest.sources)[:3])} and so on (neobert inspect data --sources); * stands for any "
            "characters, ? for one"
        )
    return fitting
