"""Sources: what the documents of a corpus are counted by, the values of a field of their records.

PREFIX.sources has two bytes for each document: the place of its source among those of the manifest.
"""

import hashlib
from collections.abc import Collection, Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.data.corpus.format import Manifest
from megatron_neobert.data.corpus.volumes import damage, read_chunks
from megatron_neobert.errors import DataError
from megatron_neobert.runtime.atomic_files import sync_to_disk

NO_SOURCE = "(none)"  # records without the field, or with null in it
SOURCE_DTYPE = np.dtype("<u2")  # of their numbers
MOST_SOURCES = 1000  # a field with more is no source, but a title or a URL
_LONGEST_NAME = 200  # characters


def source_name(value: object, key: str) -> str:
    """What documents with this value are counted under.

    Args:
        key: --source-key.

    Raises:
        DataError: It is too long for a name.
    """
    name = NO_SOURCE if value is None else str(value)
    if len(name) > _LONGEST_NAME:
        raise DataError(
            f"--source-key {key}: a value has {len(name):,} characters ({name[:50]!r}...), more than the "
            f"{_LONGEST_NAME} of a source's name; choose a field with few, short values"
        )
    return name


def check_sources(names: Collection[str], key: str | None) -> None:
    """Raises DataError where there are too many."""
    if len(names) > MOST_SOURCES:
        raise DataError(
            f"--source-key {key} has more than {MOST_SOURCES:,} values (among them {', '.join(sorted(names)[:3])}); "
            "choose a field with fewer, such as the name of a data set or a language"
        )


def write_sources(path: Path, files: Iterable[Path], names: Collection[str], counted: Collection[str]) -> str:
    """A new file of the numbers in all files, on disk; returns its sha256.

    Args:
        names: What the numbers in the files stand for.
        counted: What the new numbers stand for: those of the names that occur.
    """
    place = {name: number for number, name in enumerate(counted)}
    numbers, digest = np.array([place.get(name, 0) for name in names], dtype=SOURCE_DTYPE), hashlib.sha256()
    with path.open("wb") as stream:
        for some in (chunk for file in files for chunk in read_chunks(file, SOURCE_DTYPE)):
            content = numbers[some].tobytes()
            stream.write(content)
            digest.update(content)
    sync_to_disk(path)
    return digest.hexdigest()


def map_sources(path: Path, manifest: Manifest) -> NDArray[np.uint16]:
    """The number of each document's source, mapped. Raises DataError where the file has another size."""
    size, expected = path.stat().st_size, SOURCE_DTYPE.itemsize * manifest.documents
    if size != expected:
        raise damage(path, min(size, expected), f"{expected} bytes for {manifest.documents} documents", size)
    return np.memmap(path, SOURCE_DTYPE, "r")
