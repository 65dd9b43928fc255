"""The job that writes one corpus shard of finished chunks. A corpus shard holds whole chunks.

Memory: some megabytes of one chunk, and a count per length that occurs.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from megatron_neobert.data.corpus.format import count_lengths
from megatron_neobert.data.corpus.volumes import write_index
from megatron_neobert.runtime.jobs import Job
from megatron_neobert.runtime.new_file import NewFile
from megatron_neobert.text import parse_json

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


@dataclass(frozen=True)
class Layout:
    """What all jobs of one call share; it is in a file, since the list of chunks is long."""

    chunks: list[ChunkFiles]  # with a document at least
    settings: dict[str, Any]  # everything else that decides the bytes
    dtype: str
    unknown_id: int
    has_choices: bool  # False: all documents are kept


@dataclass
class ShardCounts:
    """What the documents of a corpus shard, or of several, count for in a manifest."""

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


class _Window(NamedTuple):
    """Some consecutive documents of one chunk."""

    chunk: ChunkFiles
    first: int  # document of the chunk
    lengths: NDArray[np.int32]
    chosen: NDArray[np.bool_]


@dataclass(frozen=True)
class ShardJob(Job[ShardCounts]):
    """Writes one corpus shard; without a document its files are empty."""

    result_type = ShardCounts
    sync = True

    layout_sha256: str
    chunks: range
    choice: int  # KEPT or HELD_OUT

    def __str__(self) -> str:
        return f"corpus shard {self.name}"

    @property
    def kinds(self) -> Sequence[str]:
        return ["bin", "idx"]

    @property
    def key(self) -> str:
        return f"{self.layout_sha256} {self.chunks.start} {self.chunks.stop}"

    def work(self, files: Mapping[str, NewFile]) -> ShardCounts:
        counts, dtype = ShardCounts(), np.dtype(self._layout.dtype)
        if (chunk := self._only_chunk()) is not None:
            files["bin"].link(self._file(chunk, "ids"), sha256=chunk.sha256["ids"])
            counts.unknown_tokens = chunk.unknown_tokens
        else:
            for ids in self._read_ids():
                files["bin"].write(ids)
                counts.unknown_tokens += int(np.count_nonzero(np.frombuffer(ids, dtype) == self._layout.unknown_id))
        for window in self._windows():
            lengths = window.lengths[window.chosen]
            counts.lengths.update(count_lengths(lengths))
            new = {"documents": lengths.size, "tokens": int(lengths.sum(dtype=np.int64))}
            counts.inputs.setdefault(window.chunk.input, Counter()).update(new)
        if counts.documents:
            write_index(files["idx"], self._read_lengths, counts.documents, dtype)
        return counts

    @property
    def _layout(self) -> Layout:
        return _read_layout(self.folder / "layout.json", self.layout_sha256)

    def _file(self, chunk: ChunkFiles, kind: str) -> Path:
        return self.folder.parent / f"{chunk.name}.{kind}"

    def _only_chunk(self) -> ChunkFiles | None:
        """Return the chunk whose documents are exactly those of this corpus shard, if there is one."""
        is_one = len(self.chunks) == 1 and all(window.chosen.all() for window in self._windows())
        return self._layout.chunks[self.chunks.start] if is_one else None

    def _windows(self) -> Iterator[_Window]:
        chunks = self._layout.chunks
        before = sum(chunk.documents for chunk in chunks[: self.chunks.start])
        for chunk in chunks[self.chunks.start : self.chunks.stop]:
            for first in range(0, chunk.documents, _WINDOW_DOCUMENTS):
                size = min(_WINDOW_DOCUMENTS, chunk.documents - first)
                lengths = np.fromfile(self._file(chunk, "lengths"), "<i4", size, offset=4 * first)
                chosen = np.ones(size, dtype=np.bool_)
                if self._layout.has_choices:
                    choices = np.fromfile(self.folder / CHOICES, np.uint8, size, offset=before + first)
                    chosen = choices == self.choice
                yield _Window(chunk, first, lengths, chosen)
            before += chunk.documents

    def _read_lengths(self) -> Iterator[NDArray[np.int32]]:
        """Yield the lengths of chosen documents."""
        return (window.lengths[window.chosen] for window in self._windows() if window.chosen.any())

    def _read_ids(self) -> Iterator[bytes]:
        """Yield the ids of chosen documents; those that follow each other are read in one go."""
        item, begin = np.dtype(self._layout.dtype).itemsize, 0
        for window in self._windows():
            begin = 0 if window.first == 0 else begin
            bounds = begin + np.append(0, np.cumsum(window.lengths, dtype=np.int64) * item)
            begin, start = int(bounds[-1]), 0
            with self._file(window.chunk, "ids").open("rb") as ids:
                while start < window.lengths.size:
                    longest = int(np.searchsorted(bounds, bounds[start] + _WINDOW_BYTES, side="right")) - 1
                    stop = max(start + 1, longest)
                    if (some := window.chosen[start:stop]).any():
                        edges = start + np.flatnonzero(np.diff(some, prepend=False, append=False))
                        runs = bounds[edges].reshape(-1, 2).tolist()
                        yield b"".join([os.pread(ids.fileno(), end - first, first) for first, end in runs])
                    start = stop


@lru_cache(maxsize=1)
def _read_layout(path: Path, sha256: str) -> Layout:
    content = path.read_bytes()
    assert hashlib.sha256(content).hexdigest() == sha256, path
    return msgspec.convert(parse_json(content), Layout)
