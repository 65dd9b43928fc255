"""Exact duplicates among the texts of a corpus, found by hashes that are read once, spread over buckets, and sorted."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.data.corpus.volumes import read_chunks

HASH_DTYPE = np.dtype([("high", ">u8"), ("low", ">u8")])  # of the 16 bytes as blake2b gives them
_ENTRY = np.dtype([("hash", HASH_DTYPE), ("document", "<i8")])
_BUCKET_DOCUMENTS = 12_000_000  # sorted together: measured 0.7 GB of memory, 3.4 M a second


def find_exact_duplicates(hash_files: Sequence[Path], folder: Path) -> NDArray[np.bool_]:
    """Return True for each document, in the order of the files of 16-byte hashes, whose hash has occurred before.

    Hashes go to bucket files in `folder` by their first bits, and each bucket is read once, so memory is bounded but
    for a byte per document. Disk, while this runs: 24 bytes per document.
    """
    documents = sum(path.stat().st_size for path in hash_files) // HASH_DTYPE.itemsize
    duplicate = np.zeros(documents, dtype=np.bool_)
    buckets = [folder / f"bucket-{number}" for number in range(-(-documents // _BUCKET_DOCUMENTS))]
    with ExitStack() as stack:
        streams = [stack.enter_context(path.open("wb", buffering=1 << 20)) for path in buckets]
        first = 0
        for hashes in (some for path in hash_files for some in read_chunks(path, HASH_DTYPE)):
            # Repeats among these hashes are settled here: however often one text occurs, buckets stay of even size.
            repeats = repeated(hashes)
            duplicate[first + repeats] = True
            entries = np.empty(hashes.size, dtype=_ENTRY)
            entries["hash"], entries["document"] = hashes, np.arange(first, first + hashes.size)
            entries = np.delete(entries, repeats)
            bucket_of = (entries["hash"]["high"] >> np.uint64(32)) * np.uint64(len(buckets)) >> np.uint64(32)
            order = np.argsort(bucket_of, kind="stable")
            ends = np.searchsorted(bucket_of[order], np.arange(len(buckets)), side="right")
            for stream, own in zip(streams, np.split(order, ends[:-1]), strict=True):
                stream.write(entries[own].data)
            first += hashes.size
    for path in buckets:
        entries = np.fromfile(path, _ENTRY)
        duplicate[entries["document"][repeated(entries["hash"])]] = True
        path.unlink()
    return duplicate


def repeated(hashes: NDArray[np.void]) -> NDArray[np.int64]:
    """Return the positions of hashes that occur at an earlier position too."""
    if not hashes.size:
        return np.zeros(0, dtype=np.int64)
    high, low = hashes["high"].astype(np.uint64), hashes["low"].astype(np.uint64)
    # Numbers that share their lower bits with another, by one sort of plain integers: those bits, then the position.
    bits = np.uint64(max(1, high.size - 1).bit_length())
    keys = np.sort((high << bits) | np.arange(high.size, dtype=np.uint64))
    same = keys[1:] >> bits == keys[:-1] >> bits
    suspects = keys[np.append(same, False) | np.append(False, same)] & ((np.uint64(1) << bits) - np.uint64(1))
    suspects.sort()
    # Of these few, those that are equal in all bits; stable, so equal ones stay in the order of their positions.
    ranked = suspects[np.lexsort((low[suspects], high[suspects]))].astype(np.int64)
    before, after = ranked[:-1], ranked[1:]
    return after[(high[before] == high[after]) & (low[before] == low[after])]
