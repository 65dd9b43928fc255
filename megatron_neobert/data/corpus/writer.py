"""Finished parts of a run become a corpus, in a way that survives a kill at any moment.

Duplicates are left out and a share is held out here and not where texts are tokenised: a duplicate is known by all
parts alone, and workers write the same files for any share. Memory: constant, but for deduplication.

Parts are only read. Everything is built in PREFIX.partial/output and moved to its final name when all of it is on disk,
the manifest last, so the same call after a kill gives the same bytes; it keeps the volumes that were finished. Costs
the disk space of the parts and the corpus side by side; a part that becomes a whole volume is linked and costs none.
"""

import hashlib
import json
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.data.corpus.format import (
    DUPLICATE,
    CorpusFiles,
    Manifest,
    SourceRecord,
    Volume,
    read_manifest,
    reject_line,
    validation_files,
    volume_name,
    write_manifest,
)
from megatron_neobert.data.corpus.joining import (
    DUPLICATED,
    HELD_OUT,
    KEPT,
    OnBytes,
    OutputSettings,
    PartFiles,
    Piece,
    VolumeTask,
    WrittenVolume,
    lay_out,
    write_volume_of,
)
from megatron_neobert.data.corpus.sources import write_sources
from megatron_neobert.data.corpus.volumes import read_chunks
from megatron_neobert.errors import DataError, OutputError
from megatron_neobert.runtime.atomic_files import replace_file, replacing, sync_to_disk
from megatron_neobert.text import listed

_HELD_OUT_NAME = "held_out"  # of the one volume for validation, before it has its own
HASH_DTYPE = np.dtype([("high", ">u8"), ("low", ">u8")])  # of the 16 bytes as blake2b gives them
_BUCKET_DOCUMENTS = 12_000_000  # compared with each other at a time: measured 1.1 GB of memory, 4 M a second


class WrittenCorpus(NamedTuple):
    """The manifests of what has been written."""

    manifest: Manifest
    validation: Manifest | None


def write_one_after_the_other(tasks: Iterable[VolumeTask], on_bytes: OnBytes) -> Iterator[WrittenVolume]:
    """All volumes, in this process."""
    for task in tasks:
        yield write_volume_of(task, on_bytes)


def write_corpus(
    parts: Sequence[PartFiles],
    output: OutputSettings,
    draft: Manifest,
    *,
    folder: Path,
    write_volumes: Callable[[list[VolumeTask], OnBytes], Iterable[WrittenVolume]] = write_one_after_the_other,
    on_progress: OnBytes = lambda _: None,
) -> WrittenCorpus:
    """Writes the corpus of these parts, and replaces what there is under its name.

    Args:
        parts: In the order of the inputs, a shard's parts one after the other.
        draft: From `draft_manifest`.
        folder: PREFIX.partial, for this call alone; its sub-folder `output` is used and removed.
        write_volumes: Has `write_volume_of` called for each task, in any order and any process.
        on_progress: Called with the bytes of token ids dealt with since the last call.

    Raises:
        DataError: No document is left for the corpus, or none is held out for validation.
    """
    work = folder / "output"
    _begin(work, parts, output, draft)
    try:
        joined = _Joined(output, draft, work)
        for written in write_volumes(joined.tasks(parts), on_progress):
            joined.take(written)
        manifests = joined.build_manifests()
        write_manifest(work / "training.json", manifests.manifest)
        if manifests.validation:
            write_manifest(work / "validation.json", manifests.validation)
        _join_rejects(parts, work / "rejects")
        _commit(output.files, manifests, work, joined)
    except DataError:
        shutil.rmtree(work)
        raise
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


def _begin(work: Path, parts: Sequence[PartFiles], output: OutputSettings, draft: Manifest) -> None:
    """Makes the folder; what a killed call has left in it stays only where this one would write the same."""
    names = [part.sources and part.sources[1] for part in parts]
    facts = [(part.shard, part.documents, part.tokens, part.sha256) for part in parts], names
    settings = {**vars(output), "files": None, "dtype": draft.dtype, "special_tokens": draft.special_tokens}
    key = hashlib.sha256(json.dumps([facts, settings]).encode()).hexdigest()
    file = work / "key"
    if file.exists() and file.read_text() == key:
        for other in work.iterdir():
            if other.suffix not in (".bin", ".idx", ".sources", ".done") and other.name not in ("key", "fates"):
                other.unlink()  # it was being written
        return
    if work.exists():
        shutil.rmtree(work)
    work.mkdir()
    replace_file(file, key)


@dataclass
class _Corpus:
    """One of the two corpora of a split, as far as it is written."""

    total: WrittenVolume = field(default_factory=lambda: WrittenVolume(""))
    volumes: list[Volume] = field(default_factory=list)  # in order, called as in the folder of work


class _Joined:
    """The volumes of both corpora before they have their names, and what was left out."""

    def __init__(self, output: OutputSettings, draft: Manifest, work: Path) -> None:
        self.training, self.validation = _Corpus(), _Corpus()
        self._output, self._draft, self._work = output, draft, work
        self._duplicates = 0
        self._source_names: list[str] = []  # of all parts

    def tasks(self, parts: Sequence[PartFiles]) -> list[VolumeTask]:
        """What is to be written, the volume that may take longest first."""
        output, draft, fates = self._output, self._draft, None
        parts = [part for part in parts if part.documents]
        if output.deduplicate or output.validation_fraction:
            fates = self._work / "fates"
            if not fates.exists():
                with replacing(fates) as temporary:
                    write_fates(
                        temporary,
                        [part.hashes for part in parts],
                        deduplicate=output.deduplicate,
                        validation_fraction=output.validation_fraction,
                    )
            self._duplicates = sum(int((some == DUPLICATED).sum()) for some in read_chunks(fates, "u1"))

        self._source_names = sorted({name for part in parts if part.sources for name in part.sources[1]})

        def task(name: str, pieces: list[Piece], fate: int) -> VolumeTask:
            unknown_id = draft.special_tokens["unk"]
            folder, names = self._work.absolute(), self._source_names
            return VolumeTask(name, pieces, fate, fates, folder, draft.dtype, unknown_id, names)

        volumes = lay_out(parts, output, item_bytes=np.dtype(draft.dtype).itemsize, fates=fates)
        tasks = [task(str(number), pieces, KEPT) for number, pieces in enumerate(volumes)]
        if output.validation_fraction:
            pieces = [piece for pieces in volumes for piece in pieces]
            tasks.insert(0, task(_HELD_OUT_NAME, pieces, HELD_OUT))
        return tasks

    def take(self, written: WrittenVolume) -> None:
        """Adds a finished volume, in whichever order they come."""
        corpus = self.validation if written.name == _HELD_OUT_NAME else self.training
        corpus.total.add(written)
        if written.volume:
            corpus.volumes.append(written.volume)

    def build_manifests(self) -> WrittenCorpus:
        """Raises DataError where a corpus would have no document."""
        fraction, files = self._output.validation_fraction, self._output.files
        kept, held_out = self.training.total, self.validation.total
        self.training.volumes.sort(key=lambda volume: int(volume.name))
        if not kept.lengths.documents or (fraction and not held_out.lengths.documents):
            total = kept.lengths.documents + held_out.lengths.documents
            raise DataError(
                f"--split-validation {fraction} of {total:,} documents holds out {held_out.lengths.documents:,} and "
                f"leaves {kept.lengths.documents:,}; each of both corpora needs at least one document. Choose another "
                "fraction"
            )
        manifest = replace(
            self._draft,
            part_of="training" if fraction else "all",
            held_out=held_out.lengths.documents,
            dropped=self._draft.dropped | ({DUPLICATE: self._duplicates} if self._duplicates else {}),
            **self._facts(self.training, files, self._work / "training.sources"),
        )
        if not fraction:
            return WrittenCorpus(manifest, None)
        facts = self._facts(self.validation, validation_files(files), self._work / "validation.sources")
        return WrittenCorpus(
            manifest, replace(manifest, part_of="validation", held_out=kept.lengths.documents, **facts)
        )

    def _facts(self, corpus: _Corpus, files: CorpusFiles, sources_file: Path) -> dict[str, Any]:
        """What a manifest says of the documents that are in its corpus; their sources, if counted, are written too."""
        total, sources_sha256 = corpus.total, None
        counts = {name: total.inputs.get(name, Counter[str]()) for name in self._draft.inputs}
        if self._source_names:
            of_volumes = [self._work / f"{volume.name}.sources" for volume in corpus.volumes]
            sources_sha256 = write_sources(sources_file, of_volumes, self._source_names, sorted(total.sources))
        return {
            "inputs": {
                name: replace(record, documents=counts[name]["documents"], tokens=counts[name]["tokens"])
                for name, record in self._draft.inputs.items()
            },
            "documents": total.lengths.documents,
            "tokens": total.lengths.tokens,
            "unknown_tokens": total.unknown_tokens,
            "statistics": total.lengths.statistics(),
            "sources": {name: SourceRecord(**counts) for name, counts in sorted(total.sources.items())},
            "sources_sha256": sources_sha256,
            "volumes": [
                replace(volume, name=volume_name(files.name, number, volumes=len(corpus.volumes)))
                for number, volume in enumerate(corpus.volumes)
            ],
        }


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


def _commit(files: CorpusFiles, manifests: WrittenCorpus, work: Path, joined: _Joined) -> None:
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
        _move(work / "validation.json", joined.validation.volumes, manifests.validation, held_out_files)
    if (work / "rejects").stat().st_size:
        (work / "rejects").replace(files.rejects)
    _move(work / "training.json", joined.training.volumes, manifests.manifest, files)


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
    return [files.sources, *(file for name in (*reversed(names), files.name) for file in files.volume_files(name))]


def _move(written: Path, volumes: Sequence[Volume], manifest: Manifest, files: CorpusFiles) -> None:
    """Gives volumes that lie beside the manifest `written` their final names, and then the manifest its own."""
    for volume, named in zip(volumes, manifest.volumes, strict=True):
        for end, target in zip(("bin", "idx"), files.volume_files(named.name), strict=True):
            written.with_name(f"{volume.name}.{end}").replace(target)
    if manifest.sources_sha256 is not None:
        written.with_suffix(".sources").replace(files.sources)
    sync_to_disk(files.manifest.parent)
    written.replace(files.manifest)
    sync_to_disk(files.manifest.parent)


# --- what becomes of each document


def write_fates(path: Path, hash_files: Sequence[Path], *, deduplicate: bool, validation_fraction: float) -> None:
    """A new file with a byte for each document, in the order of the files: KEPT, HELD_OUT or DUPLICATED.

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
