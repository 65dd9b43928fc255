"""Texts out of the text column of parquet and Arrow shards.

Values are taken over some rows at a time; only rows with a null, a blank, an over-long or an undecodable value among
them are looked at one by one.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.data.shards.records import BATCH_BYTES, TOO_LONG, ReadSettings, RecordBatch, ShardPart
from megatron_neobert.data.shards.tables import arrow_rows, parquet_rows
from megatron_neobert.data.shards.texts import add_value, decode, reject

if TYPE_CHECKING:
    import pyarrow as pa

_BATCH_ROWS = 4096  # at most in one RecordBatch


def read_column(part: ShardPart, settings: ReadSettings) -> Iterator[RecordBatch]:
    """The texts of the rows [start, end) of a parquet or Arrow shard.

    Raises:
        DataError: The shard is damaged, or has no such text column.
    """
    batch, row = RecordBatch(), part.start
    for rows in (parquet_rows if part.format == "parquet" else arrow_rows)(part, settings.text_key):
        for column, text_bytes in _cut_by_bytes(rows.column):
            full = batch.utf8_bytes + text_bytes > BATCH_BYTES or batch.numbers >= _BATCH_ROWS
            if batch.numbers and full:
                yield batch
                batch = RecordBatch()
            _add_rows(batch, column, row, settings.max_document_bytes)
            row += len(column)
            batch.numbers += len(column)
            batch.progress = rows.progress
    if batch.numbers:
        yield batch


def _cut_by_bytes(column: "pa.Array") -> "Iterator[tuple[pa.Array, int]]":
    """Pieces of at most BATCH_BYTES of text, longer values alone, in a type that has offsets."""
    import pyarrow as pa

    first = held = 0
    sizes = _value_bytes(column).tolist()
    for row, size in enumerate([*sizes, BATCH_BYTES + 1]):
        if row > first and held + size > BATCH_BYTES:
            piece = column[first:row]
            if pa.types.is_dictionary(piece.type):
                piece = piece.dictionary_decode()
            if any(test(piece.type) for test in (pa.types.is_null, pa.types.is_string_view, pa.types.is_binary_view)):
                piece = piece.cast(pa.large_binary())  # not to a string: what is no UTF-8 is repaired later
            yield piece, held
            first, held = row, 0
        held += size


def _value_bytes(column: "pa.Array") -> NDArray[np.int64]:
    """The size of each value, 0 of a null. Decodes none: rows of a dictionary, and views, may share a long one."""
    import pyarrow as pa

    sizes = np.zeros(len(column), dtype=np.int64)
    rows = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
    values, places = column, rows
    if pa.types.is_dictionary(column.type):
        values, places = column.dictionary, column.indices.drop_null().to_numpy()
    if not rows.size or pa.types.is_null(values.type):
        return sizes
    places = places.astype(np.int64) + values.offset
    layout = values.buffers()[1]
    if pa.types.is_string_view(values.type) or pa.types.is_binary_view(values.type):
        sizes[rows] = np.frombuffer(layout, "<i4")[4 * places]  # a view is its size and 12 more bytes
    else:
        is_large = pa.types.is_large_string(values.type) or pa.types.is_large_binary(values.type)
        offsets = np.frombuffer(layout, "<i8" if is_large else "<i4")
        sizes[rows] = offsets[places + 1] - offsets[places]
    return sizes


def _add_rows(batch: RecordBatch, column: "pa.Array", first_row: int, limit: int) -> None:
    texts = _faultless_texts(column, limit)
    if texts is not None:
        batch.texts += texts
        batch.utf8_bytes += _byte_count(column)
        return
    import pyarrow as pa

    for row, value in enumerate(column.cast(pa.large_binary()).to_pylist(), first_row):
        if value is None:
            add_value(batch, None, row, raw=b"")
        elif len(value) > limit:
            reject(batch, TOO_LONG, row, f"{len(value):,} bytes", value)
        else:
            text, repaired = decode(value)
            add_value(batch, text, row, raw=value, repaired=repaired)


def _faultless_texts(column: "pa.Array", limit: int) -> list[str] | None:
    """All values of a column, or None where one of them is no text to keep as it is."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if column.null_count:
        return None
    shortest, longest = pc.min_max(pc.binary_length(column)).values()
    if not shortest.as_py() or longest.as_py() > limit:
        return None
    try:
        texts: list[str] = column.cast(pa.large_string()).to_pylist()  # the cast of bytes checks their UTF-8
    except (pa.ArrowInvalid, UnicodeDecodeError):
        return None
    return None if any(map(str.isspace, texts)) else texts


def _byte_count(column: "pa.Array") -> int:
    import pyarrow.compute as pc

    count: int = pc.sum(pc.binary_length(column)).as_py()
    return count
