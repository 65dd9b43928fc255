"""Turns finished chunks into a corpus. A killed call leaves the old corpus, or none, and can be repeated.

Duplicates are only known once all chunks are finished, and chunks must not depend on the share of held-out documents.
Therefore documents are dropped and held out here, not in the workers that write chunks. A corpus shard consists of
whole chunks. One job writes each corpus shard, so shards can be written in parallel, and finished ones survive a kill.

All files are built in PREFIX.partial. They get their final names when all of them are on disk, the manifest last.
Disk: chunks and corpus exist side by side, but a corpus shard that equals one chunk is a hard link. Memory: a few
megabytes, one counter for each document length that occurs, and a byte per document for duplicates and held-out
documents.
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
    CorpusShard,
    FileRecord,
    Manifest,
    length_statistics,
    reject_line,
    validation_files,
    write_manifest,
)
from megatron_neobert.data.corpus.shard_files import read_items
from megatron_neobert.data.corpus.shard_job import (
    CHOICES,
    DROPPED,
    HELD_OUT,
    KEPT,
    ChunkFiles,
    ShardCounts,
    ShardJob,
    read_is_chosen,
)
from megatron_neobert.errors import DataError, OutputError
from megatron_neobert.runtime.atomic_files import replacing, sha256_of, sync_to_disk
from megatron_neobert.runtime.jobs import Finished, finish_jobs
from megatron_neobert.text import listed, parse_json

# Name of the job that writes the only shard of the validation corpus.
_VALIDATION = "held_out"


@dataclass(frozen=True)
class OutputSettings:
    """Settings that decide the files of a new corpus and the documents in it."""

    files: CorpusFiles
    # Largest .bin of a corpus shard, unless a single chunk is larger. None: one shard.
    shard_bytes: int | None
    # Share of the documents, chosen by their text, that goes into a validation corpus.
    validation_fraction: float
    deduplicate: bool

    @property
    def training_choice(self) -> int | None:
        """Choice of the documents of the training corpus, or None if it has all documents."""
        return KEPT if self.deduplicate or self.validation_fraction else None


class WrittenCorpus(NamedTuple):
    """Manifests of the training corpus and, after a split, of the validation corpus."""

    manifest: Manifest
    validation: Manifest | None


class _NewCorpus:
    """The training or the validation corpus, whose corpus shards are finished. Empty shards are ignored."""

    def __init__(self, name: str, files: CorpusFiles, records: Mapping[str, Finished[ShardCounts]]) -> None:
        self.name, self.files = name, files
        self.shards = {name: record for name, record in records.items() if record.result.documents}
        self.total = ShardCounts()
        for record in self.shards.values():
            self.total.add(record.result)

    def write_manifest(self, work: Path, draft: Manifest, chunks: Sequence[ChunkFiles], choice: int | None) -> Manifest:
        """Write the manifest, and the attributes if any, to the work folder, and return the complete manifest.

        `choice` selects the documents of `chunks` that this corpus has: KEPT, HELD_OUT, or None for all.
        """
        total, attributes = self.total, None
        if "attributes" in chunks[0].sha256:
            path = work / f"{self.name}_attributes"
            files = [work.parent / f"{chunk.name}.attributes" for chunk in chunks]
            firsts = accumulate((chunk.documents for chunk in chunks), initial=0)
            bounds = zip(firsts, chunks, strict=False)
            join_columns(path, files, (read_is_chosen(work, choice, first, chunk.documents) for first, chunk in bounds))
            sync_to_disk(path)
            attributes = FileRecord(path.stat().st_size, sha256_of(path))
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
            shards=[
                CorpusShard(record.result.documents, record.result.tokens, record.files["bin"], record.files["idx"])
                for record in self.shards.values()
            ],
        )
        write_manifest(work / f"{self.name}.json", manifest)
        return manifest

    def move(self, work: Path, manifest: Manifest) -> None:
        """Move all files from the work folder to their final names, the manifest last."""
        for job, pair in zip(self.shards, self.files.shard_files(len(self.shards)), strict=True):
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
    """Write the corpus of these chunks and its validation corpus, if any, replacing corpora with the same prefix.

    Args:
        chunks: In the order of the input files; the chunks of an input file are consecutive and in order.
        output: Settings of the corpus.
        draft: Manifest from `draft_manifest`.
        folder: PREFIX.partial, which no other process may use. Its sub-folder `output-HASH` is removed after
            success and after a DataError, but kept after other errors.
        workers: Number of processes; None for one.

    Raises:
        DataError: The training or the validation corpus would have no document.
        OutputError: A new file would replace a file of another corpus.
        ChildProcessError: A worker process died.
    """
    nonempty = [chunk for chunk in chunks if chunk.documents]
    work = _prepare_folder(folder.absolute(), nonempty, output, draft)
    jobs = _plan_jobs(work, nonempty, output, draft)
    try:
        finished = {job.name: record for job, record in finish_jobs(jobs, label="corpus shards", workers=workers)}
        records = {job.name: finished[job.name] for job in jobs}
        split = output.validation_fraction
        held_out = _NewCorpus(
            _VALIDATION, validation_files(output.files), {_VALIDATION: records.pop(_VALIDATION)} if split else {}
        )
        training = _NewCorpus("training", output.files, records)
        documents = (training.total.documents, held_out.total.documents)
        if not documents[0] or (split and not documents[1]):
            raise DataError(
                f"--split-validation {split} of {sum(documents):,} documents holds out {documents[1]:,} and leaves "
                f"{documents[0]:,}, but both corpora need at least one document. Choose another fraction"
            )
        duplicates = sum(chunk.documents for chunk in chunks) - sum(documents)
        draft = replace(draft, dropped=draft.dropped | ({DUPLICATE: duplicates} if duplicates else {}))
        training_draft = replace(draft, part_of="training" if split else "all", held_out=documents[1])
        manifest, validation = training.write_manifest(work, training_draft, nonempty, output.training_choice), None
        if split:
            validation_draft = replace(draft, part_of="validation", held_out=documents[0])
            validation = held_out.write_manifest(work, validation_draft, nonempty, HELD_OUT)
        _join_rejects(chunks, folder, work / "rejects")
    except DataError:
        shutil.rmtree(work)
        raise
    _refuse_foreign_files(output.files, len(manifest.shards))
    _remove_old_corpus(output.files)
    if validation:
        held_out.move(work, validation)
    if (work / "rejects").stat().st_size:
        (work / "rejects").replace(output.files.rejects)
    training.move(work, manifest)
    shutil.rmtree(work, ignore_errors=True)
    return WrittenCorpus(manifest, validation)


def refuse_existing(files: CorpusFiles, *, overwrite: bool) -> None:
    """Raise OutputError if a file of the training or validation corpus exists, unless `overwrite` is set."""
    corpora = (files, validation_files(files))
    paths = [path for corpus in corpora for path in (*corpus.existing_files(), corpus.manifest)]
    existing = [str(path) for path in paths if path.exists()]
    if existing and not overwrite:
        raise OutputError(
            f"{listed(existing)} exist{'s' if len(existing) == 1 else ''} already; "
            "choose another --output-prefix, or replace with --overwrite"
        )


def _refuse_foreign_files(files: CorpusFiles, shards: int) -> None:
    """Raise OutputError if a new file would replace a file that does not belong to the corpus with this prefix."""
    replaceable = files.existing_files()
    for file in sum(files.shard_files(shards), ()):
        if file.exists() and file not in replaceable:
            raise OutputError(f"{file} belongs to another corpus; move it away, and start again with --resume")


def _prepare_folder(folder: Path, chunks: Sequence[ChunkFiles], output: OutputSettings, draft: Manifest) -> Path:
    """Create `folder`/output-HASH, write the choice of each document to it unless all are kept, and return its path.

    HASH is a hash of everything that decides the bytes of the corpus shards. Folders with another hash and temporary
    files of killed calls are removed. Finished shards of the same hash are kept.
    """
    settings = {name: value for name, value in vars(output).items() if name != "files"}
    decisive = [msgspec.to_builtins(chunks), settings, draft.dtype, draft.special_tokens["unk"]]
    work = folder / f"output-{hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:16]}"
    for stale in folder.glob("output-*"):
        if stale != work:
            shutil.rmtree(stale)
    work.mkdir(exist_ok=True)
    for file in work.iterdir():
        # Any other suffix belongs to a temporary file.
        if file.suffix not in (".bin", ".idx", ".done", ".json") and file.name != CHOICES:
            file.unlink()
    if output.training_choice is not None and not (work / CHOICES).exists():
        hashes = [folder / f"{chunk.name}.hashes" for chunk in chunks]
        with replacing(work / CHOICES) as temporary, temporary.open("wb") as stream:
            for choices in _choose_corpus(hashes, work, output):
                stream.write(choices.data)
    return work


def _plan_jobs(work: Path, chunks: Sequence[ChunkFiles], output: OutputSettings, draft: Manifest) -> list[ShardJob]:
    """Return one job per corpus shard. The job of the validation corpus, if any, is first, as it may take longest."""
    firsts = [*accumulate((chunk.documents for chunk in chunks), initial=0)]

    def job(name: str, numbers: range, choice: int | None) -> ShardJob:
        members = tuple(chunks[numbers.start : numbers.stop])
        return ShardJob(work, name, members, firsts[numbers.start], choice, draft.dtype, draft.special_tokens["unk"])

    ranges = _divide_into_shards(chunks, output, np.dtype(draft.dtype).itemsize)
    jobs = [job(str(shard), numbers, output.training_choice) for shard, numbers in enumerate(ranges)]
    validation = job(_VALIDATION, range(len(chunks)), HELD_OUT)
    return [validation, *jobs] if output.validation_fraction else jobs


def _divide_into_shards(chunks: Sequence[ChunkFiles], output: OutputSettings, item_bytes: int) -> list[range]:
    """Return the range of chunk indices of each corpus shard. Dropped and held-out documents count in its size."""
    starts, shard_bytes = [0], 0
    for number, chunk in enumerate(chunks):
        chunk_bytes = chunk.tokens * item_bytes
        is_full = output.shard_bytes is not None and shard_bytes + chunk_bytes > output.shard_bytes
        if number > starts[-1] and is_full:
            starts.append(number)
            shard_bytes = 0
        shard_bytes += chunk_bytes
    return [range(start, end) for start, end in zip(starts, [*starts[1:], len(chunks)], strict=True)]


def _choose_corpus(hash_files: Sequence[Path], folder: Path, output: OutputSettings) -> Iterator[NDArray[np.uint8]]:
    """Yield KEPT, HELD_OUT or DROPPED for each document, in consecutive arrays in the order of `hash_files`.

    The hash of a text alone decides whether it is held out. So equal texts are never in both corpora, and the decision
    does not change when documents are added. `folder` gets temporary files.
    """
    is_duplicate = find_exact_duplicates(hash_files, folder) if output.deduplicate else None
    threshold = np.uint64(min(math.ceil(output.validation_fraction * 2**64), 2**64 - 1))
    first = 0
    for hashes in (step for file in hash_files for step in read_items(file, HASH_DTYPE)):
        choices = np.where(hashes["high"] < threshold, np.uint8(HELD_OUT), np.uint8(KEPT))
        if is_duplicate is not None:
            choices[is_duplicate[first : first + choices.size]] = DROPPED
        first += choices.size
        yield choices


def _join_rejects(chunks: Sequence[ChunkFiles], folder: Path, target: Path) -> None:
    """Write the rejects of all chunks to `target`, with record numbers counted from the start of each input file."""
    with target.open("wb") as stream:
        for chunk in chunks:
            unit, before = chunk.records_before or ("", 0)
            with (folder / f"{chunk.name}.rejects").open("rb") as rejects:
                for line in rejects if before else ():
                    entry = parse_json(line)
                    stream.write(reject_line(entry | {unit: entry[unit] + before}))
                shutil.copyfileobj(rejects, stream, 1 << 20)
    sync_to_disk(target)


def _remove_old_corpus(files: CorpusFiles) -> None:
    """Remove the training and validation corpus with this prefix, and the file of rejects. Manifests go first.

    So after a kill in the middle, no manifest describes files that are missing or replaced.
    """
    corpora = (files, validation_files(files))
    # The highest shard number goes first, so that the files left after a kill are still numbered from 0 on.
    old_files = [file for corpus in corpora for file in reversed(corpus.existing_files())]
    for corpus in corpora:
        corpus.manifest.unlink(missing_ok=True)
    sync_to_disk(files.manifest.parent)
    for file in (*old_files, files.rejects):
        file.unlink(missing_ok=True)
