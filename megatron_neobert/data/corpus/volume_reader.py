"""One volume mapped into memory, and refused where its index contradicts itself or the size of its .bin.

Opening reads the index once, in chunks, and no tokens.
"""

import mmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.data.corpus.format import DAMAGED, DTYPES, HEADER, MAGIC, Volume
from megatron_neobert.errors import DataError

_CHUNK = 1 << 20  # documents checked at a time
_READ_THROUGH_BYTES = 64 << 10  # a gap that costs less to read than to skip


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
        boundaries = np.frombuffer(index, "<i8", documents + 1, at_boundaries)
        # lengths and pointers once more, for one document at a time: a third of the time that an array takes.
        self.length_of = index[HEADER.size : at_pointers].cast("i")
        self.pointer_of = index[at_pointers:at_boundaries].cast("q")
        tokens = _check_pointers(idx_path, self.lengths, self.pointers, self.dtype)
        _check_bin_size(bin_path, tokens, self.dtype, idx_path)
        _check_boundaries(idx_path, boundaries, at_boundaries)
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

    def locate(self, token: int) -> tuple[int, int]:
        """The document that a token of this volume belongs to, and its position there."""
        offset = token * self.dtype.itemsize
        document = int(np.searchsorted(self.pointers, offset, side="right")) - 1
        return document, (offset - int(self.pointers[document])) // self.dtype.itemsize


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


def _check_pointers(path: Path, lengths: NDArray[np.int32], pointers: NDArray[np.int64], dtype: np.dtype[Any]) -> int:
    """Returns the number of tokens. Each pointer must be the bytes of the documents before."""
    end = 0
    for first in range(0, lengths.size, _CHUNK):
        some = lengths[first : first + _CHUNK]
        if some.min() < 1:
            at = int(np.argmax(some < 1))
            raise damage(path, HEADER.size + 4 * (first + at), f"a length above 0 of document {first + at}", some[at])
        bounds = np.empty(some.size + 1, dtype=np.int64)
        bounds[0] = 0
        np.cumsum(some, out=bounds[1:])
        bounds *= dtype.itemsize
        bounds += end
        wanted = f"pointer of document {{}} to be {{}} bytes, the {dtype} tokens before it"
        at_pointers = HEADER.size + 4 * lengths.size
        _check_equal(path, at_pointers, first, pointers[first : first + _CHUNK], bounds[:-1], wanted)
        end = int(bounds[-1])
    return end // dtype.itemsize


def _check_bin_size(path: Path, tokens: int, dtype: np.dtype[Any], index: Path) -> None:
    size, end = path.stat().st_size, tokens * dtype.itemsize
    if size != end:
        expected = f"{end} bytes for {tokens} tokens of {dtype}, as {index.name} says"
        raise damage(path, min(end, size), expected, f"a file of {size} bytes")


def _check_boundaries(path: Path, boundaries: NDArray[np.int64], offset: int) -> None:
    for first in range(0, boundaries.size, _CHUNK):
        found = boundaries[first : first + _CHUNK]
        _check_equal(path, offset, first, found, np.arange(first, first + found.size), "boundary {} to be {}")


def _check_equal(
    path: Path, offset: int, first: int, found: NDArray[np.int64], expected: NDArray[np.int64], wanted: str
) -> None:
    if not np.array_equal(found, expected):
        at = int(np.argmax(found != expected))
        raise damage(path, offset + 8 * (first + at), wanted.format(first + at, expected[at]), found[at])


def _map(path: Path) -> mmap.mmap:
    with path.open("rb") as stream:
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
