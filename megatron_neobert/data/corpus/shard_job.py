"""The job that writes one corpus shard of finished chunks. A corpus shard holds whole chunks.

Memory: some megabytes of one chunk, and a count per length that occurs.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.data.corpus.format import count_lengths
from megatron_neobert.data.corpus.volumes import write_index
from megatron_neobert.runtime.jobs import Job
from megatron_neobert.runtime.new_file import NewFile

KEPT, HELD_OUT, DROPPED = 0, 1, 2  # what becomes of a document
CHOICES = "choices"  # a file with one of these bytes for each document of all chunks
_WINDOW_DOCUMENTS = 1 << 18  # read at a time, and
_WINDOW_BYTES = 4 << 20  # of ids; a longer document is read whole


@dataclass(frozen=True)
class ChunkFiles:
    """The files of a finished chunk: `name`.KIND in PREFIX.partial.

    Kinds: ids (in the corpus's dtype), lengths (int32), hashes (16 bytes of blake2b per document, only for
    deduplication and a split), attributes (see attribute_columns.py, only with --record-key), rejects (JSON lines).
    """

    input: str  # as the manifest calls the file
    name: str
    documents: int
    tokens: int
    unknown_tokens: int
    sha256: dict[str, str]  # by kind, without rejects
    # The key under which rejects have their numbers, and what to add to these; None: they count from the beginning.
    records_before: tuple[str, int] | None = None


@dataclass
class ShardCounts:
    """Counts that the documents of one or more corpus shards contribute to a manifest."""

    unknown_tokens: int = 0
    lengths: Counter[int] = field(default_factory=Counter)  # documents by length
    inputs: dict[str, Counter[str]] = field(default_factory=dict)  # documents and tokens by input file

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


def read_chosen(folder: Path, choice: int | None, first: int, documents: int) -> NDArray[np.bool_]:
    """Return True for each of some documents of which `choice` was made; None chooses all."""
    if choice is None:
        return np.ones(documents, dtype=np.bool_)
    return np.fromfile(folder / CHOICES, np.uint8, documents, offset=first) == choice


class _Window(NamedTuple):
    """Some consecutive documents of one chunk."""

    chunk: ChunkFiles
    first: int  # document of the chunk
    lengths: NDArray[np.int32]
    chosen: NDArray[np.bool_]


@dataclass(frozen=True)
class ShardJob(Job[ShardCounts]):
    """Writes one corpus shard; without a document its files are empty. The folder is named by all that decides it."""

    result_type = ShardCounts
    sync = True

    chunks: tuple[ChunkFiles, ...]
    first_document: int  # documents of all chunks before these
    choice: int | None  # KEPT or HELD_OUT; None: there is no file of choices, and all documents are kept
    dtype: str
    unknown_id: int

    def __str__(self) -> str:
        return f"corpus shard {self.name}"

    @property
    def kinds(self) -> Sequence[str]:
        return ["bin", "idx"]

    def work(self, files: Mapping[str, NewFile]) -> ShardCounts:
        counts, dtype = ShardCounts(), np.dtype(self.dtype)
        if len(self.chunks) == 1 and all(window.chosen.all() for window in self._windows()):
            (chunk,) = self.chunks
            files["bin"].link(self._chunk_file(chunk, "ids"), sha256=chunk.sha256["ids"])
            counts.unknown_tokens = chunk.unknown_tokens
        else:
            for ids in self._read_ids():
                files["bin"].write(ids)
                counts.unknown_tokens += int(np.count_nonzero(np.frombuffer(ids, dtype) == self.unknown_id))
        for window in self._windows():
            lengths = window.lengths[window.chosen]
            counts.lengths.update(count_lengths(lengths))
            new = {"documents": lengths.size, "tokens": int(lengths.sum(dtype=np.int64))}
            counts.inputs.setdefault(window.chunk.input, Counter()).update(new)
        if counts.documents:
            write_index(files["idx"], self._read_lengths, counts.documents, dtype)
        return counts

    def _chunk_file(self, chunk: ChunkFiles, kind: str) -> Path:
        return self.folder.parent / f"{chunk.name}.{kind}"

    def _windows(self) -> Iterator[_Window]:
        before = self.first_document
        for chunk in self.chunks:
            for first in range(0, chunk.documents, _WINDOW_DOCUMENTS):
                size = min(_WINDOW_DOCUMENTS, chunk.documents - first)
                lengths = np.fromfile(self._chunk_file(chunk, "lengths"), "<i4", size, offset=4 * first)
                yield _Window(chunk, first, lengths, read_chosen(self.folder, self.choice, before + first, size))
            before += chunk.documents

    def _read_lengths(self) -> Iterator[NDArray[np.int32]]:
        """Yield the lengths of chosen documents."""
        return (window.lengths[window.chosen] for window in self._windows() if window.chosen.any())

    def _read_ids(self) -> Iterator[bytes]:
        """Yield the ids of chosen documents; those that follow each other are read in one go."""
        item, begin = np.dtype(self.dtype).itemsize, 0
        for window in self._windows():
            begin = 0 if window.first == 0 else begin
            bounds = begin + np.append(0, np.cumsum(window.lengths, dtype=np.int64) * item)
            begin, start = int(bounds[-1]), 0
            with self._chunk_file(window.chunk, "ids").open("rb") as ids:
                while start < window.lengths.size:
                    longest = int(np.searchsorted(bounds, bounds[start] + _WINDOW_BYTES, side="right")) - 1
                    stop = max(start + 1, longest)
                    if (some := window.chosen[start:stop]).any():
                        edges = start + np.flatnonzero(np.diff(some, prepend=False, append=False))
                        runs = bounds[edges].reshape(-1, 2).tolist()
                        yield b"".join([os.pread(ids.fileno(), end - first, first) for first, end in runs])
                    start = stop
