"""What becomes of each document: it is kept, held out for validation, or left out as a duplicate.

A duplicate is known by all parts alone, so this is decided after texts are tokenised, by the hashes that workers leave.
Memory: constant, but for deduplication.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.data.corpus.volumes import read_chunks

HASH_DTYPE = np.dtype([("high", ">u8"), ("low", ">u8")])  # of the 16 bytes as blake2b gives them
_BUCKET_DOCUMENTS = 12_000_000  # compared with each other at a time: measured 1.1 GB of memory, 4 M a second
KEPT, HELD_OUT, DUPLICATED = 0, 1, 2


def write_fates(path: Path, hash_files: Sequence[Path], *, deduplicate: bool, validation_fraction: float) -> None:
    """A new file with a byte for each document, in the order of the files: one of the three numbers above.

    A text decides by its hash whether it is held out, so that this does not depend on the documents around it, and
    one text never ends up in both corpora.
    """
    duplicate = find_exact_duplicates(hash_files) if deduplicate else None
    below, first = np.uint64(min(math.ceil(validation_fraction * 2**64), 2**64 - 1)), 0
    with path.open("wb") as stream:
        for hashes in (chunk for file in hash_files for chunk in read_chunks(file, HASH_DTYPE)):
            fates = np.where(hashes["high"] < below, np.uint8(HELD_OUT), np.uint8(KEPT))
            if duplicate is not None:
                fates[duplicate[first : first + fates.size]] = DUPLICATED
            stream.write(fates.data)
            first += fates.size


def find_exact_duplicates(hash_files: Sequence[Path]) -> NDArray[np.bool_]:
    """True for each document, in the order of the files, whose hash has occurred before.

    Documents are spread over buckets by their hashes, and every file is read once for each bucket: so memory is bounded
    for any number of documents, but for a byte for each, and nothing is written.

    Args:
        hash_files: 16 bytes per document, evenly distributed.
    """
    documents = sum(path.stat().st_size for path in hash_files) // HASH_DTYPE.itemsize
    duplicate = np.zeros(documents, dtype=np.bool_)
    buckets = -(-documents // _BUCKET_DOCUMENTS)
    half = np.uint64(32)
    for bucket in range(buckets):
        found, places, first = [], [], 0
        for path in hash_files:
            for hashes in read_chunks(path, HASH_DTYPE):
                own = np.flatnonzero(((hashes["high"] >> half) * np.uint64(buckets)) >> half == bucket)
                # Repeats within a chunk are settled here: however often one text occurs, buckets stay of even size.
                repeats = _repeats(hashes[own])
                duplicate[first + own[repeats]] = True
                own = np.delete(own, repeats)
                found.append(hashes[own])
                places.append(first + own)
                first += hashes.size
        duplicate[np.concatenate(places)[_repeats(np.concatenate(found))]] = True
    return duplicate


def _repeats(hashes: NDArray[np.void]) -> NDArray[np.int64]:
    """Positions of hashes that occur at an earlier position too."""
    if not hashes.size:
        return np.zeros(0, dtype=np.int64)
    high, low = hashes["high"].astype(np.uint64), hashes["low"].astype(np.uint64)
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
