"""Attributes that are added to a finished corpus, as files PREFIX.attributes_00000.parquet and so on.

A new file gets its name before the manifest lists it. A kill at any moment leaves the corpus without the new
attributes or with all of them. Token ids and earlier attributes do not change, and neither does
`Manifest.documents_sha256`, by which drop lists and checkpoints identify a corpus.
"""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace
from numpy.typing import NDArray

from megatron_neobert.data.corpus.attribute_columns import attribute_name, write_columns
from megatron_neobert.data.corpus.attributes import attribute_types
from megatron_neobert.data.corpus.format import FileRecord, write_manifest
from megatron_neobert.data.corpus.reader import Corpus
from megatron_neobert.errors import ConfigError, DataError
from megatron_neobert.runtime.atomic_files import sha256_of, sync_to_disk
from megatron_neobert.runtime.jobs import JobFolder


def attributes_folder(corpus: Corpus) -> JobFolder:
    """Return the context manager of PREFIX.attributes.partial. Its lock allows one addition to a corpus at a time."""
    return JobFolder(corpus.files.attributes.absolute().with_suffix(".partial"))


def is_added(corpus: Corpus, origin: str, name: str) -> bool:
    """Return True if an attribute of this origin was added already.

    Otherwise, raise ConfigError if the corpus has an attribute `name`, or an expression could not name it.
    """
    if origin in corpus.manifest.added_attributes:
        return True
    if name in attribute_types(corpus):
        raise ConfigError(f"{corpus.prefix} has the attribute {name} already; choose another name")
    if not name.isidentifier() or attribute_name(name) != name:
        raise ConfigError(
            f"{name!r} cannot name an attribute; use ASCII letters, digits and _, and no keyword of Python"
        )
    return False


def add_attribute(corpus: Corpus, origin: str, name: str, values: Sequence[Any] | NDArray[Any]) -> None:
    """Add an attribute with one value per document to a corpus, unless it has one of this origin.

    `origin` states what computed the attribute, for the manifest. Raise DataError if the corpus has been written again
    since it was opened.
    """
    import pyarrow as pa

    table = pa.table({name: values})
    with attributes_folder(corpus) as folder:
        work = folder.path / "column.parquet"
        write_columns(work, table.schema, [table])
        sync_to_disk(work)
        current, files = Corpus(corpus.prefix), corpus.files
        if current.manifest.documents_sha256 != corpus.manifest.documents_sha256:
            raise DataError(
                f"{corpus.prefix} has been written again since this run began; start again with --overwrite"
            )
        if is_added(current, origin, name):
            return
        added = current.manifest.added_attributes
        record, path = FileRecord(work.stat().st_size, sha256_of(work)), files.added_attributes(len(added))
        work.replace(path)
        sync_to_disk(path.parent)
        write_manifest(files.manifest, replace(current.manifest, added_attributes=added | {origin: record}))
