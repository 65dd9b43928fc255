"""Finished chunks, and reading of the documents that a corpus shard takes from them.

Memory: a few megabytes.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# A window has at most this many documents. Its ids are read in steps of this many bytes, or one longer document.
_WINDOW_DOCUMENTS = 1 << 18
_WINDOW_BYTES = 4 << 20


@dataclass(frozen=True)
class ChunkFiles:
    """A finished chunk, whose files are `name`.KIND in PREFIX.partial.

    Kinds: ids (in the dtype of the corpus), lengths (int32), hashes (16 bytes of blake2b per document, only for
    deduplication and --split-validation), attributes (see attribute_columns.py, only with --record-key), rejects (JSON
    lines).
    """

    # Name of the input file in the manifest.
    input: str
    name: str
    documents: int
    tokens: int
    unknown_tokens: int
    ids_sha256: str
    has_attributes: bool = False


class _Window(NamedTuple):
    """Consecutive documents of one chunk, from the document `first` of the chunk on."""

    chunk: ChunkFiles
    first: int
    lengths: NDArray[np.int32]
    is_chosen: NDArray[np.bool_]


@dataclass(frozen=True)
class ShardDocuments:
    """The documents of one corpus shard: all documents of some chunks, or a choice of them."""

    folder: Path
    chunks: Sequence[ChunkFiles]
    # One value per document of these chunks. None selects all.
    is_chosen: NDArray[np.bool_] | None

    def windows(self) -> Iterator[_Window]:
        """Yield all documents of the chunks, in order."""
        first_of_chunk = 0
        for chunk in self.chunks:
            for first in range(0, chunk.documents, _WINDOW_DOCUMENTS):
                size = min(_WINDOW_DOCUMENTS, chunk.documents - first)
                lengths = np.fromfile(self.folder / f"{chunk.name}.lengths", "<i4", size, offset=4 * first)
                at = first_of_chunk + first
                is_chosen = np.ones(size, np.bool_) if self.is_chosen is None else self.is_chosen[at : at + size]
                yield _Window(chunk, first, lengths, is_chosen)
            first_of_chunk += chunk.documents

    def read_lengths(self) -> Iterator[NDArray[np.int32]]:
        """Yield the lengths of the chosen documents, in arrays that are not empty."""
        return (window.lengths[window.is_chosen] for window in self.windows() if window.is_chosen.any())

    def read_ids(self, item_bytes: int) -> Iterator[bytes]:
        """Yield the ids of the chosen documents in pieces. Consecutive documents are read with one system call."""
        end = 0
        for window in self.windows():
            begin = end if window.first else 0
            # Byte offsets of the documents in the chunk's file, and the end of the last one.
            bounds = begin + np.append(0, np.cumsum(window.lengths, dtype=np.int64) * item_bytes)
            end, start = int(bounds[-1]), 0
            with (self.folder / f"{window.chunk.name}.ids").open("rb") as stream:
                while start < window.lengths.size:
                    fitting = int(np.searchsorted(bounds, bounds[start] + _WINDOW_BYTES, side="right")) - 1
                    stop = max(start + 1, fitting)
                    if (is_chosen := window.is_chosen[start:stop]).any():
                        edges = start + np.flatnonzero(np.diff(is_chosen, prepend=False, append=False))
                        runs = bounds[edges].reshape(-1, 2).tolist()
                        yield b"".join([os.pread(stream.fileno(), last - first, first) for first, last in runs])
                    start = stop
