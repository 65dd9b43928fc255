"""Volumes: pairs of Megatron's .bin and .idx. They are mapped to be read, and checked; an index is written.

An index is computed from lengths in arrays of bounded size, so memory stays constant. Opening looks at the ends of the
index and the sizes of both files, which takes no longer for 10^9 documents than for ten; a document's place is checked
when it is read, all of them by `check_index`.

Layout of .idx, little-endian: 9 bytes magic, uint64 version 1, uint8 dtype code, uint64 sequences S, uint64 document
boundaries S + 1, then int32 lengths[S] in tokens, int64 pointers[S] in bytes, int64 boundaries[S + 1] = 0 ... S.
Documents are end to end.
Source: megatron-core 0.16.1 core/datasets/indexed_dataset.py; test_volumes.py reads it with that class.
"""

import hashlib
import mmap
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.data.corpus.format import DAMAGED, DTYPES, Volume
from megatron_neobert.data.corpus.object_storage import BLOCK_BYTES, RemoteFile
from megatron_neobert.errors import DataError
from megatron_neobert.runtime.new_file import NewFile

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
_CHUNK = 1 << 20  # documents handled at a time
_SCANNED_BYTES = 2 << 20  # of ids, at a time
_ORDERED_CHUNKS = 8  # of those ids, where they are remote


def write_index(
    index: NewFile,
    read_lengths: Callable[[], Iterable[NDArray[np.int32]]],
    documents: int,
    dtype: np.dtype[Any],
) -> None:
    """Write an .idx; the lengths are read array by array, twice."""
    code = next(code for code, known in DTYPES.items() if known == dtype)
    index.write(HEADER.pack(MAGIC, 1, code, documents, documents + 1))
    for lengths in read_lengths():
        index.write(lengths.data)
    for places in index_after(read_lengths(), dtype):
        index.write(places.data)


def read_chunks(path: Path, dtype: str | np.dtype[Any]) -> Iterator[NDArray[Any]]:
    """Yield the items of a file, some at a time; read and not mapped, so that memory is that of one chunk."""
    with path.open("rb") as stream:
        while (items := np.fromfile(stream, dtype, _CHUNK)).size:
            yield items


def index_after(lengths: Iterable[NDArray[np.int32]], dtype: np.dtype[Any]) -> Iterator[NDArray[np.int64]]:
    """Pointers, then boundaries, chunk by chunk: all of an index that follows from the lengths, given in chunks."""
    end = documents = 0
    for chunk in lengths:
        ends = end + np.cumsum(chunk, dtype="<i8") * dtype.itemsize
        yield np.concatenate([np.array([end], dtype="<i8"), ends[:-1]])
        end, documents = int(ends[-1]), documents + chunk.size
    for first in range(0, documents + 1, _CHUNK):
        yield np.arange(first, min(first + _CHUNK, documents + 1), dtype="<i8")


class MappedVolume:
    """The documents of one .bin, which may be remote, and .idx. DataError if they or the manifest disagree."""

    def __init__(
        self, bin_: Path | RemoteFile, idx_path: Path, expected: Volume, *, dtype: str, manifest: Path
    ) -> None:
        self.bin, self.idx = bin_, idx_path
        self.dtype, documents, boundaries = read_header(idx_path)
        if boundaries != documents + 1:
            both = f"{documents} sequences and {boundaries} boundaries"
            raise damage(idx_path, 18, "one boundary more than sequences, for a document is one sequence", both)
        index, at_pointers = _map(idx_path), HEADER.size + 4 * documents
        self.lengths = np.frombuffer(index, "<i4", documents, HEADER.size)
        self.pointers = np.frombuffer(index, "<i8", documents, at_pointers)  # bytes
        self.after_lengths = np.frombuffer(index, "<i8", 2 * documents + 1, at_pointers)
        self.end = int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize
        size = bin_.stat().st_size if isinstance(bin_, Path) else len(bin_)
        tokens = self.end // self.dtype.itemsize
        if size != self.end:
            wanted = f"{self.end} bytes for {tokens} tokens of {self.dtype}, as {idx_path.name} has it"
            raise damage(bin_, max(0, min(self.end, size)), wanted, f"a file of {size} bytes")
        for name, found, recorded in (
            ("documents", documents, expected.documents),
            ("tokens", tokens, expected.tokens),
            ("dtype", self.dtype.name, dtype),
        ):
            if found != recorded:
                raise DataError(
                    f"{manifest}: expected {name} {found} as in {idx_path.name}, found {recorded}; {DAMAGED}"
                )
        self.content = memoryview(_map(bin_)) if isinstance(bin_, Path) else bin_  # sliced by bytes

    def find(self, documents: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return first byte and tokens of documents. DataError if one does not end where the next one begins."""
        begins, lengths = self.pointers[documents], self.lengths[documents]
        nexts = self.after_lengths[documents + 1]
        nexts = np.where(nexts == 0, self.end, nexts)  # the first boundary, 0, is after the last pointer
        wrong = (begins + lengths.astype(np.int64) * self.dtype.itemsize != nexts) | (lengths < 1)
        wrong |= (begins < 0) | (begins > self.end) | (nexts > self.end)  # begins: their sum may overflow
        if wrong.any():
            at = int(np.argmax(wrong))
            wanted = (
                f"pointer and length of document {documents[at]} to lead to {nexts[at]}, the next one, within "
                f"{self.end} bytes"
            )
            found = f"{begins[at]} bytes and {lengths[at]} tokens of {self.dtype}"
            raise damage(self.idx, HEADER.size + 4 * self.lengths.size + 8 * int(documents[at]), wanted, found)
        return begins, lengths

    def will_need(self, documents: NDArray[np.int64]) -> None:
        """Have threads fetch these documents, if they are remote. The blocks inside of a long one are not announced."""
        if isinstance(self.bin, RemoteFile):
            begins = self.pointers[documents]
            lasts = begins + self.lengths[documents].astype(np.int64) * self.dtype.itemsize - 1
            self.bin.will_need(np.append(begins, lasts))

    def read_ids(self) -> Iterator[NDArray[Any]]:
        """Yield all of the .bin, some ids at a time; a local one is read and not mapped, so that it takes no memory."""
        if isinstance(self.bin, Path):
            with self.bin.open("rb") as stream:
                while (ids := np.fromfile(stream, self.dtype, _SCANNED_BYTES // self.dtype.itemsize)).size:
                    yield ids
            return
        for begin in range(0, self.end, _SCANNED_BYTES):
            self.bin.will_need(np.arange(begin, min(begin + _ORDERED_CHUNKS * _SCANNED_BYTES, self.end), BLOCK_BYTES))
            yield np.frombuffer(bytearray(self.bin[begin : begin + _SCANNED_BYTES]), self.dtype)


class AllowedIds:
    """The ids that a document may hold: those of the vocabulary without the special ones, but with [UNK]."""

    def __init__(self, special_ids: Iterable[int], *, unknown: int, vocab_size: int) -> None:
        self.unknown, self._vocab_size = unknown, vocab_size
        self._never = sorted({*special_ids} - {unknown})
        # The longest run of allowed ids between those that are not.
        runs = zip([0, *(id_ + 1 for id_ in self._never)], [*self._never, vocab_size], strict=True)
        self._run = max(runs, key=lambda run: run[1] - run[0])

    def first_wrong(self, ids: NDArray[Any]) -> int | None:
        """Return the position of the first id that no document may hold."""
        # Every token that is trained on comes by here, so the cheap looks come first: 1 % of building a micro-batch.
        first, end = self._run
        suspect = ids < first
        if ids.size and ids.max() >= end:
            suspect |= ids >= end
        if suspect.any():
            suspect &= ids != self.unknown  # nearly always all of them
        if not suspect.any():
            return None
        at = np.flatnonzero(suspect)
        wrong = (ids[at] < 0) | (ids[at] >= self._vocab_size) | np.isin(ids[at], self._never)
        return int(at[np.argmax(wrong)]) if wrong.any() else None

    def describe(self, wrong_id: int) -> str:
        """Describe what should be in the place of a wrong id."""
        return "no special token" if 0 <= wrong_id < self._vocab_size else f"an id below {self._vocab_size}"

    def scan(self, volume: MappedVolume) -> str:
        """Read all tokens, and return the sha256 of the .bin. Raise DataError for an id that is not allowed."""
        digest, first = hashlib.sha256(), 0
        for ids in volume.read_ids():
            digest.update(ids.data)
            if (at := self.first_wrong(ids)) is not None:
                offset = (first + at) * ids.itemsize
                document = int(np.searchsorted(volume.pointers, offset, side="right")) - 1
                token = (offset - int(volume.pointers[document])) // ids.itemsize
                found = f"{ids[at]} (token {token} of document {document})"
                raise damage(volume.bin, offset, self.describe(ids[at]), found)
            first += ids.size
        return digest.hexdigest()


def damage(path: Path | RemoteFile, offset: int, expected: object, found: object) -> DataError:
    return DataError(f"{path}, byte {offset}: expected {expected}, found {found}; {DAMAGED}")


def read_header(path: Path) -> tuple[np.dtype[Any], int, int]:
    """Return item type, number of sequences and of boundaries. Raise DataError if the file's size contradicts them."""
    size = path.stat().st_size
    if size < HEADER.size:
        raise damage(path, size, f"at least {HEADER.size} bytes of header", f"a file of {size} bytes")
    with path.open("rb") as stream:
        magic, version, code, sequences, boundaries = HEADER.unpack(stream.read(HEADER.size))
    expected = HEADER.size + 12 * sequences + 8 * boundaries
    size_wanted = f"{expected} bytes for {sequences} sequences and {boundaries} boundaries"
    for offset, wanted, found, is_right in (
        (0, f"magic {MAGIC!r}", f"{magic!r}", magic == MAGIC),
        (9, "version 1", version, version == 1),
        (17, "dtype code 8 (uint16) or 4 (int32)", code, code in DTYPES),
        (18, "at least one document", sequences, sequences > 0),
        (18, size_wanted, f"a file of {size} bytes", size == expected),
    ):
        if not is_right:
            raise damage(path, offset, wanted, found)
    return DTYPES[code], sequences, boundaries


def check_index(path: Path, lengths: NDArray[np.int32], rest: NDArray[np.int64], dtype: np.dtype[Any]) -> None:
    """Raise DataError unless the pointers, and boundaries if `rest` has them, follow from the lengths."""

    def positive() -> Iterator[NDArray[np.int32]]:
        for first in range(0, lengths.size, _CHUNK):
            some = lengths[first : first + _CHUNK]
            if some.min() < 1:
                at = int(np.argmax(some < 1))
                offset = HEADER.size + 4 * (first + at)
                raise damage(path, offset, f"a length above 0 of document {first + at}", some[at])
            yield some

    first = 0
    for expected in index_after(positive(), dtype):
        found = rest[first : first + expected.size]
        expected = expected[: found.size]
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
