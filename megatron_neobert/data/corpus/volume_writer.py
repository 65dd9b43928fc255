"""Writing of volumes: ids and lengths go in, complete .bin and .idx files come out, on disk and with their sha256.

Memory stays constant: lengths wait in a file, and the index is computed from them in chunks.
"""

import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.data.corpus.format import DTYPES, HEADER, MAGIC, FileRecord
from megatron_neobert.data.corpus.statistics import LengthCounts
from megatron_neobert.runtime.atomic_files import sync_to_disk

_CHUNK = 1 << 20  # documents handled at a time


@dataclass(frozen=True)
class WrittenVolume:
    """A pair of files that has no final name yet."""

    bin: Path
    idx: Path
    documents: int
    tokens: int
    bin_record: FileRecord
    idx_record: FileRecord


class VolumesWriter:
    """Turns a stream of documents into one or more volumes in `folder`, which it creates.

    Args:
        folder: On the file system of the finished corpus; nothing else may be in it.
        dtype: Of the token ids.
        volume_bytes: Upper limit of a .bin, which only a single longer document exceeds; None: no limit.
    """

    def __init__(self, folder: Path, dtype: np.dtype[Any], *, volume_bytes: int | None) -> None:
        folder.mkdir()
        self.lengths = LengthCounts()  # complete after `finish`
        self._folder, self._dtype, self._volume_bytes = folder, dtype, volume_bytes
        self._finished: list[WrittenVolume] = []
        self._ids: _HashedFile | None = None  # of the volume in work, as soon as it has a document

    def append(self, ids: memoryview, lengths: NDArray[np.int32]) -> None:
        """Adds documents: their ids end to end in `dtype`, as bytes, and the tokens of each."""
        ends = np.cumsum(lengths, dtype=np.int64) * self._dtype.itemsize
        first, begin = 0, 0
        while first < lengths.size:
            used = self._ids.bytes if self._ids else 0
            stop = lengths.size
            if self._volume_bytes is not None:
                stop = int(np.searchsorted(ends, begin + self._volume_bytes - used, side="right"))
            if stop <= first and used:
                self.cut()
                continue
            stop = max(stop, first + 1)
            end = int(ends[stop - 1])
            self._write(ids[begin:end], lengths[first:stop])
            first, begin = stop, end

    def link(self, ids: Path, lengths: Path, *, sha256: str) -> None:
        """Makes a whole file of ids a volume without reading it; a copy only where the file system has no links."""
        self.cut()
        target = self._path("bin")
        try:
            os.link(ids, target)
        except OSError:
            shutil.copyfile(ids, target)
        sync_to_disk(target)
        self._finish(lengths, FileRecord(target.stat().st_size, sha256))

    def cut(self) -> None:
        """The next document begins a new volume."""
        if self._ids is None:
            return
        record = self._ids.finish()
        self._lengths.close()
        self._ids = None
        lengths = self._path("lengths")
        self._finish(lengths, record)
        lengths.unlink()

    def finish(self) -> list[WrittenVolume]:
        self.cut()
        return self._finished

    def _path(self, end: str) -> Path:
        return self._folder / f"{len(self._finished)}.{end}"

    def _write(self, ids: memoryview, lengths: NDArray[np.int32]) -> None:
        if self._ids is None:
            self._ids = _HashedFile(self._path("bin"))
            self._lengths = self._path("lengths").open("wb")
        self._ids.write(ids)
        self._lengths.write(lengths.astype("<i4", copy=False).data)

    def _finish(self, lengths: Path, ids: FileRecord) -> None:
        for chunk in read_chunks(lengths, "<i4"):
            self.lengths.add(chunk)
        index = _HashedFile(self._path("idx"))
        documents = lengths.stat().st_size // 4
        tokens = _write_index(index, lengths, documents, self._dtype)
        assert tokens * self._dtype.itemsize == ids.bytes, f"{lengths}: {tokens} tokens in {ids.bytes} bytes"
        self._finished.append(
            WrittenVolume(self._path("bin"), self._path("idx"), documents, tokens, ids, index.finish())
        )


def read_chunks(path: Path, dtype: str | np.dtype[Any]) -> Iterator[NDArray[Any]]:
    """The items of a file, some at a time; read and not mapped, so that memory is that of one chunk."""
    with path.open("rb") as stream:
        while (items := np.fromfile(stream, dtype, _CHUNK)).size:
            yield items


def _write_index(index: "_HashedFile", lengths: Path, documents: int, dtype: np.dtype[Any]) -> int:
    """Returns the number of tokens."""
    code = next(code for code, known in DTYPES.items() if known == dtype)
    index.write(HEADER.pack(MAGIC, 1, code, documents, documents + 1))
    for chunk in read_chunks(lengths, "<i4"):
        index.write(chunk.data)
    end = 0
    for chunk in read_chunks(lengths, "<i4"):
        pointers = np.empty(chunk.size + 1, dtype="<i8")
        pointers[0] = 0
        np.cumsum(chunk, out=pointers[1:])
        pointers *= dtype.itemsize
        pointers += end
        index.write(pointers[:-1].data)
        end = int(pointers[-1])
    for first in range(0, documents + 1, _CHUNK):
        index.write(np.arange(first, min(first + _CHUNK, documents + 1), dtype="<i8").data)
    return end // dtype.itemsize


class _HashedFile:
    """A new file whose size and sha256 are known when it is finished."""

    def __init__(self, path: Path) -> None:
        self.bytes = 0
        self._stream = path.open("wb", buffering=1 << 20)
        self._digest = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> None:
        self._stream.write(data)
        self._digest.update(data)
        self.bytes += len(data) if isinstance(data, bytes) else data.nbytes

    def finish(self) -> FileRecord:
        """Brings the content to disk."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        return FileRecord(self.bytes, self._digest.hexdigest())
