"""Sources: what the documents of a corpus are counted by, the values of a field of their records."""

from collections.abc import Collection

import numpy as np

from megatron_neobert.errors import DataError

NO_SOURCE = "(none)"  # records without the field, or with null in it
SOURCE_DTYPE = np.dtype("<u2")  # of their numbers in a part
MOST_SOURCES = 1000
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
