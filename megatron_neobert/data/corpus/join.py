"""Which documents of the finished parts go into a corpus, and their way into its volumes.

Duplicates are left out and a share is held out here and not where texts are tokenised: a duplicate is known by all
parts alone, and workers write the same files for any share. Memory: constant, but for deduplication.

Duplicates are found from 16 bytes of hash per document, for more of them than memory holds. Hashes are spread over
bucket files by their first bits and each bucket is sorted alone, so that memory is about three buckets and one byte per
document: 1.2 GB for 10^9 documents, with 24 GB of temporary files beside the 16 GB of hashes. Two million documents a
second. Documents count as equal where all 128 bits are.
"""

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.data.corpus.format import CorpusFiles, token_dtype
from megatron_neobert.data.corpus.volumes import VolumesWriter, read_chunks
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer

_WINDOW_DOCUMENTS = 1 << 18  # read at a time, and
_WINDOW_BYTES = 4 << 20  # of ids; a longer document is read whole
HASH_DTYPE = np.dtype([("high", ">u8"), ("low", ">u8")])  # of the 16 bytes as blake2b gives them
_ENTRY_DTYPE = np.dtype([("high", "<u8"), ("low", "<u8"), ("document", "<u8")])
_BUCKET_BYTES = 64 << 20
_SPREAD_DOCUMENTS = 1 << 20  # to the buckets at a time
_KEPT, _HELD_OUT, _DUPLICATE = 0, 1, 2  # what becomes of a document


@dataclass(frozen=True)
class PartFiles:
    """What one finished part consists of, complete and on disk."""

    shard: str
    ids: Path  # documents end to end, in the corpus's dtype
    lengths: Path  # tokens of each document, int32
    hashes: Path | None  # 16 bytes of blake2b of each document's text; needed for deduplication and for a split
    rejects: Path  # JSON lines about records that are errors
    documents: int
    tokens: int
    unknown_tokens: int
    ids_sha256: str
    # Under which key rejects have their numbers and what to add to those; None: they count from the shard's beginning.
    records_before: tuple[str, int] | None = None


@dataclass(frozen=True)
class OutputSettings:
    """Which documents become a corpus, and in what files."""

    files: CorpusFiles
    keep_shards: bool  # a volume per shard
    shard_bytes: int | None  # upper limit of a volume's .bin; None: no limit
    validation_fraction: float  # of the documents, chosen by their text, into a corpus of their own
    deduplicate: bool


@dataclass
class JoinedParts:
    """The volumes of both corpora before they have their names, and what was left out."""

    training: VolumesWriter
    validation: VolumesWriter | None
    duplicates: int = 0
    unknown_in_duplicates: int = 0
    unknown_held_out: int = 0
    unknown_tokens: int = 0  # of all parts


def join_parts(
    parts: Sequence[PartFiles],
    output: OutputSettings,
    work: Path,
    tokenizer: Tokenizer,
    on_progress: Callable[[int], None],
) -> JoinedParts:
    """Sends every document of the parts into a volume below `work`, or leaves it out.

    Args:
        work: An empty folder.
        on_progress: Called with the bytes of token ids dealt with since the last call.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    joined = JoinedParts(
        VolumesWriter(work / "training", dtype, volume_bytes=output.shard_bytes),
        VolumesWriter(work / "validation", dtype, volume_bytes=None) if output.validation_fraction else None,
        unknown_tokens=sum(part.unknown_tokens for part in parts),
    )
    parts = [part for part in parts if part.documents]
    duplicate = None
    if output.deduplicate:
        duplicate = find_duplicates([_hashes(part) for part in parts], folder=work / "duplicates")
    limit = math.inf if output.shard_bytes is None else output.shard_bytes // dtype.itemsize
    first = 0
    for _, group in groupby(parts, key=lambda part: part.shard if output.keep_shards else None):
        together = list(group)
        for part in together:
            some = None if duplicate is None else duplicate[first : first + part.documents]
            fates = _choose(part, some, output.validation_fraction)
            if fates is None and len(together) == 1 and part.tokens <= limit:
                joined.training.link(part.ids, part.lengths, sha256=part.ids_sha256)
                on_progress(part.ids.stat().st_size)
            else:
                _copy(part, fates, joined, dtype, tokenizer.unk_id, on_progress)
            first += part.documents
        if output.keep_shards:
            joined.training.cut()
    return joined


def _choose(
    part: PartFiles, duplicate: NDArray[np.bool_] | None, validation_fraction: float
) -> NDArray[np.uint8] | None:
    """The fate of each document; None: all are kept.

    A text decides by its hash whether it is held out, so that this does not depend on the documents around it, and
    one text never ends up in both corpora.
    """
    fates = np.zeros(part.documents, dtype=np.uint8)
    if validation_fraction:
        below, first = np.uint64(min(math.ceil(validation_fraction * 2**64), 2**64 - 1)), 0
        for hashes in read_chunks(_hashes(part), HASH_DTYPE):
            fates[first : first + hashes.size][hashes["high"] < below] = _HELD_OUT
            first += hashes.size
    if duplicate is not None:
        fates[duplicate] = _DUPLICATE
    return fates if fates.any() else None


def _hashes(part: PartFiles) -> Path:
    assert part.hashes is not None, f"{part.ids}: written without hashes"
    return part.hashes


def _copy(
    part: PartFiles,
    fates: NDArray[np.uint8] | None,
    joined: JoinedParts,
    dtype: np.dtype[Any],
    unk_id: int,
    on_progress: Callable[[int], None],
) -> None:
    for ids, lengths, chosen in _windows(part, fates, dtype.itemsize):
        if chosen is None:
            joined.training.append(ids, lengths)
        else:
            joined.training.append(*_pick(ids, lengths, chosen == _KEPT, dtype.itemsize))
            held_out, held_out_lengths = _pick(ids, lengths, chosen == _HELD_OUT, dtype.itemsize)
            duplicates, duplicate_lengths = _pick(ids, lengths, chosen == _DUPLICATE, dtype.itemsize)
            if joined.validation:
                joined.validation.append(held_out, held_out_lengths)
            joined.duplicates += duplicate_lengths.size
            joined.unknown_held_out += int(np.count_nonzero(np.frombuffer(held_out, dtype) == unk_id))
            joined.unknown_in_duplicates += int(np.count_nonzero(np.frombuffer(duplicates, dtype) == unk_id))
        on_progress(ids.nbytes)


def _windows(
    part: PartFiles, fates: NDArray[np.uint8] | None, item_bytes: int
) -> Iterator[tuple[memoryview, NDArray[np.int32], NDArray[np.uint8] | None]]:
    """Ids, lengths and fates of consecutive documents."""
    with part.ids.open("rb") as ids, part.lengths.open("rb") as lengths_file:
        first = 0
        while (lengths := np.fromfile(lengths_file, "<i4", _WINDOW_DOCUMENTS)).size:
            ends = np.cumsum(lengths, dtype=np.int64) * item_bytes
            start, begin = 0, 0
            while start < lengths.size:
                stop = max(start + 1, int(np.searchsorted(ends, begin + _WINDOW_BYTES, side="right")))
                content = ids.read(int(ends[stop - 1]) - begin)
                some = None if fates is None else fates[first + start : first + stop]
                yield memoryview(content), lengths[start:stop], some
                start, begin = stop, int(ends[stop - 1])
            first += lengths.size


def _pick(
    ids: memoryview, lengths: NDArray[np.int32], chosen: NDArray[np.bool_], item_bytes: int
) -> tuple[memoryview, NDArray[np.int32]]:
    """Ids and lengths of the chosen documents; those that follow each other are copied in one go."""
    if chosen.all():
        return ids, lengths
    bounds = np.append(0, np.cumsum(lengths, dtype=np.int64) * item_bytes)
    edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False))
    runs = bounds[edges].reshape(-1, 2).tolist()
    return memoryview(b"".join([ids[begin:end] for begin, end in runs])), lengths[chosen]


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
            while (hashes := np.fromfile(stream, HASH_DTYPE, _SPREAD_DOCUMENTS)).size:
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
