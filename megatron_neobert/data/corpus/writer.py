"""Finished chunks become a corpus, in a way that survives a kill at any moment.

Duplicates are left out and documents are held out here, not in the workers: duplicates are only known once all chunks
are finished, and the chunks are the same for any share of held-out documents. A corpus shard holds whole chunks. Each
one is a job of its own, so any process may write it, and finished ones are kept when a run is killed.

Everything is built in PREFIX.partial and moved to its final name when all of it is on disk, the manifest last.
Disk: chunks and corpus side by side; a chunk that becomes a whole corpus shard is linked and costs none. Memory: some
megabytes of one chunk, a count per length that occurs, and a byte per document for duplicates and held-out documents.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from megatron_neobert.data.corpus.attribute_columns import join_columns
from megatron_neobert.data.corpus.exact_duplicates import HASH_DTYPE, find_exact_duplicates
from megatron_neobert.data.corpus.format import (
    DUPLICATE,
    CorpusFiles,
    FileRecord,
    Manifest,
    Volume,
    length_statistics,
    reject_line,
    validation_files,
    write_manifest,
)
from megatron_neobert.data.corpus.shard_job import (
    CHOICES,
    DROPPED,
    HELD_OUT,
    KEPT,
    ChunkFiles,
    ShardCounts,
    ShardJob,
    read_chosen,
)
from megatron_neobert.data.corpus.volumes import read_chunks
from megatron_neobert.errors import DataError, OutputError
from megatron_neobert.runtime.atomic_files import replacing, sha256_of, sync_to_disk
from megatron_neobert.runtime.jobs import Finished, finish_jobs
from megatron_neobert.text import listed, parse_json

_VALIDATION = "held_out"  # name of the job that writes the corpus for validation


@dataclass(frozen=True)
class OutputSettings:
    """Documents of a new corpus, and its files."""

    files: CorpusFiles
    shard_bytes: int | None  # limit of a corpus shard's .bin, unless one chunk exceeds it; None: no limit
    validation_fraction: float  # of the documents, chosen by their text, into a corpus of their own
    deduplicate: bool

    @property
    def training_choice(self) -> int | None:
        """KEPT, or None if all documents are kept."""
        return KEPT if self.deduplicate or self.validation_fraction else None


class WrittenCorpus(NamedTuple):
    """The manifests of what has been written."""

    manifest: Manifest
    validation: Manifest | None


class _Corpus:
    """One of the two corpora of a split, as it is finished in the folder of work; empty shards are left out."""

    def __init__(self, name: str, files: CorpusFiles, records: Mapping[str, Finished[ShardCounts]]) -> None:
        self.name, self.files = name, files
        self.shards = {name: record for name, record in records.items() if record.result.documents}
        self.total = ShardCounts()
        for record in self.shards.values():
            self.total.add(record.result)

    def write_manifest(self, work: Path, draft: Manifest, chunks: Sequence[ChunkFiles], choice: int | None) -> Manifest:
        """Complete the manifest by what follows from the documents; write it, and the file of their attributes."""
        total, attributes = self.total, None
        if "attributes" in chunks[0].sha256:
            path = work / f"{self.name}_attributes"
            files = [work.parent / f"{chunk.name}.attributes" for chunk in chunks]
            firsts = accumulate((chunk.documents for chunk in chunks), initial=0)
            places = zip(firsts, chunks, strict=False)
            join_columns(path, files, (read_chosen(work, choice, first, some.documents) for first, some in places))
            sync_to_disk(path)
            attributes = FileRecord(path.stat().st_size, sha256_of(path))
        volumes = [
            Volume(
                record.result.documents,
                record.result.tokens,
                record.files["bin"],
                record.files["idx"],
            )
            for record in self.shards.values()
        ]
        manifest = replace(
            draft,
            inputs={
                name: replace(record, **{"documents": 0, "tokens": 0, **total.inputs.get(name, {})})
                for name, record in draft.inputs.items()
            },
            documents=total.documents,
            tokens=total.tokens,
            unknown_tokens=total.unknown_tokens,
            statistics=length_statistics(total.lengths),
            attributes=attributes,
            volumes=volumes,
        )
        write_manifest(work / f"{self.name}.json", manifest)
        return manifest

    def move(self, work: Path, manifest: Manifest) -> None:
        """Give all files their final names, the manifest last."""
        for job, pair in zip(self.shards, self.files.volume_files(len(self.shards)), strict=True):
            for target in pair:
                (work / job).with_suffix(target.suffix).replace(target)
        if manifest.attributes is not None:
            (work / f"{self.name}_attributes").replace(self.files.attributes)
        sync_to_disk(self.files.manifest.parent)
        (work / f"{self.name}.json").replace(self.files.manifest)
        sync_to_disk(self.files.manifest.parent)


def write_corpus(
    chunks: Sequence[ChunkFiles],
    output: OutputSettings,
    draft: Manifest,
    *,
    folder: Path,
    workers: int | None = None,
) -> WrittenCorpus:
    """Write the corpus of these chunks, and replace what exists under its name.

    Args:
        chunks: In the order of the inputs, the chunks of an input file one after the other.
        draft: From `draft_manifest`.
        folder: PREFIX.partial, for this call alone; its sub-folder `output-HASH` is used and removed.
        workers: Number of processes.

    Raises:
        DataError: No document is left for the corpus, or none is held out for validation.
        OutputError: A file of another corpus has a name that a corpus shard would have.
    """
    kept = [chunk for chunk in chunks if chunk.documents]
    work = _prepare_folder(folder.absolute(), kept, output, draft)
    jobs = _plan_jobs(work, kept, output, draft)
    try:
        records = _write_shards(jobs, workers)
        split = output.validation_fraction
        held_out = _Corpus(
            _VALIDATION, validation_files(output.files), {_VALIDATION: records.pop(_VALIDATION)} if split else {}
        )
        training = _Corpus("training", output.files, records)
        documents = (training.total.documents, held_out.total.documents)
        if not documents[0] or (split and not documents[1]):
            raise DataError(
                f"--split-validation {split} of {sum(documents):,} documents holds out {documents[1]:,} and leaves "
                f"{documents[0]:,}; each of both corpora needs at least one document. Choose another fraction"
            )
        duplicates = sum(chunk.documents for chunk in chunks) - sum(documents)
        draft = replace(draft, dropped=draft.dropped | ({DUPLICATE: duplicates} if duplicates else {}))
        of_training = replace(draft, part_of="training" if split else "all", held_out=documents[1])
        manifest, validation = training.write_manifest(work, of_training, kept, output.training_choice), None
        if split:
            of_validation = replace(draft, part_of="validation", held_out=documents[0])
            validation = held_out.write_manifest(work, of_validation, kept, HELD_OUT)
        _join_rejects(chunks, folder, work / "rejects")
    except DataError:
        shutil.rmtree(work)
        raise
    _refuse_others(output.files, len(manifest.volumes))
    _remove_old(output.files)
    if validation:
        held_out.move(work, validation)
    if (work / "rejects").stat().st_size:
        (work / "rejects").replace(output.files.rejects)
    training.move(work, manifest)
    shutil.rmtree(work, ignore_errors=True)
    return WrittenCorpus(manifest, validation)


def refuse_existing(files: CorpusFiles, *, overwrite: bool) -> None:
    """Raise OutputError if a corpus, or a file of one, would be replaced unasked."""
    both = (files, validation_files(files))
    manifests = [one.manifest for one in both if one.manifest.exists()]
    existing = [str(file) for file in [file for one in both for file in one.existing()] + manifests]
    if existing and not overwrite:
        raise OutputError(
            f"{listed(existing)} exist{'s' if len(existing) == 1 else ''} already; "
            "choose another --output-prefix, or replace with --overwrite"
        )


def _refuse_others(files: CorpusFiles, volumes: int) -> None:
    """Raise OutputError if a new file would replace one that is not of the corpus of this name."""
    own = files.existing()
    for file in sum(files.volume_files(volumes), ()):
        if file.exists() and file not in own:
            raise OutputError(f"{file} belongs to another corpus; move it away, and start again with --resume")


def _prepare_folder(folder: Path, chunks: Sequence[ChunkFiles], output: OutputSettings, draft: Manifest) -> Path:
    """Return the folder of work, which is named by all that decides the bytes; remove what a killed call has left."""
    settings = {name: value for name, value in vars(output).items() if name != "files"}
    decisive = [msgspec.to_builtins(chunks), settings, draft.dtype, draft.special_tokens["unk"]]
    work = folder / f"output-{hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:16]}"
    for other in folder.glob("output-*"):
        if other != work:
            shutil.rmtree(other)
    work.mkdir(exist_ok=True)
    for file in work.iterdir():
        if file.suffix not in (".bin", ".idx", ".done", ".json") and file.name != CHOICES:
            file.unlink()  # it was being written
    if output.training_choice is not None and not (work / CHOICES).exists():
        hashes = [folder / f"{chunk.name}.hashes" for chunk in chunks]
        with replacing(work / CHOICES) as temporary, temporary.open("wb") as stream:
            for choices in choose(hashes, work, output):
                stream.write(choices.data)
    return work


def _plan_jobs(work: Path, chunks: Sequence[ChunkFiles], output: OutputSettings, draft: Manifest) -> list[ShardJob]:
    """Return one job per corpus shard, the one that may take longest first."""
    firsts = [*accumulate((chunk.documents for chunk in chunks), initial=0)]

    def job(name: str, some: range, choice: int | None) -> ShardJob:
        own = tuple(chunks[some.start : some.stop])
        return ShardJob(work, name, own, firsts[some.start], choice, draft.dtype, draft.special_tokens["unk"])

    ranges = lay_out(chunks, output, np.dtype(draft.dtype).itemsize)
    jobs = [job(str(number), some, output.training_choice) for number, some in enumerate(ranges)]
    validation = job(_VALIDATION, range(len(chunks)), HELD_OUT)
    return [validation, *jobs] if output.validation_fraction else jobs


def lay_out(chunks: Sequence[ChunkFiles], output: OutputSettings, item_bytes: int) -> list[range]:
    """Return the chunks of each corpus shard; documents that are left out of it count for its size."""
    starts, size = [0], 0
    for number, chunk in enumerate(chunks):
        new = chunk.tokens * item_bytes
        is_full = output.shard_bytes is not None and size + new > output.shard_bytes
        if number > starts[-1] and is_full:
            starts.append(number)
            size = 0
        size += new
    return [range(start, end) for start, end in zip(starts, [*starts[1:], len(chunks)], strict=True)]


def choose(hash_files: Sequence[Path], folder: Path, output: OutputSettings) -> Iterator[NDArray[np.uint8]]:
    """Yield KEPT, HELD_OUT or DROPPED for each document, in the order of the files.

    A text decides by its hash whether it is held out, so that this does not depend on the documents around it, and
    one text never ends up in both corpora.
    """
    duplicate = find_exact_duplicates(hash_files, folder) if output.deduplicate else None
    below, first = np.uint64(min(math.ceil(output.validation_fraction * 2**64), 2**64 - 1)), 0
    for hashes in (some for file in hash_files for some in read_chunks(file, HASH_DTYPE)):
        choices = np.where(hashes["high"] < below, np.uint8(HELD_OUT), np.uint8(KEPT))
        if duplicate is not None:
            choices[duplicate[first : first + choices.size]] = DROPPED
        first += choices.size
        yield choices


def _write_shards(jobs: Sequence[ShardJob], workers: int | None) -> dict[str, Finished[ShardCounts]]:
    """Do all jobs that an earlier call has not finished; return the records by name, in the order of the jobs."""
    records = {job.name: record for job, record in finish_jobs(jobs, label="corpus shards", workers=workers)}
    return {job.name: records[job.name] for job in jobs}


def _join_rejects(chunks: Sequence[ChunkFiles], folder: Path, target: Path) -> None:
    """Write one file of the rejects of all chunks to disk."""
    with target.open("wb") as stream:
        for chunk in chunks:
            unit, before = chunk.records_before or ("", 0)
            with (folder / f"{chunk.name}.rejects").open("rb") as rejects:
                for line in rejects if before else ():
                    entry = parse_json(line)
                    stream.write(reject_line(entry | {unit: entry[unit] + before}))
                shutil.copyfileobj(rejects, stream, 1 << 20)
    sync_to_disk(target)


def _remove_old(files: CorpusFiles) -> None:
    """Remove the corpus that is replaced, its manifests first: a new .bin beside an old .idx must not pass for one.

    Higher numbers go first, so that after a kill the rest is still numbered from 0 on.
    """
    both = (files, validation_files(files))
    old = [file for one in both for file in reversed(one.existing())]
    for one in both:
        one.manifest.unlink(missing_ok=True)
    sync_to_disk(files.manifest.parent)
    for file in (*old, files.rejects):
        file.unlink(missing_ok=True)
