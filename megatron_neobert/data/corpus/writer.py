"""Turns finished chunks into a corpus. A killed call leaves the old corpus, or none, and can be repeated.

Duplicates are only known once all chunks are finished, and chunks must not depend on the share of held-out documents.
Therefore documents are dropped and held out here, not in the workers that write chunks. A corpus shard consists of
whole chunks.

All files are built in PREFIX.partial. They get their final names when all of them are on disk, the manifest last.
Disk: chunks and corpus exist side by side, but a corpus shard that equals one chunk is a hard link. Memory: a few
megabytes, and three bytes per document for duplicates and held-out documents.
"""

import math
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from megatron_neobert.data.corpus.attribute_columns import join_columns
from megatron_neobert.data.corpus.chunk_files import ChunkFiles, ShardDocuments
from megatron_neobert.data.corpus.exact_duplicates import HASH_DTYPE, find_exact_duplicates
from megatron_neobert.data.corpus.format import (
    DUPLICATE,
    CorpusFiles,
    CorpusShard,
    FileRecord,
    Manifest,
    read_manifest,
    validation_files,
    write_manifest,
)
from megatron_neobert.data.corpus.shard_files import read_items, write_index
from megatron_neobert.errors import DataError, OutputError
from megatron_neobert.runtime.atomic_files import sha256_of, sync_to_disk
from megatron_neobert.runtime.jobs import JobFolder, progress_bar
from megatron_neobert.runtime.new_file import NewFile
from megatron_neobert.text import listed


@dataclass(frozen=True)
class OutputSettings:
    """Settings that decide the files of a new corpus and the documents in it."""

    files: CorpusFiles
    # Largest .bin of a corpus shard, unless a single chunk is larger. None: one shard.
    shard_bytes: int | None = None
    # Share of the documents, chosen by their text, that goes into a validation corpus.
    validation_fraction: float = 0.0
    deduplicate: bool = False


class WrittenCorpus(NamedTuple):
    """Manifests of the training corpus and, after a split, of the validation corpus."""

    manifest: Manifest
    validation: Manifest | None


class _NewCorpus:
    """The training or the validation corpus, which is built in the folder `work`.

    Args:
        files: Final paths.
        work: Folder below the folder of the chunks.
        is_chosen: One value per document of all chunks; None selects all documents.
    """

    def __init__(self, files: CorpusFiles, work: Path, is_chosen: NDArray[np.bool_] | None) -> None:
        self.files, self.work, self.is_chosen = files, work / files.name, is_chosen
        self.shards: list[CorpusShard] = []
        self.unknown_tokens = 0
        # Number of documents and tokens by input file.
        self.inputs: dict[str, Counter[str]] = {}
        self.work.mkdir()

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    def write_shard(self, chunks: Sequence[ChunkFiles], first: int, dtype: np.dtype[np.integer], unknown: int) -> None:
        """Write the .bin and .idx of the chosen documents of these chunks, unless there are none.

        `first` is the number of documents in all chunks before these.
        """
        count = sum(chunk.documents for chunk in chunks)
        is_chosen = None if self.is_chosen is None else self.is_chosen[first : first + count]
        documents = count if is_chosen is None else int(np.count_nonzero(is_chosen))
        if not documents:
            return
        shard = ShardDocuments(self.work.parents[1], chunks, is_chosen)
        bin_, idx = self.files.numbered_shard(len(self.shards))
        with NewFile(self.work / bin_.name) as bin_file, NewFile(self.work / idx.name) as idx_file:
            if len(chunks) == 1 and documents == count:
                bin_file.link(shard.folder / f"{chunks[0].name}.ids", sha256=chunks[0].ids_sha256)
                self.unknown_tokens += chunks[0].unknown_tokens
            else:
                for ids in shard.read_ids(dtype.itemsize):
                    bin_file.write(ids)
                    self.unknown_tokens += int(np.count_nonzero(np.frombuffer(ids, dtype) == unknown))
            write_index(idx_file, shard.read_lengths, documents, dtype)
            bin_record, idx_record = bin_file.commit(), idx_file.commit()
        for window in shard.windows():
            tokens = int(window.lengths[window.is_chosen].sum(dtype=np.int64))
            added = {"documents": int(np.count_nonzero(window.is_chosen)), "tokens": tokens}
            self.inputs.setdefault(window.chunk.input, Counter()).update(added)
        self.shards.append(CorpusShard(documents, bin_record.bytes // dtype.itemsize, bin_record, idx_record))

    def write_manifest(self, draft: Manifest, chunks: Sequence[ChunkFiles]) -> Manifest:
        """Write the manifest, and the attributes if any, and return the complete manifest."""
        attributes = None
        if chunks[0].has_attributes:
            path = self.work / self.files.attributes.name
            files = [self.work.parents[1] / f"{chunk.name}.attributes" for chunk in chunks]
            join_columns(path, files, self.is_chosen)
            sync_to_disk(path)
            attributes = FileRecord(path.stat().st_size, sha256_of(path))
        manifest = replace(
            draft,
            inputs={
                name: replace(record, **{"documents": 0, "tokens": 0, **self.inputs.get(name, {})})
                for name, record in draft.inputs.items()
            },
            documents=self.documents,
            tokens=sum(shard.tokens for shard in self.shards),
            unknown_tokens=self.unknown_tokens,
            attributes=attributes,
            shards=self.shards,
        )
        write_manifest(self.work / self.files.manifest.name, manifest)
        return manifest

    def move(self, manifest: Manifest) -> None:
        """Move all files from the work folder to their final names, the manifest last."""
        for number, pair in enumerate(self.files.shard_files(len(self.shards))):
            for source, target in zip(self.files.numbered_shard(number), pair, strict=True):
                (self.work / source.name).replace(target)
        if manifest.attributes is not None:
            (self.work / self.files.attributes.name).replace(self.files.attributes)
        sync_to_disk(self.files.manifest.parent)
        (self.work / self.files.manifest.name).replace(self.files.manifest)
        sync_to_disk(self.files.manifest.parent)


def write_corpus(
    chunks: Sequence[ChunkFiles], output: OutputSettings, draft: Manifest, *, folder: Path
) -> WrittenCorpus:
    """Write the corpus of these chunks and its validation corpus, if any, replacing corpora with the same prefix.

    Args:
        chunks: In the order of the input files; the chunks of an input file are consecutive and in order.
        output: Settings of the corpus.
        draft: Manifest from `draft_manifest`.
        folder: PREFIX.partial, which no other process may use. Its sub-folder `output` is removed after success and
            after a DataError.

    Raises:
        DataError: The training or the validation corpus would have no document.
        OutputError: A new file would replace a file of another corpus.
    """
    nonempty = [chunk for chunk in chunks if chunk.documents]
    work, split = folder.absolute() / "output", output.validation_fraction
    if work.exists():
        shutil.rmtree(work)  # left by a killed call
    work.mkdir()
    try:
        training, held_out = _choose_documents(nonempty, output, work)
        _write_shards(nonempty, output, draft, [training, held_out] if held_out else [training])
        documents = (training.documents, held_out.documents if held_out else 0)
        if not documents[0] or (split and not documents[1]):
            raise DataError(
                f"--split-validation {split} of {sum(documents):,} documents holds out {documents[1]:,} and leaves "
                f"{documents[0]:,}, but both corpora need at least one document. Choose another fraction"
            )
        duplicates = sum(chunk.documents for chunk in chunks) - sum(documents)
        draft = replace(draft, dropped=draft.dropped | ({DUPLICATE: duplicates} if duplicates else {}))
        training_draft = replace(draft, part_of="training" if split else "all", held_out=documents[1])
        manifest, validation = training.write_manifest(training_draft, nonempty), None
        if held_out:
            validation_draft = replace(draft, part_of="validation", held_out=documents[0])
            validation = held_out.write_manifest(validation_draft, nonempty)
        _join_rejects(chunks, folder, work / "rejects")
    except DataError:
        shutil.rmtree(work)
        raise
    _refuse_foreign_files(output.files, len(manifest.shards))
    _remove_old_corpus(output.files)
    if held_out and validation:
        held_out.move(validation)
    if (work / "rejects").stat().st_size:
        (work / "rejects").replace(output.files.rejects)
    training.move(manifest)
    shutil.rmtree(work, ignore_errors=True)
    return WrittenCorpus(manifest, validation)


def _choose_documents(
    chunks: Sequence[ChunkFiles], output: OutputSettings, work: Path
) -> tuple[_NewCorpus, _NewCorpus | None]:
    """Return the training corpus and the validation corpus, if any, without files, in the order of their documents.

    The hash of a text alone decides whether it is held out. So equal texts are never in both corpora, and the decision
    does not change when documents are added.
    """
    files = output.files
    hash_files = [work.parent / f"{chunk.name}.hashes" for chunk in chunks]
    is_kept = None
    if output.deduplicate:
        is_kept = find_exact_duplicates(hash_files, work)
        np.logical_not(is_kept, out=is_kept)
    if not output.validation_fraction:
        return _NewCorpus(files, work, is_kept), None
    threshold = np.uint64(min(math.ceil(output.validation_fraction * 2**64), 2**64 - 1))
    steps = (step for file in hash_files for step in read_items(file, HASH_DTYPE))
    is_held_out = np.concatenate([step["high"] < threshold for step in steps])
    if is_kept is None:
        is_kept = ~is_held_out
    else:
        is_held_out &= is_kept
        is_kept ^= is_held_out
    return _NewCorpus(files, work, is_kept), _NewCorpus(validation_files(files), work, is_held_out)


def _write_shards(
    chunks: Sequence[ChunkFiles], output: OutputSettings, draft: Manifest, corpora: Sequence[_NewCorpus]
) -> None:
    """Write the corpus shards of the training corpus, and the only shard of the validation corpus, if any."""
    dtype, unknown = np.dtype(draft.dtype), draft.special_tokens["unk"]
    firsts = [*accumulate((chunk.documents for chunk in chunks), initial=0)]
    ranges = _divide_into_shards(chunks, output, dtype.itemsize)
    with progress_bar(desc="corpus shards", total=len(ranges)) as bar:
        for numbers in ranges:
            corpora[0].write_shard(chunks[numbers.start : numbers.stop], firsts[numbers.start], dtype, unknown)
            bar.update()
    for held_out in corpora[1:]:
        held_out.write_shard(chunks, 0, dtype, unknown)


def refuse_existing(files: CorpusFiles, *, overwrite: bool) -> None:
    """Raise OutputError if a file of the training or validation corpus exists, unless `overwrite` is set.

    Raise it even then if the files have no manifest of ours, unless a killed run, which removes the manifest first, has
    left PREFIX.partial.
    """
    corpora = (files, validation_files(files))
    paths = {corpus: [*corpus.existing_files(), corpus.manifest] for corpus in corpora}
    existing = [str(path) for corpus in corpora for path in paths[corpus] if path.exists()]
    if existing and not overwrite:
        raise OutputError(
            f"{listed(existing)} exist{'s' if len(existing) == 1 else ''} already; "
            "choose another --output-prefix, or replace with --overwrite"
        )
    for corpus in () if JobFolder(files.partial).has_begun else corpora:
        if existing := [str(path) for path in paths[corpus] if os.path.lexists(path)]:
            try:
                read_manifest(corpus.manifest)
            except (OSError, ValueError, DataError) as error:
                raise OutputError(
                    f"{existing[0]} is not replaced, because {corpus.manifest.name} is no manifest of this project; "
                    "move the file away, or choose another --output-prefix"
                ) from error


def _refuse_foreign_files(files: CorpusFiles, shards: int) -> None:
    """Raise OutputError if a new file would replace a file that does not belong to the corpus with this prefix."""
    replaceable = files.existing_files()
    for file in sum(files.shard_files(shards), ()):
        if file.exists() and file not in replaceable:
            raise OutputError(f"{file} belongs to another corpus; move it away, and start again with --resume")


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


def _join_rejects(chunks: Sequence[ChunkFiles], folder: Path, target: Path) -> None:
    """Write the rejects of all chunks to `target`."""
    with target.open("wb") as stream:
        for chunk in chunks:
            with (folder / f"{chunk.name}.rejects").open("rb") as rejects:
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
