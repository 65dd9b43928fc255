"""Finished parts of a run become a corpus, in a way that survives a kill at any moment.

Duplicates are left out and a share is held out here and not where texts are tokenised: a duplicate is known by all
parts alone, and workers write the same files for any share. Memory: constant, but for deduplication.

Parts are only read. Everything is built in PREFIX.partial/output and moved to its final name when all of it is on disk,
the manifest last, so the same call after a kill gives the same bytes. Costs the disk space of the parts and the corpus
side by side; a part that becomes a whole volume is linked and costs none.
"""

import json
import math
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, groupby, takewhile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.data.corpus.format import (
    DUPLICATE,
    CorpusFiles,
    InputRecord,
    Manifest,
    Volume,
    read_manifest,
    reject_line,
    validation_files,
    volume_name,
    write_manifest,
)
from megatron_neobert.data.corpus.volumes import VolumesWriter, read_chunks
from megatron_neobert.errors import DataError, OutputError
from megatron_neobert.runtime.atomic_files import sync_to_disk
from megatron_neobert.text import listed

_WINDOW_DOCUMENTS = 1 << 18  # read at a time, and
_WINDOW_BYTES = 4 << 20  # of ids; a longer document is read whole
HASH_DTYPE = np.dtype([("high", ">u8"), ("low", ">u8")])  # of the 16 bytes as blake2b gives them
_BUCKET_DOCUMENTS = 12_000_000  # compared with each other at a time: measured 1.1 GB of memory, 4 M a second
_KEPT, _HELD_OUT, _DUPLICATE = 0, 1, 2  # what becomes of a document


@dataclass(frozen=True)
class PartFiles:
    """What one finished part consists of, complete and on disk."""

    shard: str  # as the manifest calls it
    ids: Path  # documents end to end, in the corpus's dtype
    lengths: Path  # tokens of each document, int32
    hashes: Path  # 16 bytes of blake2b of each document's text; there only for deduplication and for a split
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


class WrittenCorpus(NamedTuple):
    """The manifests of what has been written."""

    manifest: Manifest
    validation: Manifest | None


def write_corpus(
    parts: Sequence[PartFiles],
    output: OutputSettings,
    draft: Manifest,
    *,
    folder: Path,
    on_progress: Callable[[int], None] = lambda _: None,
) -> WrittenCorpus:
    """Writes the corpus of these parts, and replaces what there is under its name.

    Args:
        parts: In the order of the inputs, a shard's parts one after the other.
        draft: From `draft_manifest`.
        folder: PREFIX.partial, for this call alone; its sub-folder `output` is used and removed.
        on_progress: Called with the bytes of token ids dealt with since the last call.

    Raises:
        DataError: No document is left for the corpus, or none is held out for validation.
    """
    work = folder / "output"
    if work.exists():  # of a call that was killed
        shutil.rmtree(work)
    work.mkdir()
    try:
        joined = _Joined(output, draft, work, on_progress)
        joined.join(parts)
        manifests = joined.build_manifests(parts)
        write_manifest(work / "training.json", manifests.manifest)
        if manifests.validation:
            write_manifest(work / "validation.json", manifests.validation)
        _join_rejects(parts, work / "rejects")
        _commit(output.files, manifests, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return manifests


def refuse_existing(files: CorpusFiles, *, overwrite: bool) -> None:
    """Raises OutputError where a corpus, or a piece of one, would be replaced unasked."""
    both = (files, validation_files(files))
    manifests = [one.manifest for one in both if one.manifest.exists()]
    existing = [str(file) for file in [volume for one in both for volume in one.existing_volumes()] + manifests]
    if existing and not overwrite:
        raise OutputError(
            f"{listed(existing)} exist{'s' if len(existing) == 1 else ''} already; "
            "choose another --output-prefix, or replace with --overwrite"
        )


class _Joined:
    """The volumes of both corpora before they have their names, and what was left out.

    Args:
        work: An empty folder.
    """

    def __init__(self, output: OutputSettings, draft: Manifest, work: Path, on_progress: Callable[[int], None]) -> None:
        self._output, self._draft, self._on_progress = output, draft, on_progress
        self._dtype, self._unknown = np.dtype(draft.dtype), draft.special_tokens["unk"]
        self._training = VolumesWriter(work / "training", self._dtype, volume_bytes=output.shard_bytes)
        self._validation = VolumesWriter(work / "validation", self._dtype, volume_bytes=None)
        self._duplicates = self._unknown_in_duplicates = self._unknown_held_out = 0
        self._of_training: defaultdict[str, Counter[str]] = defaultdict(Counter)  # documents and tokens, by shard
        self._of_validation: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def join(self, parts: Sequence[PartFiles]) -> None:
        """Sends every document of the parts into a volume, or leaves it out."""
        output, parts = self._output, [part for part in parts if part.documents]
        duplicate = find_duplicates([part.hashes for part in parts]) if output.deduplicate else None
        limit = math.inf if output.shard_bytes is None else output.shard_bytes // self._dtype.itemsize
        first = 0
        for _, group in groupby(parts, key=lambda part: part.shard if output.keep_shards else None):
            together = list(group)
            for part in together:
                some = None if duplicate is None else duplicate[first : first + part.documents]
                fates = _choose(part, some, output.validation_fraction)
                if fates is None and len(together) == 1 and part.tokens <= limit:
                    self._training.link(part.ids, part.lengths, sha256=part.ids_sha256)
                    self._of_training[part.shard].update(documents=part.documents, tokens=part.tokens)
                    self._on_progress(part.ids.stat().st_size)
                else:
                    self._copy(part, fates)
                first += part.documents
            if output.keep_shards:
                self._training.cut()

    def _copy(self, part: PartFiles, fates: NDArray[np.uint8] | None) -> None:
        item_bytes = self._dtype.itemsize
        for ids, lengths, chosen in _windows(part, fates, item_bytes):
            kept, kept_lengths = ids, lengths
            if chosen is not None:
                kept, kept_lengths = _pick(ids, lengths, chosen == _KEPT, item_bytes)
                held_out, held_out_lengths = _pick(ids, lengths, chosen == _HELD_OUT, item_bytes)
                duplicates, duplicate_lengths = _pick(ids, lengths, chosen == _DUPLICATE, item_bytes)
                self._validation.append(held_out, held_out_lengths)
                _count(self._of_validation[part.shard], held_out_lengths)
                self._duplicates += duplicate_lengths.size
                self._unknown_held_out += int(np.count_nonzero(np.frombuffer(held_out, self._dtype) == self._unknown))
                self._unknown_in_duplicates += int(
                    np.count_nonzero(np.frombuffer(duplicates, self._dtype) == self._unknown)
                )
            self._training.append(kept, kept_lengths)
            _count(self._of_training[part.shard], kept_lengths)
            self._on_progress(ids.nbytes)

    def build_manifests(self, parts: Sequence[PartFiles]) -> WrittenCorpus:
        """Raises DataError where a corpus would have no document."""
        fraction, files = self._output.validation_fraction, self._output.files
        volumes, held_out = self._training.finish(), self._validation.finish()
        lengths, held_out_lengths = self._training.lengths, self._validation.lengths
        if not volumes or (fraction and not held_out):
            total = lengths.documents + held_out_lengths.documents
            raise DataError(
                f"--split-validation {fraction} of {total:,} documents holds out {held_out_lengths.documents:,} and "
                f"leaves {lengths.documents:,}; each of both corpora needs at least one document. Choose another "
                "fraction"
            )
        unknown = sum(part.unknown_tokens for part in parts) - self._unknown_in_duplicates - self._unknown_held_out
        dropped = self._draft.dropped | ({DUPLICATE: self._duplicates} if self._duplicates else {})
        manifest = replace(
            self._draft,
            part_of="training" if fraction else "all",
            inputs=_counted(self._draft.inputs, self._of_training),
            documents=lengths.documents,
            held_out=held_out_lengths.documents,
            tokens=lengths.tokens,
            unknown_tokens=unknown,
            dropped=dropped,
            statistics=lengths.statistics(),
            volumes=_name(volumes, files),
        )
        if not fraction:
            return WrittenCorpus(manifest, None)
        validation = replace(
            manifest,
            part_of="validation",
            inputs=_counted(self._draft.inputs, self._of_validation),
            documents=held_out_lengths.documents,
            held_out=lengths.documents,
            tokens=held_out_lengths.tokens,
            unknown_tokens=self._unknown_held_out,
            statistics=held_out_lengths.statistics(),
            volumes=_name(held_out, validation_files(files)),
        )
        return WrittenCorpus(manifest, validation)


def _count(counts: Counter[str], lengths: NDArray[np.int32]) -> None:
    counts.update(documents=lengths.size, tokens=int(lengths.sum(dtype=np.int64)))


def _counted(inputs: Mapping[str, InputRecord], counts: Mapping[str, Counter[str]]) -> dict[str, InputRecord]:
    return {
        name: replace(record, documents=counts[name]["documents"], tokens=counts[name]["tokens"])
        for name, record in inputs.items()
    }


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
        for hashes in read_chunks(part.hashes, HASH_DTYPE):
            fates[first : first + hashes.size][hashes["high"] < below] = _HELD_OUT
            first += hashes.size
    if duplicate is not None:
        fates[duplicate] = _DUPLICATE
    return fates if fates.any() else None


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


def find_duplicates(hash_files: Sequence[Path], *, bucket_documents: int = _BUCKET_DOCUMENTS) -> NDArray[np.bool_]:
    """True for each document, in the order of the files, whose hash has occurred before.

    Documents are spread over buckets by their hashes, and every file is read once for each bucket: so memory is bounded
    for any number of documents, but for a byte for each, and nothing is written.

    Args:
        hash_files: 16 bytes per document, evenly distributed.
        bucket_documents: In a bucket, about; the result does not depend on it.
    """
    documents = sum(path.stat().st_size for path in hash_files) // HASH_DTYPE.itemsize
    duplicate = np.zeros(documents, dtype=np.bool_)
    buckets = -(-documents // bucket_documents)
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


def _name(volumes: Sequence[Volume], files: CorpusFiles) -> list[Volume]:
    return [
        replace(volume, name=volume_name(files.name, number, volumes=len(volumes)))
        for number, volume in enumerate(volumes)
    ]


def _join_rejects(parts: Sequence[PartFiles], target: Path) -> None:
    """One file of all parts' rejects, on disk."""
    with target.open("wb") as stream:
        for part in parts:
            unit, before = part.records_before or ("", 0)
            with part.rejects.open("rb") as rejects:
                for line in rejects if before else ():
                    entry = json.loads(line)
                    stream.write(reject_line(entry | {unit: entry[unit] + before}))
                shutil.copyfileobj(rejects, stream, 1 << 20)
    sync_to_disk(target)


def _commit(files: CorpusFiles, manifests: WrittenCorpus, work: Path) -> None:
    """Moves what is complete in `work` to its names.

    The old manifests go first: a new .bin beside an old .idx must not pass for a corpus. Then the old volumes, of which
    there may have been more.
    """
    held_out_files = validation_files(files)
    old = [file for one in (files, held_out_files) for file in _old_volumes(one)]
    for one in (files, held_out_files):
        one.manifest.unlink(missing_ok=True)
    sync_to_disk(files.manifest.parent)
    for file in (*old, files.rejects):
        file.unlink(missing_ok=True)
    if manifests.validation:
        _move(work / "validation", manifests.validation, held_out_files)
    if (work / "rejects").stat().st_size:
        (work / "rejects").replace(files.rejects)
    _move(work / "training", manifests.manifest, files)


def _old_volumes(files: CorpusFiles) -> list[Path]:
    """The .bin and .idx of the corpus that is replaced, the last volume first; files that it did not write stay.

    Its manifest lists them. Without one that can be read it was of version 1, in one volume, or a run was killed in its
    commit: volumes are removed from the last and moved from the first, so a kill leaves numbers without a gap.
    """
    try:
        names = [volume.name for volume in read_manifest(files.manifest).volumes]
    except (DataError, OSError):
        numbered = (volume_name(files.name, number, volumes=2) for number in count())
        names = list(takewhile(lambda name: any(file.exists() for file in files.volume_files(name)), numbered))
    return [file for name in (*reversed(names), files.name) for file in files.volume_files(name)]


def _move(written: Path, manifest: Manifest, files: CorpusFiles) -> None:
    for number, volume in enumerate(manifest.volumes):
        for end, target in zip(("bin", "idx"), files.volume_files(volume.name), strict=True):
            (written / f"{number}.{end}").replace(target)
    sync_to_disk(files.manifest.parent)
    written.with_suffix(".json").replace(files.manifest)
    sync_to_disk(files.manifest.parent)
