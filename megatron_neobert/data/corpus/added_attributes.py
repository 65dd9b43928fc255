"""Attributes that are added to a finished corpus, as files PREFIX.attributes_00000.parquet and so on.

A new file gets its name before the manifest lists it. A kill at any moment leaves the corpus without the new
attributes or with all of them. Token ids and earlier attributes do not change, and neither does
`Manifest.documents_sha256`, by which drop lists and checkpoints identify a corpus.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

from msgspec.structs import replace

from megatron_neobert.data.corpus.attribute_columns import attribute_name
from megatron_neobert.data.corpus.attributes import attribute_types
from megatron_neobert.data.corpus.format import FileRecord, read_manifest, write_manifest
from megatron_neobert.data.corpus.reader import Corpus
from megatron_neobert.errors import ConfigError, DataError
from megatron_neobert.runtime.atomic_files import sha256_of, sync_to_disk
from megatron_neobert.runtime.jobs import JobFolder


def attributes_folder(corpus: Corpus) -> JobFolder:
    """Return PREFIX.attributes.partial, not yet entered. Its lock allows one addition to a corpus at a time."""
    return JobFolder(corpus.files.attributes.absolute().with_suffix(".partial"))


def is_added(corpus: Corpus, origin: str, names: Iterable[str]) -> bool:
    """Return True if attributes of this origin were added already.

    Otherwise, raise ConfigError if the corpus has one of the attributes `names`, or an expression could not name it.
    """
    if origin in corpus.manifest.added_attributes:
        return True
    existing = attribute_types(corpus)
    for name in names:
        if name in existing:
            raise ConfigError(f"{corpus.prefix} has the attribute {name} already; choose another name")
        if not name.isidentifier() or attribute_name(name) != name:
            raise ConfigError(
                f"{name!r} cannot name an attribute; use ASCII letters, digits and _, and no keyword of Python"
            )
    return False


def add_attributes(corpus: Corpus, folder: JobFolder, origin: str, write: Callable[[Path], None]) -> None:
    """Add a file of attributes to a corpus.

    Args:
        corpus: Opened after `folder` was entered.
        folder: The entered `attributes_folder` of the corpus.
        origin: What computed the attributes, for the manifest; see `is_added`.
        write: Writes the Parquet file, with one row per document, to a path; see `attribute_columns.write_columns`.

    Raises:
        DataError: The corpus has been written again since it was opened.
    """
    manifest, files = corpus.manifest, corpus.files
    path = files.added_attributes(len(manifest.added_attributes))
    work = folder.path / path.name
    write(work)
    sync_to_disk(work)
    record = FileRecord(work.stat().st_size, sha256_of(work))
    if read_manifest(files.manifest) != manifest:
        raise DataError(f"{corpus.prefix} has been written again since this run began; start again with --overwrite")
    work.replace(path)
    sync_to_disk(path.parent)
    write_manifest(files.manifest, replace(manifest, added_attributes=manifest.added_attributes | {origin: record}))
