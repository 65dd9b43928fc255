"""Turns finished chunks into a corpus. A killed call leaves the old corpus, or none, and can be repeated.

A corpus is its chunks in order, and a corpus shard consists of whole chunks. All files are built in PREFIX.partial.
They get their final names when all of them are on disk, the manifest last. Disk: chunks and corpus exist side by side,
but a corpus shard that equals one chunk is a hard link. Memory: a few megabytes.
"""

import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from megatron_neobert.data.corpus.attribute_columns import join_columns
from megatron_neobert.data.corpus.format import (
    CorpusFiles,
    CorpusShard,
    FileRecord,
    Manifest,
    read_manifest,
    write_manifest,
)
from megatron_neobert.data.corpus.shard_files import read_items, write_index
from megatron_neobert.errors import DataError, OutputError
from megatron_neobert.runtime.atomic_files import sha256_of, sync_to_disk
from megatron_neobert.runtime.jobs import JobFolder, progress_bar
from megatron_neobert.runtime.new_file import NewFile
from megatron_neobert.text import listed

_COPIED_BYTES = 4 << 20  # in one step


@dataclass(frozen=True)
class ChunkFiles:
    """A finished chunk, whose files are `name`.KIND in PREFIX.partial.

    Kinds: ids (in the dtype of the corpus), lengths (int32), attributes (see attribute_columns.py, only with
    --record-key), rejects (JSON lines).
    """

    # Name of the input file in the manifest.
    input: str
    name: str
    documents: int
    tokens: int
    unknown_tokens: int
    ids_sha256: str
    has_attributes: bool = False


def write_corpus(
    chunks: Sequence[ChunkFiles],
    files: CorpusFiles,
    draft: Manifest,
    *,
    folder: Path,
    shard_bytes: int | None = None,
) -> Manifest:
    """Write the corpus of these chunks, replacing a corpus with the same prefix, and return its manifest.

    Args:
        chunks: In the order of the input files; the chunks of an input file are consecutive and in order. At least one
            has a document.
        files: Final paths.
        draft: Manifest from `draft_manifest`.
        folder: PREFIX.partial, which no other process may use. Its sub-folder `output` is removed after success.
        shard_bytes: Largest .bin of a corpus shard, unless a single chunk is larger. None: one shard.

    Raises:
        OutputError: A new file would replace a file of another corpus.
    """
    nonempty = [chunk for chunk in chunks if chunk.documents]
    folder = folder.absolute()
    work = folder / "output"
    if work.exists():
        shutil.rmtree(work)  # left by a killed call
    work.mkdir()
    shards: list[CorpusShard] = []
    ranges = _divide_into_shards(nonempty, shard_bytes, np.dtype(draft.dtype).itemsize)
    for numbers in progress_bar(iterable=ranges, desc="corpus shards"):
        paths = [work / file.name for file in files.numbered_shard(len(shards))]
        shards.append(_write_shard(folder, nonempty[numbers.start : numbers.stop], paths, np.dtype(draft.dtype)))
    counts: dict[str, Counter[str]] = {}
    for chunk in chunks:
        counts.setdefault(chunk.input, Counter()).update(documents=chunk.documents, tokens=chunk.tokens)
    attributes = None
    if nonempty[0].has_attributes:
        path = work / files.attributes.name
        join_columns(path, [folder / f"{chunk.name}.attributes" for chunk in nonempty])
        sync_to_disk(path)
        attributes = FileRecord(path.stat().st_size, sha256_of(path))
    manifest = replace(
        draft,
        inputs={name: replace(record, **counts[name]) for name, record in draft.inputs.items()},
        documents=sum(shard.documents for shard in shards),
        tokens=sum(shard.tokens for shard in shards),
        unknown_tokens=sum(chunk.unknown_tokens for chunk in nonempty),
        attributes=attributes,
        shards=shards,
    )
    write_manifest(work / files.manifest.name, manifest)
    _join_rejects(chunks, folder, work / "rejects")
    _refuse_foreign_files(files, len(shards))
    _remove_old_corpus(files)
    _move(work, files, manifest)
    shutil.rmtree(work, ignore_errors=True)
    return manifest


def _write_shard(
    folder: Path, chunks: Sequence[ChunkFiles], paths: Sequence[Path], dtype: np.dtype[np.integer]
) -> CorpusShard:
    """Write the .bin and .idx of these chunks to `paths`."""
    documents = sum(chunk.documents for chunk in chunks)

    def read_lengths() -> Iterator[NDArray[np.int32]]:
        for chunk in chunks:
            yield from read_items(folder / f"{chunk.name}.lengths", "<i4")

    with NewFile(paths[0]) as bin_file, NewFile(paths[1]) as idx_file:
        if len(chunks) == 1:
            bin_file.link(folder / f"{chunks[0].name}.ids", sha256=chunks[0].ids_sha256)
        else:
            for chunk in chunks:
                with (folder / f"{chunk.name}.ids").open("rb", buffering=0) as ids:
                    while block := ids.read(_COPIED_BYTES):
                        bin_file.write(block)
        write_index(idx_file, read_lengths, documents, dtype)
        bin_record, idx_record = bin_file.commit(), idx_file.commit()
    return CorpusShard(documents, bin_record.bytes // dtype.itemsize, bin_record, idx_record)


def _move(work: Path, files: CorpusFiles, manifest: Manifest) -> None:
    """Move all files from the work folder to their final names, the manifest last."""
    if (work / "rejects").stat().st_size:
        (work / "rejects").replace(files.rejects)
    for number, pair in enumerate(files.shard_files(len(manifest.shards))):
        for source, target in zip(files.numbered_shard(number), pair, strict=True):
            (work / source.name).replace(target)
    if manifest.attributes is not None:
        (work / files.attributes.name).replace(files.attributes)
    sync_to_disk(files.manifest.parent)
    (work / files.manifest.name).replace(files.manifest)
    sync_to_disk(files.manifest.parent)


def refuse_existing(files: CorpusFiles, *, overwrite: bool) -> None:
    """Raise OutputError if a file of the corpus exists, unless `overwrite` is set.

    Raise it even then if the files have no manifest of ours, unless a killed run, which removes the manifest first, has
    left PREFIX.partial.
    """
    paths = [*files.existing_files(), files.manifest]
    existing = [str(path) for path in paths if path.exists()]
    if existing and not overwrite:
        raise OutputError(
            f"{listed(existing)} exist{'s' if len(existing) == 1 else ''} already; "
            "choose another --output-prefix, or replace with --overwrite"
        )
    if not JobFolder(files.partial).has_begun and (existing := [str(path) for path in paths if os.path.lexists(path)]):
        try:
            read_manifest(files.manifest)
        except (OSError, ValueError, DataError) as error:
            raise OutputError(
                f"{existing[0]} is not replaced, because {files.manifest.name} is no manifest of this project; "
                "move the file away, or choose another --output-prefix"
            ) from error


def _refuse_foreign_files(files: CorpusFiles, shards: int) -> None:
    """Raise OutputError if a new file would replace a file that does not belong to the corpus with this prefix."""
    replaceable = files.existing_files()
    for file in sum(files.shard_files(shards), ()):
        if file.exists() and file not in replaceable:
            raise OutputError(f"{file} belongs to another corpus; move it away, and start again with --resume")


def _divide_into_shards(chunks: Sequence[ChunkFiles], limit: int | None, item_bytes: int) -> list[range]:
    """Return the range of chunk indices of each corpus shard of at most `limit` bytes or one chunk."""
    starts, shard_bytes = [0], 0
    for number, chunk in enumerate(chunks):
        chunk_bytes = chunk.tokens * item_bytes
        if number > starts[-1] and limit is not None and shard_bytes + chunk_bytes > limit:
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
    """Remove the corpus with this prefix, and the file of rejects. The manifest goes first.

    So after a kill in the middle, no manifest describes files that are missing or replaced.
    """
    # The highest shard number goes first, so that the files left after a kill are still numbered from 0 on.
    old_files = files.existing_files()[::-1]
    files.manifest.unlink(missing_ok=True)
    sync_to_disk(files.manifest.parent)
    for file in (*old_files, files.rejects):
        file.unlink(missing_ok=True)
