"""Which documents repeat an earlier one, found from 16 bytes of hash per document, for more of them than memory holds.

Hashes are spread over bucket files by their first bits and each bucket is sorted alone, so that memory is about three
buckets and one byte per document: 1.2 GB for 10^9 documents, with 24 GB of temporary files beside the 16 GB of hashes.
Two million documents a second. Documents count as equal where all 128 bits are.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

HASH_DTYPE = np.dtype([("high", ">u8"), ("low", ">u8")])  # of the 16 bytes as blake2b gives them
_ENTRY_DTYPE = np.dtype([("high", "<u8"), ("low", "<u8"), ("document", "<u8")])
_BUCKET_BYTES = 64 << 20
_CHUNK = 1 << 20  # documents spread at a time


def find_duplicates(
    hash_files: Sequence[Path], *, folder: Path, bucket_bytes: int = _BUCKET_BYTES
) -> NDArray[np.bool_]:
    """True for each document, in the order of the files, whose hash has occurred before.

    Args:
        hash_files: 16 bytes per document, evenly distributed.
        folder: For temporary files of 24 bytes per document; created, and removed in the end.
        bucket_bytes: Size of a bucket file, about; the result does not depend on it.
    """
    documents = sum(path.stat().st_size for path in hash_files) // HASH_DTYPE.itemsize
    duplicate = np.zeros(documents, dtype=np.bool_)
    buckets = min(-(-documents * _ENTRY_DTYPE.itemsize // bucket_bytes), 1 << 16)
    folder.mkdir()
    first = 0
    for path in hash_files:
        with path.open("rb") as stream:
            while (hashes := np.fromfile(stream, HASH_DTYPE, _CHUNK)).size:
                _spread(hashes, first, duplicate, folder, buckets)
                first += hashes.size
    for path in sorted(folder.iterdir()):
        entries = np.fromfile(path, _ENTRY_DTYPE)
        duplicate[entries["document"][_repeats(entries["high"], entries["low"])]] = True
        path.unlink()
    shutil.rmtree(folder)
    return duplicate


def _spread(hashes: NDArray[np.void], first: int, duplicate: NDArray[np.bool_], folder: Path, buckets: int) -> None:
    """Appends documents first, first + 1, ... to their buckets.

    Those that repeat a document of the same chunk are settled at once: however often one text occurs, its bucket gets
    no more than one entry per chunk, and buckets stay of even size.
    """
    entries = np.empty(hashes.size, dtype=_ENTRY_DTYPE)
    entries["high"], entries["low"] = hashes["high"], hashes["low"]
    entries["document"] = np.arange(first, first + hashes.size)
    repeats = _repeats(entries["high"], entries["low"])
    duplicate[first + repeats] = True
    entries = np.delete(entries, repeats)
    first_bits = entries["high"] >> np.uint64(48)
    bucket = ((first_bits * np.uint64(buckets)) >> np.uint64(16)).astype(np.uint16)
    order = np.argsort(bucket, kind="stable")  # entries of a bucket stay in the order of the documents
    ends = np.cumsum(np.bincount(bucket, minlength=buckets))
    for number, (start, end) in enumerate(zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True)):
        if start < end:
            with (folder / f"{number}").open("ab") as stream:  # opened each time: buckets may outnumber open files
                entries[order[start:end]].tofile(stream)


def _repeats(high: NDArray[np.uint64], low: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Positions of the 128-bit numbers that occur at an earlier position too."""
    # Numbers that share their lower bits with another, by one sort of plain integers: those bits, then the position.
    bits = np.uint64(max(1, high.size - 1).bit_length())
    keys = np.sort((high << bits) | np.arange(high.size, dtype=np.uint64))
    same = keys[1:] >> bits == keys[:-1] >> bits
    suspects = keys[np.append(same, False) | np.append(False, same)] & ((np.uint64(1) << bits) - np.uint64(1))
    suspects.sort()
    # And of these few the ones that are equal in all bits; stable, so equal ones stay in the order of their positions.
    ranked = suspects[np.lexsort((low[suspects], high[suspects]))].astype(np.int64)
    before, after = ranked[:-1], ranked[1:]
    return after[(high[before] == high[after]) & (low[before] == low[after])]
