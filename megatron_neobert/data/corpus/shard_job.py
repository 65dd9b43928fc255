"""The job that writes one corpus shard from finished chunks. A corpus shard consists of whole chunks.

Memory: a few megabytes, and one counter for each document length that occurs.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.data.corpus.shard_files import write_index
from megatron_neobert.runtime.jobs import Job
from megatron_neobert.runtime.new_file import NewFile

# Choices: the corpus that a document belongs to, if any.
KEPT, HELD_OUT, DROPPED = 0, 1, 2
# Name of the file of choices: one byte for each document of all chunks.
CHOICES = "choices"
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
    # By kind, except rejects.
    sha256: dict[str, str]
    # Key of the record number in rejects, and the number of records before this chunk. None if the numbers in the
    # rejects already count from the beginning of the input file.
    records_before: tuple[str, int] | None = None


@dataclass
class ShardCounts:
    """Counts over the documents of one or more corpus shards, for the manifest."""

    unknown_tokens: int = 0
    # Number of documents by length.
    lengths: Counter[int] = field(default_factory=Counter)
    # Number of documents and tokens by input file.
    inputs: dict[str, Counter[str]] = field(default_factory=dict)

    @property
    def documents(self) -> int:
        return self.lengths.total()

    @property
    def tokens(self) -> int:
        return sum(counts["tokens"] for counts in self.inputs.values())

    def add(self, other: "ShardCounts") -> None:
        self.lengths.update(other.lengths)
        self.unknown_tokens += other.unknown_tokens
        for name, counts in other.inputs.items():
            self.inputs.setdefault(name, Counter()).update(counts)


def read_is_chosen(folder: Path, choice: int | None, first: int, documents: int) -> NDArray[np.bool_]:
    """Return True for each of `documents` documents from `first` on whose choice is `choice`; None selects all."""
    if choice is None:
        return np.ones(documents, dtype=np.bool_)
    return np.fromfile(folder / CHOICES, np.uint8, documents, offset=first) == choice


class _Window(NamedTuple):
    """Consecutive documents of one chunk, from the document `first` of the chunk on."""

    chunk: ChunkFiles
    first: int
    lengths: NDArray[np.int32]
    is_chosen: NDArray[np.bool_]


@dataclass(frozen=True)
class ShardJob(Job[ShardCounts]):
    """Write the .bin and .idx of one corpus shard. If no document is chosen, both files are empty.

    The name of the job's folder is a hash of everything that decides its output, so the job needs no key.
    """

    result_type = ShardCounts
    sync = True
    kinds = ("bin", "idx")

    chunks: tuple[ChunkFiles, ...]
    # Number of documents in all chunks before the first chunk of this shard.
    first_document: int
    # KEPT or HELD_OUT. None: all documents are written, and there is no file of choices.
    choice: int | None
    dtype: str
    unknown_id: int

    def __str__(self) -> str:
        return f"corpus shard {self.name}"

    def work(self, files: Mapping[str, NewFile]) -> ShardCounts:
        counts, dtype = ShardCounts(), np.dtype(self.dtype)
        if len(self.chunks) == 1 and all(window.is_chosen.all() for window in self._windows()):
            (chunk,) = self.chunks
            files["bin"].link(self._chunk_file(chunk, "ids"), sha256=chunk.sha256["ids"])
            counts.unknown_tokens = chunk.unknown_tokens
        else:
            for ids in self._read_ids():
                files["bin"].write(ids)
                counts.unknown_tokens += int(np.count_nonzero(np.frombuffer(ids, dtype) == self.unknown_id))
        for window in self._windows():
            lengths = window.lengths[window.is_chosen]
            counts.lengths.update(lengths.tolist())
            added = {"documents": lengths.size, "tokens": int(lengths.sum(dtype=np.int64))}
            counts.inputs.setdefault(window.chunk.input, Counter()).update(added)
        if counts.documents:
            write_index(files["idx"], self._read_lengths, counts.documents, dtype)
        return counts

    def _chunk_file(self, chunk: ChunkFiles, kind: str) -> Path:
        return self.folder.parent / f"{chunk.name}.{kind}"

    def _windows(self) -> Iterator[_Window]:
        chunk_first = self.first_document
        for chunk in self.chunks:
            for first in range(0, chunk.documents, _WINDOW_DOCUMENTS):
                size = min(_WINDOW_DOCUMENTS, chunk.documents - first)
                lengths = np.fromfile(self._chunk_file(chunk, "lengths"), "<i4", size, offset=4 * first)
                is_chosen = read_is_chosen(self.folder, self.choice, chunk_first + first, size)
                yield _Window(chunk, first, lengths, is_chosen)
            chunk_first += chunk.documents

    def _read_lengths(self) -> Iterator[NDArray[np.int32]]:
        """Yield the lengths of the chosen documents, in arrays that are not empty."""
        return (window.lengths[window.is_chosen] for window in self._windows() if window.is_chosen.any())

    def _read_ids(self) -> Iterator[bytes]:
        """Yield the ids of the chosen documents in pieces. Consecutive documents are read with one system call."""
        item, end = np.dtype(self.dtype).itemsize, 0
        for window in self._windows():
            begin = end if window.first else 0
            # Byte offsets of the documents in the chunk's file, and the end of the last one.
            bounds = begin + np.append(0, np.cumsum(window.lengths, dtype=np.int64) * item)
            end, start = int(bounds[-1]), 0
            with self._chunk_file(window.chunk, "ids").open("rb") as stream:
                while start < window.lengths.size:
                    fitting = int(np.searchsorted(bounds, bounds[start] + _WINDOW_BYTES, side="right")) - 1
                    stop = max(start + 1, fitting)
                    if (is_chosen := window.is_chosen[start:stop]).any():
                        edges = start + np.flatnonzero(np.diff(is_chosen, prepend=False, append=False))
                        runs = bounds[edges].reshape(-1, 2).tolist()
                        yield b"".join([os.pread(stream.fileno(), last - first, first) for first, last in runs])
                    start = stop
