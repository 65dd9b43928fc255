"""Turn tokenized chunks into a corpus. A killed call leaves the old corpus, or none, and can be repeated.

A corpus is its chunks in order, and a corpus shard consists of whole chunks. Each corpus shard is a job. All files are
built in PREFIX.partial. They get their final names when all of them are on disk, the manifest last. Disk: chunks and
corpus exist side by side, but a corpus shard that equals one chunk is a hard link. Memory: a few megabytes per worker.
"""

import hashlib
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from megatron_neobert import __version__
from megatron_neobert.data.corpus.attribute_columns import join_columns
from megatron_neobert.data.corpus.format import (
    FORMAT_VERSION,
    BackendRecord,
    CorpusFiles,
    CorpusShard,
    Counts,
    InputRecord,
    Manifest,
    QuarantinedInput,
    read_manifest,
    token_dtype,
    write_manifest,
)
from megatron_neobert.data.corpus.shard_files import write_index
from megatron_neobert.errors import DataError, OutputError
from megatron_neobert.runtime.atomic_files import sync_to_disk
from megatron_neobert.runtime.jobs import Finished, Job, JobFolder, JobOptions, JobRunner, finish_jobs
from megatron_neobert.runtime.new_file import NewFile
from megatron_neobert.text import listed

if TYPE_CHECKING:
    from megatron_neobert.data.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenizedChunk:
    """Record of a tokenized chunk, whose files are NAME.KIND in PREFIX.partial.

    Kinds: ids (in the dtype of the corpus), lengths (int32), attributes (see attribute_columns.py, only with
    --record-key), rejects (JSON lines).
    """

    name: str
    input: str  # name of the input file in the manifest
    input_bytes: int
    input_sha256: str | None  # of the whole input file; None unless this is its first chunk, and for URLs
    counts: Counts
    backend: str = ""  # name and version of the tokenizer back end; empty for files of another program
    compared: int = 0  # documents whose ids were compared with the reference tokenizer
    first_error: str | None = None


@dataclass(frozen=True)
class ShardJob(Job[None]):
    """Join chunks into the .bin and .idx of one corpus shard. The job's folder is inside the chunks' folder."""

    result_type = None
    sync = True
    kinds = ("bin", "idx")

    chunks: Sequence[Finished[TokenizedChunk]]
    dtype: np.dtype[Any]

    @property
    def key(self) -> str:
        hashes = (f"{chunk.files['ids'].sha256} {chunk.files['lengths'].sha256}\n" for chunk in self.chunks)
        return hashlib.sha256("".join(hashes).encode()).hexdigest()

    def work(self, files: Mapping[str, NewFile]) -> None:
        ids, lengths = (
            [self.folder.parent / f"{chunk.result.name}.{kind}" for chunk in self.chunks] for kind in ("ids", "lengths")
        )
        if len(ids) == 1:
            files["bin"].link(ids[0], sha256=self.chunks[0].files["ids"].sha256)
        else:
            for file in ids:
                files["bin"].append(file)
        write_index(files["idx"], lengths, self.dtype)


def write_corpus(
    chunks: Sequence[Finished[TokenizedChunk]],
    files: CorpusFiles,
    tokenizer: "Tokenizer",
    *,
    dtype: np.dtype[Any] | None = None,
    shard_bytes: int | None = None,
    runner: JobRunner | None = None,
    text_key: str,
    filters: Mapping[str, int | float | str | None],
    quarantined: Mapping[str, QuarantinedInput] | None = None,
) -> Manifest:
    """Write a corpus from chunks, replacing a corpus with the same prefix, and return the new manifest.

    Args:
        chunks: In the order of the input files; the chunks of an input file are consecutive and in order. At least one
            chunk contains a document.
        files: Final paths. No other process may use PREFIX.partial, which contains the chunks' files.
        dtype: Dtype of the ids; None for the result of `token_dtype`.
        shard_bytes: Largest size of a .bin, unless a single chunk is larger. None writes a single shard.
        runner: Writes the corpus shards; None writes one shard after the other.
        text_key: Recorded in the manifest, as are `filters` and `quarantined`; see `Manifest`.
    """
    dtype, folder = dtype or token_dtype(tokenizer.vocab_size), files.partial.absolute()
    work = folder / "output"
    work.mkdir(exist_ok=True)  # a killed call leaves finished shards
    nonempty = [chunk for chunk in chunks if chunk.result.counts.documents]
    # A shard has at most `shard_bytes`, unless a single chunk is larger.
    groups, group_bytes = list[list[Finished[TokenizedChunk]]](), 0
    for chunk in nonempty:
        chunk_bytes = chunk.result.counts.tokens * dtype.itemsize
        if not groups or (shard_bytes is not None and group_bytes + chunk_bytes > shard_bytes):
            groups.append([])
            group_bytes = 0
        groups[-1].append(chunk)
        group_bytes += chunk_bytes
    jobs = [ShardJob(work, files.numbered_shard(n)[0].stem, group, dtype) for n, group in enumerate(groups)]
    runner = runner or JobRunner(JobOptions())
    written = {job.name: record.files for job, record in finish_jobs(jobs, runner, label="corpus shards")}
    shards = []
    for job in jobs:
        documents, pair = sum(chunk.result.counts.documents for chunk in job.chunks), written[job.name]
        shards.append(CorpusShard(documents, pair["bin"].bytes // dtype.itemsize, pair["bin"], pair["idx"]))
    attributes = None
    if "attributes" in nonempty[0].files:
        of_chunks = [folder / f"{chunk.result.name}.attributes" for chunk in nonempty]
        attributes = join_columns(work / files.attributes.name, of_chunks)
    counts, inputs, backends = Counts(), dict[str, InputRecord](), dict[str, BackendRecord]()
    with (work / files.rejects.name).open("wb") as rejects:
        for result in (chunk.result for chunk in chunks):
            with (folder / f"{result.name}.rejects").open("rb") as source:
                shutil.copyfileobj(source, rejects)
            of_chunk = result.counts
            counts.add(of_chunk)
            earlier = inputs.setdefault(result.input, InputRecord(result.input_bytes, result.input_sha256))
            inputs[result.input] = replace(
                earlier, documents=earlier.documents + of_chunk.documents, tokens=earlier.tokens + of_chunk.tokens
            )
            if result.backend:
                by = backends.setdefault(result.backend, BackendRecord(0, 0))
                backends[result.backend] = BackendRecord(
                    by.documents + of_chunk.documents, by.compared + result.compared
                )
    sync_to_disk(work / files.rejects.name)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        project_version=__version__,
        inputs=inputs,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        special_tokens=tokenizer.special_tokens,
        special_ids=list(tokenizer.special_ids),
        dtype=dtype.name,
        records=counts.records,
        documents=counts.documents,
        tokens=counts.tokens,
        unknown_tokens=counts.unknown_tokens,
        rejected=dict(sorted(counts.rejected.items())),
        dropped=dict(sorted(counts.dropped.items())),
        shards=shards,
        bytes_per_token=counts.utf8_bytes / counts.tokens if counts.utf8_bytes else None,
        tokenizer_backends=dict(sorted(backends.items())),
        attributes=attributes,
        text_key=text_key,
        filters=dict(filters),
        quarantined=dict(quarantined or {}),
    )
    write_manifest(work / files.manifest.name, manifest)
    _replace_old_corpus(files, manifest, work)
    shutil.rmtree(work, ignore_errors=True)
    return manifest


def _replace_old_corpus(files: CorpusFiles, manifest: Manifest, work: Path) -> None:
    """Remove the old corpus with this prefix, and move the new corpus's files from `work` to their final names.

    The old manifest is removed first, and the new manifest is moved last. So after a kill in between, no manifest
    describes missing or replaced files. Raise OutputError if a new file would replace a file of another corpus.
    """
    old_files, pairs = files.existing_files(), files.shard_files(len(manifest.shards))
    for file in sum(pairs, ()):
        if file.exists() and file not in old_files:
            raise OutputError(f"{file} belongs to another corpus; move it away, and start again with --resume")
    files.manifest.unlink(missing_ok=True)
    sync_to_disk(files.manifest.parent)
    # The highest shard number goes first, so that the files left after a kill are still numbered from 0 on.
    for file in (*old_files[::-1], files.rejects):
        file.unlink(missing_ok=True)
    for number, pair in enumerate(pairs):
        for source, target in zip(files.numbered_shard(number), pair, strict=True):
            (work / source.name).replace(target)
    if (work / files.rejects.name).stat().st_size:
        (work / files.rejects.name).replace(files.rejects)
    if manifest.attributes is not None:
        (work / files.attributes.name).replace(files.attributes)
    sync_to_disk(files.manifest.parent)
    (work / files.manifest.name).replace(files.manifest)
    sync_to_disk(files.manifest.parent)


def refuse_existing(files: CorpusFiles, *, overwrite: bool) -> None:
    """Raise OutputError if a file of the corpus exists, unless `overwrite` is set.

    With `overwrite`, raise OutputError only if files exist without a valid manifest of this project, and no
    PREFIX.partial shows that a killed run removed the manifest.
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
