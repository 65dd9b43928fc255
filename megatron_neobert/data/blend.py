"""Rows of several sources in fixed proportions.

Row by row the source that lags furthest behind its share comes next, so no source is ever a whole row ahead of its
share, and after every period (the sum of the weights as whole numbers) all have exactly theirs. Each source walks
through its own epochs. The blend's state is a cursor per source and the rows of the current period.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.data.packing import PackedRows, join_rows
from megatron_neobert.data.rows import BatchSettings, Cursor, RowReader, Source
from megatron_neobert.errors import CheckpointError


@dataclass(frozen=True)
class BlendCursor:
    """The next unread row of every source, and how many rows of the current period each has given."""

    sources: tuple[Cursor, ...]
    rows: tuple[int, ...]


def read_cursor(record: dict[str, Any]) -> Cursor | BlendCursor:
    """What `dataclasses.asdict` made of a cursor."""
    if "sources" in record:
        return BlendCursor(tuple(Cursor(**source) for source in record["sources"]), tuple(record["rows"]))
    return Cursor(**record)


def open_rows(
    sources: Sequence[Source], settings: BatchSettings, cursor: Cursor | BlendCursor
) -> "RowReader | BlendReader":
    """A reader of one source, or of a blend; it starts at the cursor, or at the beginning if that is `Cursor()`.

    Raises:
        DataError: A source without documents.
        CheckpointError: The cursor is not one of these sources.
    """
    if cursor == Cursor() and len(sources) > 1:
        cursor = BlendCursor((Cursor(),) * len(sources), (0,) * len(sources))
    found = len(cursor.sources) if isinstance(cursor, BlendCursor) else 1
    if found != len(sources):
        raise CheckpointError(
            f"the checkpoint continues in a blend of {found} corpora, but --data-path names {len(sources)}; resume "
            "with the --data-path it was saved with, or start at the beginning with a new run."
        )
    if isinstance(cursor, BlendCursor):
        return BlendReader(sources, settings, cursor=cursor)
    return RowReader(sources[0], settings, cursor=cursor)


class BlendReader:
    """Reads rows of several sources by turns, from a cursor on."""

    def __init__(self, sources: Sequence[Source], settings: BatchSettings, *, cursor: BlendCursor) -> None:
        self._weights = tuple(source.weight for source in sources)
        self._rows = cursor.rows
        self._readers = [
            RowReader(source, settings, cursor=place, component=number)
            for number, (source, place) in enumerate(zip(sources, cursor.sources, strict=True))
        ]

    @property
    def cursor(self) -> BlendCursor:
        return BlendCursor(tuple(reader.cursor for reader in self._readers), self._rows)

    def take(self, count: int) -> PackedRows:
        """The next rows of the blend."""
        turns, self._rows = take_turns(self._weights, self._rows, count)
        shares = np.bincount(turns, minlength=len(self._readers)).tolist()
        by_source = join_rows(
            [reader.take(share) for reader, share in zip(self._readers, shares, strict=True) if share]
        )
        place_by_source = np.empty(count, dtype=np.int64)
        place_by_source[np.argsort(turns, kind="stable")] = np.arange(count)
        return by_source.reorder(place_by_source)


def take_turns(weights: Sequence[int], rows: Sequence[int], count: int) -> tuple[NDArray[np.int64], tuple[int, ...]]:
    """Whose row comes next, `count` times; the first of those that lag equally far behind.

    Args:
        weights: Above 0.
        rows: How many rows of the current period each source has given.

    Returns:
        The source of each row, and `rows` behind them.
    """
    period = sum(weights)
    lag = [weight * sum(rows) - period * own for weight, own in zip(weights, rows, strict=True)]  # in rows, x period
    given = list(rows)
    turns = np.empty(count, dtype=np.int64)
    for place in range(count):
        lag = [behind + weight for behind, weight in zip(lag, weights, strict=True)]
        turn = lag.index(max(lag))
        lag[turn] -= period
        given[turn] += 1
        turns[place] = turn
    periods = sum(given) // period
    return turns, tuple(own - periods * weight for own, weight in zip(given, weights, strict=True))
