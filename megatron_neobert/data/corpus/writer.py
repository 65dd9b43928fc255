"""Joining of finished parts to a corpus, in a way that survives a kill at any moment.

Parts are only read. Everything is built in PREFIX.partial/output and moved to its final name when all of it is on disk,
the manifest last, so the same call after a kill gives the same bytes. Costs the disk space of the parts and the corpus
side by side; a part that becomes a whole volume is linked and costs none.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from pathlib import Path

from megatron_neobert import __version__
from megatron_neobert.data.corpus.format import (
    DUPLICATE,
    FORMAT_VERSION,
    BackendRecord,
    CorpusFiles,
    InputRecord,
    Manifest,
    QuarantinedShard,
    Volume,
    read_manifest,
    reject_line,
    token_dtype,
    validation_files,
    volume_name,
    write_manifest,
)
from megatron_neobert.data.corpus.join import JoinedParts, OutputSettings, PartFiles, join_parts
from megatron_neobert.data.corpus.volumes import VolumesWriter
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer
from megatron_neobert.errors import DataError, OutputError
from megatron_neobert.runtime.atomic_files import sync_to_disk


@dataclass(frozen=True)
class CorpusFacts:
    """What goes into the manifest and does not follow from the parts."""

    inputs: dict[str, InputRecord]
    text_key: str
    filters: dict[str, str | int | float | None]
    records: int
    repaired_documents: int
    rejected: dict[str, int]
    dropped: dict[str, int]  # without duplicates
    tokenizer_backends: dict[str, BackendRecord] = field(default_factory=dict)
    quarantined: dict[str, QuarantinedShard] = field(default_factory=dict)


@dataclass(frozen=True)
class WrittenCorpus:
    """The manifests of what has been written."""

    manifest: Manifest
    validation: Manifest | None


def write_corpus(
    parts: Sequence[PartFiles],
    output: OutputSettings,
    facts: CorpusFacts,
    tokenizer: Tokenizer,
    *,
    folder: Path,
    on_progress: Callable[[int], None] = lambda _: None,
) -> WrittenCorpus:
    """Writes the corpus of these parts, and replaces what there is under its name.

    Args:
        parts: In the order of the inputs, a shard's parts one after the other.
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
        joined = join_parts(parts, output, work, tokenizer, on_progress)
        manifests = _build_manifests(joined, output, facts, tokenizer)
        write_manifest(work / "training.json", manifests.manifest)
        if manifests.validation:
            write_manifest(work / "validation.json", manifests.validation)
        rejects = _join_rejects(parts, work / "rejects")
        _commit(output.files, joined, manifests, work, rejects)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return manifests


def refuse_existing(files: CorpusFiles, *, overwrite: bool) -> None:
    """Raises OutputError where a corpus, or a piece of one, would be replaced unasked."""
    both = (files, validation_files(files))
    manifests = [one.manifest for one in both if one.manifest.exists()]
    existing = [str(file) for file in [volume for one in both for volume in one.existing_volumes()] + manifests]
    if existing and not overwrite:
        shown = existing[:4] + ([f"{len(existing) - 4:,} more files"] if len(existing) > 4 else [])
        raise OutputError(
            f"{' and '.join(shown)} exist{'s' if len(existing) == 1 else ''} already; "
            "choose another --output-prefix, or replace with --overwrite"
        )


def _build_manifests(
    joined: JoinedParts, output: OutputSettings, facts: CorpusFacts, tokenizer: Tokenizer
) -> WrittenCorpus:
    volumes = joined.training.finish()
    held_out = joined.validation.finish() if joined.validation else []
    documents, held_out_documents = joined.training.lengths.documents, sum(volume.documents for volume in held_out)
    if not documents or (joined.validation and not held_out):
        total = documents + held_out_documents
        raise DataError(
            f"--split-validation {output.validation_fraction} of {total:,} documents holds out {held_out_documents:,} "
            f"and leaves {documents:,}; each of both corpora needs at least one document. Choose another fraction"
        )
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        project_version=__version__,
        inputs=facts.inputs,
        text_key=facts.text_key,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        special_tokens=tokenizer.special_tokens,
        special_ids=list(tokenizer.special_ids),
        dtype=token_dtype(tokenizer.vocab_size).name,
        part_of="training" if held_out else "all",
        filters=facts.filters,
        records=facts.records,
        documents=documents,
        held_out=held_out_documents,
        tokens=joined.training.lengths.tokens,
        unknown_tokens=joined.unknown_tokens - joined.unknown_in_duplicates - joined.unknown_held_out,
        repaired_documents=facts.repaired_documents,
        rejected=facts.rejected,
        dropped=facts.dropped | ({DUPLICATE: joined.duplicates} if joined.duplicates else {}),
        statistics=joined.training.lengths.statistics(),
        volumes=_name(volumes, output.files),
        tokenizer_backends=facts.tokenizer_backends,
        quarantined=facts.quarantined,
    )
    validation = None
    if joined.validation:
        validation = replace(
            manifest,
            part_of="validation",
            documents=held_out_documents,
            held_out=documents,
            tokens=joined.validation.lengths.tokens,
            unknown_tokens=joined.unknown_held_out,
            statistics=joined.validation.lengths.statistics(),
            volumes=_name(held_out, validation_files(output.files)),
        )
    return WrittenCorpus(manifest, validation)


def _name(volumes: Sequence[Volume], files: CorpusFiles) -> list[Volume]:
    return [
        replace(volume, name=volume_name(files.name, number, volumes=len(volumes)))
        for number, volume in enumerate(volumes)
    ]


def _join_rejects(parts: Sequence[PartFiles], target: Path) -> Path | None:
    """One file of all parts' rejects, on disk; None where there are none."""
    with target.open("wb") as stream:
        for part in parts:
            unit, before = part.records_before or ("", 0)
            with part.rejects.open("rb") as rejects:
                for line in rejects if before else ():
                    entry = json.loads(line)
                    stream.write(reject_line(entry | {unit: entry[unit] + before}))
                shutil.copyfileobj(rejects, stream, 1 << 20)
    sync_to_disk(target)
    return target if target.stat().st_size else None


def _commit(
    files: CorpusFiles, joined: JoinedParts, manifests: WrittenCorpus, work: Path, rejects: Path | None
) -> None:
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
    if joined.validation and manifests.validation:
        _move(joined.validation, manifests.validation, work / "validation.json", held_out_files)
    if rejects:
        rejects.replace(files.rejects)
    _move(joined.training, manifests.manifest, work / "training.json", files)


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


def _move(writer: VolumesWriter, manifest: Manifest, written_manifest: Path, files: CorpusFiles) -> None:
    for written, volume in zip(writer.finish(), manifest.volumes, strict=True):
        bin_file, idx_file = files.volume_files(volume.name)
        (writer.folder / f"{written.name}.bin").replace(bin_file)
        (writer.folder / f"{written.name}.idx").replace(idx_file)
    sync_to_disk(files.manifest.parent)
    written_manifest.replace(files.manifest)
    sync_to_disk(files.manifest.parent)
