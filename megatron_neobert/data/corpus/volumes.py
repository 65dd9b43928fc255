"""Volumes: pairs of Megatron's .bin and .idx. They are written through to disk, mapped to be read, and checked.

Writing: ids and lengths go in, complete files come out, with their sha256; lengths wait in a file, and the index is
computed from them in chunks, so memory stays constant. Opening reads the index once, in chunks, and no tokens, and
refuses a volume whose index contradicts itself or the size of its .bin.

Layout of .idx, little-endian: 9 bytes magic, uint64 version 1, uint8 dtype code, uint64 sequences S, uint64 document
boundaries S + 1, then int32 lengths[S] in tokens, int64 pointers[S] in bytes, int64 boundaries[S + 1] = 0 ... S.
Source: megatron-core 0.16.1 core/datasets/indexed_dataset.py; test_volumes.py reads it with that class.
"""

import hashlib
import mmap
import os
import shutil
import struct
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.data.corpus.format import DAMAGED, DTYPES, FileRecord, LengthCounts, Volume
from megatron_neobert.errors import DataError
from megatron_neobert.runtime.atomic_files import sync_to_disk

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
_CHUNK = 1 << 20  # documents handled at a time
_READ_THROUGH_BYTES = 64 << 10  # a gap that costs less to read than to skip


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
        self.folder, self._dtype, self._volume_bytes = folder, dtype, volume_bytes
        self._finished: list[Volume] = []
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
            if self._ids is None:
                self._ids = _HashedFile(self._path("bin"))
                self._lengths = self._path("lengths").open("wb")
            self._ids.write(ids[begin:end])
            self._lengths.write(lengths[first:stop].astype("<i4", copy=False).data)
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

    def finish(self) -> list[Volume]:
        """The volumes, called by their numbers; their files lie at `folder / f"{number}.bin"` and .idx."""
        self.cut()
        return self._finished

    def _path(self, end: str) -> Path:
        return self.folder / f"{len(self._finished)}.{end}"

    def _finish(self, lengths: Path, ids: FileRecord) -> None:
        for chunk in read_chunks(lengths, "<i4"):
            self.lengths.add(chunk)
        documents, tokens = lengths.stat().st_size // 4, ids.bytes // self._dtype.itemsize
        code = next(code for code, known in DTYPES.items() if known == self._dtype)
        index = _HashedFile(self._path("idx"))
        index.write(HEADER.pack(MAGIC, 1, code, documents, documents + 1))
        for chunk in chain(read_chunks(lengths, "<i4"), _index_after(read_chunks(lengths, "<i4"), self._dtype)):
            index.write(chunk.data)
        self._finished.append(Volume(str(len(self._finished)), documents, tokens, ids, index.finish()))


def read_chunks(path: Path, dtype: str | np.dtype[Any]) -> Iterator[NDArray[Any]]:
    """The items of a file, some at a time; read and not mapped, so that memory is that of one chunk."""
    with path.open("rb") as stream:
        while (items := np.fromfile(stream, dtype, _CHUNK)).size:
            yield items


def _index_after(lengths: Iterable[NDArray[np.int32]], dtype: np.dtype[Any]) -> Iterator[NDArray[np.int64]]:
    """Pointers, then boundaries, chunk by chunk: all of an index that follows from the lengths, given in chunks."""
    end = documents = 0
    for chunk in lengths:
        ends = end + np.cumsum(chunk, dtype="<i8") * dtype.itemsize
        yield np.concatenate([np.array([end], dtype="<i8"), ends[:-1]])
        end, documents = int(ends[-1]), documents + chunk.size
    for first in range(0, documents + 1, _CHUNK):
        yield np.arange(first, min(first + _CHUNK, documents + 1), dtype="<i8")


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


class MappedVolume:
    """The documents of one .bin and .idx.

    Raises:
        DataError: They are damaged or contradict each other or the manifest; names file, byte, expected and found.
    """

    def __init__(self, bin_path: Path, idx_path: Path, *, expected: Volume, dtype: str, manifest: Path) -> None:
        self.bin, self.idx = bin_path, idx_path
        self.dtype, documents = _read_header(idx_path)
        index = memoryview(_map(idx_path))
        at_pointers, at_boundaries = HEADER.size + 4 * documents, HEADER.size + 12 * documents
        self.lengths = np.frombuffer(index, "<i4", documents, HEADER.size)
        self.pointers = np.frombuffer(index, "<i8", documents, at_pointers)  # bytes
        # lengths and pointers once more, for one document at a time: a third of the time that an array takes.
        self.length_of = index[HEADER.size : at_pointers].cast("i")
        self.pointer_of = index[at_pointers:at_boundaries].cast("q")
        _check_index(idx_path, self.lengths, np.frombuffer(index, "<i8", 2 * documents + 1, at_pointers), self.dtype)
        end = int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize
        size, tokens = bin_path.stat().st_size, end // self.dtype.itemsize
        if size != end:
            wanted = f"{end} bytes for {tokens} tokens of {self.dtype}, as {idx_path.name} has it"
            raise damage(bin_path, min(end, size), wanted, f"a file of {size} bytes")
        for name, found, recorded in (
            ("documents", documents, expected.documents),
            ("tokens", tokens, expected.tokens),
            ("dtype", self.dtype.name, dtype),
        ):
            if found != recorded:
                raise DataError(
                    f"{manifest}: expected {name} {found} as in {idx_path.name}, found {recorded}; {DAMAGED}"
                )
        self._bin_map = _map(bin_path)
        self.bytes = memoryview(self._bin_map)
        self.tokens: NDArray[Any] = np.frombuffer(self.bytes, dtype=self.dtype)

    def will_need(self, documents: NDArray[np.int64]) -> None:
        """Has the operating system start to read these documents into the page cache, neighbours in one go."""
        first = np.sort(documents)
        begins = self.pointers[first]
        ends = begins + self.lengths[first].astype(np.int64) * self.dtype.itemsize
        gaps = np.flatnonzero(begins[1:] - ends[:-1] > _READ_THROUGH_BYTES)
        starts, stops = np.append(0, gaps + 1), np.append(gaps, len(first) - 1)
        for begin, end in zip(begins[starts].tolist(), ends[stops].tolist(), strict=True):
            page = begin - begin % mmap.PAGESIZE
            self._bin_map.madvise(mmap.MADV_WILLNEED, page, end - page)


def damage(path: Path, offset: int, expected: object, found: object) -> DataError:
    return DataError(f"{path}, byte {offset}: expected {expected}, found {found}; {DAMAGED}")


def _read_header(path: Path) -> tuple[np.dtype[Any], int]:
    """Item type and number of documents, where the file's size agrees with them."""
    size = path.stat().st_size
    if size < HEADER.size:
        raise damage(path, size, f"at least {HEADER.size} bytes of header", f"a file of {size} bytes")
    with path.open("rb") as stream:
        magic, version, code, sequences, boundaries = HEADER.unpack(stream.read(HEADER.size))
    if magic != MAGIC:
        raise damage(path, 0, f"magic {MAGIC!r}", f"{magic!r}")
    if version != 1:
        raise damage(path, 9, "version 1", version)
    if code not in DTYPES:
        raise damage(path, 17, "dtype code 8 (uint16) or 4 (int32)", code)
    if sequences == 0:
        raise damage(path, 18, "at least one document", "0")
    if boundaries != sequences + 1:
        found = f"{sequences} sequences and {boundaries} boundaries"
        raise damage(path, 18, "one boundary more than sequences, for a document is one sequence", found)
    expected = HEADER.size + 12 * sequences + 8 * boundaries
    if size != expected:
        raise damage(path, 18, f"{expected} bytes for {sequences} documents", f"a file of {size} bytes")
    return DTYPES[code], sequences


def _check_index(path: Path, lengths: NDArray[np.int32], rest: NDArray[np.int64], dtype: np.dtype[Any]) -> None:
    """Compares all that follows from the lengths: each pointer must be the bytes of the documents before."""
    chunks = [lengths[first : first + _CHUNK] for first in range(0, lengths.size, _CHUNK)]
    first = 0
    for some in chunks:
        if some.min() < 1:
            at = int(np.argmax(some < 1))
            raise damage(path, HEADER.size + 4 * (first + at), f"a length above 0 of document {first + at}", some[at])
        first += some.size
    first = 0
    for expected in _index_after(chunks, dtype):
        found = rest[first : first + expected.size]
        if not np.array_equal(found, expected):
            at = first + int(np.argmax(found != expected))
            wanted = f"boundary {at - lengths.size} to be {expected[at - first]}"
            if at < lengths.size:
                wanted = f"pointer of document {at} to be {expected[at - first]} bytes, the {dtype} tokens before it"
            raise damage(path, HEADER.size + 4 * lengths.size + 8 * at, wanted, rest[at])
        first += expected.size


def _map(path: Path) -> mmap.mmap:
    with path.open("rb") as stream:
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
