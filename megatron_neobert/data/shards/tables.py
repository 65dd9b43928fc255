"""Texts out of the text column of parquet and Arrow shards, a little at a time.

Neither a row group nor a mapped file stays in memory, and a part may begin within either. What is damaged is a
DataError. Memory: parquet takes some three times the largest page of the column, decompressed, and _BATCH_ROWS values;
Arrow with compressed buffers one record batch of the column, and all dictionaries of the file. Values are taken over
some rows at a time; only rows with a null, a blank, an over-long or an undecodable value among them are looked at one
by one.
"""

import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.data.shards.records import (
    BATCH_BYTES,
    TOO_LONG,
    ReadSettings,
    RecordBatch,
    ShardPart,
    add_value,
    decode,
    reject,
)
from megatron_neobert.data.shards.streams import is_url, named_errors, open_shard
from megatron_neobert.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_BUFFER_BYTES = 1 << 20
_ROWS = 256  # looked at together at most: 64 rows of web text cost a quarter more time, 1,024 are not faster
_STEP_BYTES = 1 << 20  # of text in them, unless one row alone has more; web pages come 256 at a time even so
# Decoded by pyarrow at once. A few bytes of a page may stand for a long value once more (by a dictionary, by a shared
# prefix), so no size in the file bounds what a row takes: 256 rows of 20 MB would come to 5 GB before anyone sees one.
_BATCH_ROWS = 8
_RECORD_BATCH_ROWS = 4096  # at most in one RecordBatch
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"  # without it, a file cut off between two batches would look whole


class RowGroup(NamedTuple):
    """A row group of a parquet shard, or a record batch of an Arrow shard."""

    rows: int
    text_bytes: int


class Rows(NamedTuple):
    """Consecutive values of the text column, and how much of the part is read with them."""

    column: "pa.Array"  # in the type that it has in the shard, dictionaries and views too
    progress: float


def row_groups(part: ShardPart, text_key: str) -> list[RowGroup]:
    """The units that a shard consists of; none for a remote Arrow shard, which would have to be fetched for it."""
    if part.format == "parquet":
        with _open_parquet(part.path) as shard:
            _find_column(part.path, shard.schema_arrow, text_key)
            groups = (shard.metadata.row_group(number) for number in range(shard.num_row_groups))
            return [
                RowGroup(
                    group.num_rows,
                    sum(
                        chunk.total_uncompressed_size
                        for chunk in map(group.column, range(group.num_columns))
                        if chunk.path_in_schema == text_key
                    ),
                )
                for group in groups
            ]
    with _open_arrow(part.path, text_key) as arrow:
        return [] if is_url(part.path) else [RowGroup(len(column), column.nbytes) for column in arrow.columns]


def read_column(part: ShardPart, settings: ReadSettings) -> Iterator[RecordBatch]:
    """The texts of the rows [start, end) of a parquet or Arrow shard.

    Raises:
        DataError: The shard is damaged, or has no such text column.
    """
    batch, row = RecordBatch(), part.start
    for rows in (parquet_rows if part.format == "parquet" else arrow_rows)(part, settings.text_key):
        for column, text_bytes in _cut_by_bytes(rows.column):
            full = batch.utf8_bytes + text_bytes > BATCH_BYTES or batch.numbers >= _RECORD_BATCH_ROWS
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
    import pyarrow as pa
    import pyarrow.compute as pc

    texts = _faultless_texts(column, limit)
    if texts is not None:
        batch.texts += texts
        batch.utf8_bytes += pc.sum(pc.binary_length(column)).as_py()
        return
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


@contextmanager
def _open_parquet(path: str) -> "Iterator[pq.ParquetFile]":
    import pyarrow.parquet as pq  # here, because runs without such shards and --help do without its 0.2 seconds

    with _named_damage(path, "parquet"), ExitStack() as stack:
        source = stack.enter_context(open_shard(path)) if is_url(path) else path
        # Both arguments make column chunks stream; by default a whole row group is loaded (313 MB of one: 10 MB so).
        yield stack.enter_context(pq.ParquetFile(source, buffer_size=_BUFFER_BYTES, pre_buffer=False))


def parquet_rows(part: ShardPart, text_key: str) -> Iterator[Rows]:
    import pyarrow as pa

    with _open_parquet(part.path) as shard:
        names, arrow_type = _find_column(part.path, shard.schema_arrow, text_key)
        end = shard.metadata.num_rows if part.end is None else part.end
        groups, row = _groups_with_rows(shard, part.start, end)
        # A dictionary comes whole with every batch, and its values are not decoded here.
        batch_rows = _ROWS if pa.types.is_dictionary(arrow_type) else _BATCH_ROWS
        held: list[pa.Array] = []  # small batches, to be looked at together
        held_bytes, progress = 0, 0.0
        for batch in shard.iter_batches(batch_rows, groups, columns=[text_key], use_threads=False):
            column, following = _take_column(batch, names), row + batch.num_rows
            if row < part.start or following > end:
                column = column[max(0, part.start - row) : end - row]
            size = column.nbytes
            if held and (held_bytes + size > _STEP_BYTES or len(held) * batch_rows >= _ROWS):
                yield Rows(pa.concat_arrays(held), progress)
                held, held_bytes = [], 0
            row = following
            if len(column):
                held.append(column)
                held_bytes += size
                progress = (min(row, end) - part.start) / (end - part.start)
            if row >= end:
                break
        if held:
            yield Rows(pa.concat_arrays(held), progress)
        if row < end:
            raise DataError(f"{part.path}: damaged parquet file (row {row} of {end} is missing); fetch the shard again")


def _groups_with_rows(shard: "pq.ParquetFile", start: int, end: int) -> tuple[list[int], int]:
    """The row groups that have some of the rows [start, end), and the number of their first row."""
    groups, before, row = [], 0, 0
    for group in range(shard.num_row_groups):
        following = row + shard.metadata.row_group(group).num_rows
        if following <= start:
            before = following
        elif row < end:
            groups.append(group)
        row = following
    return groups, before


class _Arrow(NamedTuple):
    columns: "Iterator[pa.Array]"  # the text column of each record batch
    progress: Callable[[], float]
    forget: Callable[[], None]  # gives back the memory of what has been read; the file still has it


@contextmanager
def _open_arrow(path: str, text_key: str) -> Iterator[_Arrow]:
    """An Arrow file or stream, mapped if local, so that rows nobody asks for are not read.

    Nor are columns, which would be decompressed, except those in one struct with the text.
    """
    import pyarrow as pa

    with _named_damage(path, "Arrow"), open_shard(path) as file:
        is_file = file.read(6) == b"ARROW1"
        size = file.seek(0, 2)
        file.seek(max(0, size - len(_END_OF_STREAM)))
        if not is_file and file.read() != _END_OF_STREAM:
            raise pa.ArrowInvalid("the mark of its end is missing")
        file.seek(0)
        if is_url(path):
            source, forget = pa.PythonFile(file, "r"), lambda: None
        else:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            source, forget = pa.BufferReader(pa.py_buffer(mapping)), lambda: mapping.madvise(mmap.MADV_DONTNEED)
        open_reader = pa.ipc.open_file if is_file else pa.ipc.open_stream
        schema = open_reader(source).schema
        names, _ = _find_column(path, schema, text_key)
        options = pa.ipc.IpcReadOptions(included_fields=[schema.get_field_index(names[0])])
        source.seek(0)
        reader = open_reader(source, options=options)
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader

        def columns() -> "Iterator[pa.Array]":
            for batch in batches:
                batch.validate()  # damage might end the process otherwise
                yield _take_column(batch, names)

        yield _Arrow(columns(), lambda: source.tell() / size, forget)


def arrow_rows(part: ShardPart, text_key: str) -> Iterator[Rows]:
    with _open_arrow(part.path, text_key) as arrow:
        row = 0
        for column in arrow.columns:
            first, row = row, row + len(column)
            if row <= part.start:
                continue
            _check_offsets(column)
            end = row if part.end is None else min(row, part.end)
            for start in range(max(first, part.start), end, _ROWS):
                stop = min(start + _ROWS, end)
                done = arrow.progress() if part.end is None else (stop - part.start) / (part.end - part.start)
                yield Rows(column[start - first : stop - first], done)
                arrow.forget()
            if part.end is not None and row >= part.end:
                break


def _check_offsets(column: "pa.Array") -> None:
    """Raises ArrowInvalid where damage would let values be taken from outside of the column.

    Parquet is decoded, so its values lie where they should; Arrow is taken as it is, and would end the process.
    """
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        _check_offsets(column.dictionary)
        pa.DictionaryArray.from_arrays(column.indices, column.dictionary)  # looks whether the indices are within
        return
    bytes_of = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
    column.view(bytes_of.get(column.type, column.type)).validate(
        full=True
    )  # bytes, since UTF-8 is repaired, not refused


@contextmanager
def _named_damage(path: str, kind: str) -> Iterator[None]:
    import pyarrow as pa

    with named_errors(path):
        try:
            yield
        except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: a name that is no UTF-8
            if isinstance(error, OSError) and error.errno is not None:
                raise  # the file system's trouble, not the file's
            raise DataError(f"{path}: damaged {kind} file ({error}); fetch the shard again, or leave it out") from error


def _take_column(batch: "pa.RecordBatch", names: Sequence[str]) -> "pa.Array":
    import pyarrow.compute as pc

    column = batch.column(batch.schema.get_field_index(names[0]))
    return pc.struct_field(column, list(names[1:])) if names[1:] else column


def _find_column(path: str, schema: "pa.Schema", text_key: str) -> "tuple[list[str], pa.DataType]":
    """The names that lead to the text column (its own, or those of the structs around it before it), and its type.

    Of a column that is called `a.b` and one `b` within the struct `a`, the first is meant.

    Raises:
        DataError: There is no such column, or it holds something else than strings.
    """
    import pyarrow as pa

    columns = list(_columns(schema))
    texts = [".".join(names) for names, arrow_type in columns if _holds_text(arrow_type)]
    remedy = f"its text columns: {', '.join(texts) or 'none'}; choose one with --text-key"
    found = [column for column in columns if ".".join(column[0]) == text_key]
    if not found:
        raise DataError(f"{path} has no column '{text_key}'; {remedy}")
    names, arrow_type = min(found, key=lambda column: len(column[0]))
    if not _holds_text(arrow_type) and not pa.types.is_null(arrow_type):
        raise DataError(f"{path}: column '{text_key}' holds {arrow_type}, not strings; {remedy}")
    return names, arrow_type


def _columns(fields: Any, outer: Sequence[str] = ()) -> Iterator[tuple[list[str], Any]]:
    """Names and type of each column of a schema, and of those within structs."""
    import pyarrow as pa

    for field in fields:
        yield [*outer, field.name], field.type
        if pa.types.is_struct(field.type):
            yield from _columns(field.type, [*outer, field.name])


def _holds_text(arrow_type: Any) -> bool:
    from pyarrow import types

    if types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    tests: list[Callable[[Any], bool]] = [types.is_string, types.is_large_string, types.is_string_view]
    tests += [types.is_binary, types.is_large_binary, types.is_binary_view]
    return any(test(arrow_type) for test in tests)
