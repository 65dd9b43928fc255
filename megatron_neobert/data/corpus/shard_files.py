"""The .bin and .idx of one corpus shard, in Megatron's format: writing the index, mapping both files, checking them.

Layout of .idx, little-endian: 9 bytes magic, uint64 version 1, uint8 dtype code, uint64 number of sequences S, uint64
number of document boundaries S + 1; then int32 lengths[S] in tokens, int64 pointers[S] in bytes, and the numbers 0 to S
as int64 boundaries[S + 1]. The .bin has the token ids of all documents, one document after the other.
Source: megatron-core 0.16.1 core/datasets/indexed_dataset.py; test_corpus.py compares files with that class's.

Opening a shard reads file sizes and both ends of the index, so it takes no longer for 10^9 documents than for ten. The
index entries of a document are checked when it is read; `check_index` checks all entries. Arrays are read and written
in steps of bounded size, so memory does not grow with the corpus.
"""

import hashlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.data.corpus.format import DAMAGED, DTYPES, CorpusShard
from megatron_neobert.data.corpus.object_storage import BLOCK_BYTES, RemoteFile
from megatron_neobert.errors import DataError
from megatron_neobert.runtime.new_file import NewFile

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
_ITEMS_PER_STEP = 1 << 20
_REMOTE_STEP_BYTES = 2 << 20
_PREFETCHED_STEPS = 8  # these steps have 64 blocks, two for each thread of object_storage.py


def write_index(index: NewFile, lengths: Sequence[Path], dtype: np.dtype[Any]) -> None:
    """Write the content of an .idx to `index`, which the caller commits.

    The files in `lengths` contain the documents' lengths in tokens, as int32. `dtype` is the type of the token ids
    in the .bin.
    """
    code = next(code for code, token_dtype in DTYPES.items() if token_dtype == dtype)
    documents = sum(file.stat().st_size for file in lengths) // 4
    index.write(HEADER.pack(MAGIC, 1, code, documents, documents + 1))
    for file in lengths:
        index.append(file)
    steps = (step for file in lengths for step in read_items(file, "<i4"))
    for entries in _pointers_and_boundaries(steps, dtype):
        index.write(entries.data)


def read_items(path: Path, dtype: str | np.dtype[Any]) -> Iterator[NDArray[Any]]:
    """Yield all items of a file in consecutive arrays. The file is read, not mapped, to bound the memory in use."""
    with path.open("rb") as stream:
        while (items := np.fromfile(stream, dtype, _ITEMS_PER_STEP)).size:
            yield items


def _pointers_and_boundaries(lengths: Iterable[NDArray[np.int32]], dtype: np.dtype[Any]) -> Iterator[NDArray[np.int64]]:
    """Yield arrays of document byte offsets, one per array in `lengths`, then arrays with the boundaries 0 to n."""
    end = documents = 0
    for step in lengths:
        sizes = step.astype("<i8") * dtype.itemsize
        ends = end + np.cumsum(sizes)
        yield ends - sizes
        end, documents = int(ends[-1]), documents + step.size
    for first in range(0, documents + 1, _ITEMS_PER_STEP):
        yield np.arange(first, min(first + _ITEMS_PER_STEP, documents + 1), dtype="<i8")


class MappedShard:
    """One .bin/.idx pair: a mapped .idx, and a .bin that is mapped or remote.

    Raise DataError if the header is malformed, or the sizes of both files and the ends of the index contradict each
    other.
    """

    def __init__(self, bin_: Path | RemoteFile, idx: Path) -> None:
        self.bin, self.idx, size = bin_, idx, idx.stat().st_size
        if size < HEADER.size:
            raise damage_error(idx, size, f"at least {HEADER.size} bytes of header", f"a file of {size} bytes")
        content = np.memmap(idx, np.uint8, "r")
        magic, version, code, sequences, boundaries = HEADER.unpack(content[: HEADER.size].tobytes())
        expected_bytes = HEADER.size + 12 * sequences + 8 * boundaries
        size_rule = f"{expected_bytes} bytes for {sequences} sequences and {boundaries} boundaries"
        for offset, rule, found, is_right in (
            (0, f"magic {MAGIC!r}", f"{magic!r}", magic == MAGIC),
            (9, "version 1", version, version == 1),
            (17, "dtype code 8 (uint16) or 4 (int32)", code, code in DTYPES),
            (18, "at least one document", sequences, sequences > 0),
            (18, size_rule, f"a file of {size} bytes", size == expected_bytes),
        ):
            if not is_right:
                raise damage_error(idx, offset, rule, found)
        self.dtype = DTYPES[code]
        self.lengths = np.frombuffer(content, "<i4", sequences, HEADER.size)
        entries = np.frombuffer(content, "<i8", sequences + boundaries, HEADER.size + 4 * sequences)
        self.pointers, self.boundaries, self.pointers_and_boundaries = entries[:sequences], entries[sequences:], entries
        self.end = int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize
        self.tokens = self.end // self.dtype.itemsize
        size_of_bin = bin_.stat().st_size if isinstance(bin_, Path) else len(bin_)
        if size_of_bin != self.end:
            rule = f"{self.end} bytes for {self.tokens} tokens of {self.dtype}, as in {idx.name}"
            raise damage_error(bin_, max(0, min(self.end, size_of_bin)), rule, f"a file of {size_of_bin} bytes")
        # Sliced by byte offsets. An empty file cannot be mapped.
        self.content: memoryview | RemoteFile = memoryview(b"")
        if size_of_bin:
            self.content = np.memmap(bin_, np.uint8, "r").data if isinstance(bin_, Path) else bin_

    def check_manifest(self, recorded: CorpusShard, *, dtype: str, manifest: Path) -> None:
        """Raise DataError if a document is not one sequence, or if the manifest contradicts the index."""
        documents = self.lengths.size
        if self.boundaries.size != documents + 1:
            counts = f"{documents} sequences and {self.boundaries.size} boundaries"
            raise damage_error(self.idx, 18, "one boundary more than sequences (each document is one sequence)", counts)
        for name, expected, found in (
            ("documents", documents, recorded.documents),
            ("tokens", self.tokens, recorded.tokens),
            ("dtype", self.dtype.name, dtype),
        ):
            if found != expected:
                raise DataError(
                    f"{manifest}: expected {name} {expected} as in {self.idx.name}, found {found}; {DAMAGED}"
                )

    def check_index(self, entries: NDArray[np.int64]) -> None:
        """Raise DataError with a byte offset if a length is not positive, or `entries` do not follow from the lengths.

        The entries are `pointers` (byte offsets in the .bin) or `pointers_and_boundaries`.
        """
        lengths, first = self.lengths, 0
        for expected in _pointers_and_boundaries(self._positive_lengths(), self.dtype):
            found = entries[first : first + expected.size]
            expected = expected[: found.size]
            if not np.array_equal(found, expected):
                at = first + int(np.argmax(found != expected))
                rule = f"boundary {at - lengths.size} to be {expected[at - first]}"
                if at < lengths.size:
                    rule = f"pointer of document {at} to be {expected[at - first]} bytes, the tokens before it"
                raise damage_error(self.idx, HEADER.size + 4 * lengths.size + 8 * at, rule, entries[at])
            first += expected.size

    def _positive_lengths(self) -> Iterator[NDArray[np.int32]]:
        for first in range(0, self.lengths.size, _ITEMS_PER_STEP):
            step = self.lengths[first : first + _ITEMS_PER_STEP]
            if step.min() < 1:
                at = int(np.argmax(step < 1))
                offset = HEADER.size + 4 * (first + at)
                raise damage_error(self.idx, offset, f"a length above 0 of document {first + at}", step[at])
            yield step

    def locate(self, documents: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return each document's byte offset in the .bin and length in tokens. Documents are numbered within the shard.

        Raise DataError if a document has no token, or does not end where the next document begins.
        """
        begins, lengths = self.pointers[documents], self.lengths[documents]
        # After the last pointer comes the first boundary, which is 0.
        next_begins = self.pointers_and_boundaries[documents + 1]
        next_begins = np.where(next_begins == 0, self.end, next_begins)
        is_wrong = (begins + lengths.astype(np.int64) * self.dtype.itemsize != next_begins) | (lengths < 1)
        # The sum may have overflowed, so its summands are checked too.
        is_wrong |= (begins < 0) | (begins > self.end) | (next_begins > self.end)
        if is_wrong.any():
            at = int(np.argmax(is_wrong))
            number = int(documents[at])
            rule = f"pointer and length of document {number} to end at byte {next_begins[at]}, within {self.end} bytes"
            found = f"pointer {begins[at]} and {lengths[at]} tokens of {self.dtype}"
            raise damage_error(self.idx, HEADER.size + 4 * self.lengths.size + 8 * number, rule, found)
        return begins, lengths

    def prefetch(self, documents: NDArray[np.int64]) -> None:
        """Start fetching the first and the last block of each document in threads. Does nothing for a local shard."""
        if isinstance(self.bin, RemoteFile):
            begins = self.pointers[documents]
            lasts = begins + self.lengths[documents].astype(np.int64) * self.dtype.itemsize - 1
            self.bin.prefetch(np.append(begins, lasts))

    def read_ids(self) -> Iterator[NDArray[Any]]:
        """Yield all token ids of the .bin in arrays, unchecked. Raise StorageError if a remote file is unreadable."""
        if isinstance(self.bin, Path):
            yield from read_items(self.bin, self.dtype)
            return
        for begin in range(0, self.end, _REMOTE_STEP_BYTES):
            prefetched_end = min(begin + _PREFETCHED_STEPS * _REMOTE_STEP_BYTES, self.end)
            self.bin.prefetch(np.arange(begin, prefetched_end, BLOCK_BYTES))
            yield np.frombuffer(bytearray(self.bin[begin : begin + _REMOTE_STEP_BYTES]), self.dtype)


class AllowedIds:
    """Token ids that may occur in a document: the vocabulary without special tokens, except [UNK]."""

    def __init__(self, special_ids: Iterable[int], *, unknown: int, vocab_size: int) -> None:
        self.unknown, self._vocab_size = unknown, vocab_size
        self._special = sorted({*special_ids} - {unknown})
        # The longest range of ids without a special token, for the fast test in `first_forbidden`.
        ranges = zip([0, *(id_ + 1 for id_ in self._special)], [*self._special, vocab_size], strict=True)
        self._longest_range = max(ranges, key=lambda bounds: bounds[1] - bounds[0])

    def first_forbidden(self, ids: NDArray[Any]) -> int | None:
        """Return the index in `ids` of the first id that may not occur in a document, or None if all may."""
        # This runs for every token of a run. Three cheap comparisons nearly always leave no suspect; they take 1 % of
        # building a micro-batch.
        first, end = self._longest_range
        at = np.flatnonzero(((ids < first) | (ids >= end)) & (ids != self.unknown))
        if not at.size:
            return None
        forbidden = (ids[at] < 0) | (ids[at] >= self._vocab_size) | np.isin(ids[at], self._special)
        return int(at[np.argmax(forbidden)]) if forbidden.any() else None

    def rule_for(self, forbidden_id: int) -> str:
        """Return the rule that a forbidden id breaks, for an error message."""
        return "no special token" if 0 <= forbidden_id < self._vocab_size else f"an id below {self._vocab_size}"

    def scan(self, shard: MappedShard) -> str:
        """Read all token ids of a shard, and return the hexadecimal SHA-256 of its .bin.

        Raise DataError with the byte offset of an id that may not occur in a document.
        """
        digest, first = hashlib.sha256(), 0
        for ids in shard.read_ids():
            digest.update(ids.data)
            if (at := self.first_forbidden(ids)) is not None:
                offset = (first + at) * ids.itemsize
                document = int(np.searchsorted(shard.pointers, offset, side="right")) - 1
                token = (offset - int(shard.pointers[document])) // ids.itemsize
                found = f"{ids[at]} (token {token} of document {document})"
                raise damage_error(shard.bin, offset, self.rule_for(ids[at]), found)
            first += ids.size
        return digest.hexdigest()


def damage_error(path: Path | RemoteFile, offset: int, expected: object, found: object) -> DataError:
    """Return the error for a file that differs from what is expected at a byte offset."""
    return DataError(f"{path}, byte {offset}: expected {expected}, found {found}; {DAMAGED}")
