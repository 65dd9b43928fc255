"""Texts out of the text column of parquet and Arrow files, a little at a time.

A row group is not held whole. Damage is a DataError. Memory: parquet takes some three times the
largest page of the column, decompressed, and _DECODED_ROWS values; Arrow with compressed buffers one record batch of
the column, and all dictionaries of the file.
"""

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate, repeat
from typing import TYPE_CHECKING, Any

from megatron_neobert.data.inputs.records import (
    NULL_TEXT,
    TOO_LONG,
    Origin,
    ReadSettings,
    RecordBatch,
    add_text,
    decode,
    reject,
)
from megatron_neobert.data.inputs.stream import BATCH_BYTES, Chunk, is_url, named_errors, open_input
from megatron_neobert.errors import ConfigError, DataError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_BUFFER_BYTES = 1 << 20  # of a column at a time: what writers make a page of
# Decoded by pyarrow at once. A few bytes of a page may stand for a long value once more (by a dictionary, by a shared
# prefix), so no size in the file bounds what a row takes: 256 rows of 20 MB would come to 5 GB before anyone sees one.
_DECODED_ROWS = 8
_ROWS = 256  # taken at once where they are not decoded yet
_RECORD_BATCH_ROWS = 4096  # at most in one RecordBatch
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"  # without it, a file cut off between two batches would look whole


def find_row_cuts(chunk: Chunk, settings: ReadSettings, *, chunk_bytes: int) -> list[int]:
    """Return the rows at which to cut a parquet file, between row groups; an Arrow file is one chunk.

    Raises DataError or ConfigError if a column is missing.
    """
    with _named_damage(chunk), ExitStack() as stack:
        groups = []
        if chunk.format == "arrow":
            source, open_reader, _ = stack.enter_context(_open_arrow(chunk.path))
            schema = open_reader(source).schema
        else:
            file = stack.enter_context(_open_parquet(chunk.path))
            schema, groups = file.schema_arrow, [file.metadata.row_group(n) for n in range(file.num_row_groups)]
        _find_columns(chunk.path, schema, settings)
    cuts, row, held = [], 0, 0  # held: bytes since the latest cut
    for group in groups:
        columns = map(group.column, range(group.num_columns))
        size = sum(c.total_uncompressed_size for c in columns if c.path_in_schema == settings.text_key)
        if held and held + size > chunk_bytes:
            cuts.append(row)
            held = 0
        held += size
        row += group.num_rows
    return cuts


def read_column(chunk: Chunk, settings: ReadSettings) -> Iterator[RecordBatch]:
    """Read the texts of the rows [start, end) of a parquet or Arrow file, with the fields of --record-key."""
    keys, limit = settings.record_keys, settings.max_document_bytes
    batch, row = RecordBatch(), chunk.start
    with _named_damage(chunk):
        for columns, progress in (_parquet_rows if chunk.format == "parquet" else _arrow_rows)(chunk, settings):
            fields = zip(*map(_python_values, columns[1:]), strict=True) if keys else repeat(())
            for raw, values in zip(_raw_values(columns[0]), fields, strict=False):
                size = len(raw or b"")
                is_full = batch.utf8_bytes + size > BATCH_BYTES or batch.numbers >= _RECORD_BATCH_ROWS
                if is_full and batch.numbers:
                    yield batch
                    batch = RecordBatch(progress=batch.progress)
                if raw is None:
                    reject(batch, NULL_TEXT, row, "null", b"")
                elif size > limit:
                    reject(batch, TOO_LONG, row, f"{size:,} bytes", raw)
                else:
                    text, repaired = decode(raw)
                    origin = None if keys is None else Origin(row, dict(zip(keys, values, strict=True)))
                    add_text(batch, text, repaired=repaired, origin=origin, size=None if repaired else size)
                batch.numbers += 1
                row += 1
            batch.progress = progress
        if batch.numbers:
            yield batch


def _raw_values(column: "pa.Array") -> Iterator[bytes | None]:
    """Yield the values of a column of texts as bytes, since what is no UTF-8 is repaired later."""
    import pyarrow as pa

    for first in range(0, len(column), _DECODED_ROWS):
        piece = column[first : first + _DECODED_ROWS]
        if pa.types.is_dictionary(piece.type):
            piece = piece.dictionary_decode()
        yield from _as_bytes(piece).to_pylist()


def _as_bytes(column: "pa.Array") -> "pa.Array":
    """Return a column of texts as one of bytes, which is no copy: a cast takes longer than decoding short texts."""
    import pyarrow as pa

    types = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
    return column.view(types.get(column.type, column.type))


def _python_values(column: "pa.Array") -> list[Any]:
    import pyarrow as pa

    if pa.types.is_duration(column.type):
        column = column.cast(pa.int64())
    elif pa.types.is_temporal(column.type):
        column = column.cast(pa.string())  # Python does not have all dates and times
    try:
        return column.to_pylist()
    except UnicodeDecodeError:  # strings that are none
        return [value if value is None else decode(value)[0] for value in column.cast(pa.large_binary()).to_pylist()]


@contextmanager
def _open_parquet(path: str) -> "Iterator[pq.ParquetFile]":
    import pyarrow as pa  # here, because runs without tables and --help do without its 0.2 seconds
    import pyarrow.parquet as pq

    source = open_input(path) if is_url(path) else pa.OSFile(os.fsencode(path))
    # Both arguments make column chunks stream; by default a whole row group is loaded (313 MB of one: 10 MB so).
    with source, pq.ParquetFile(source, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
        yield file


def _parquet_rows(chunk: Chunk, settings: ReadSettings) -> "Iterator[tuple[list[pa.Array], float]]":
    """Yield some values of all columns that are read, and the share of the chunk that is read with them."""
    import pyarrow as pa

    with _open_parquet(chunk.path) as file:
        found = _find_columns(chunk.path, file.schema_arrow, settings)
        end, row = file.metadata.num_rows if chunk.end is None else chunk.end, chunk.start
        numbers = range(file.num_row_groups)
        begins = list(accumulate((file.metadata.row_group(number).num_rows for number in numbers), initial=0))
        groups = [number for number in numbers if chunk.start <= begins[number] < end]
        # A dictionary comes whole with every batch, and its values are not decoded here.
        batch_rows = _ROWS if pa.types.is_dictionary(found[0][1]) else _DECODED_ROWS
        keys = [settings.text_key, *(settings.record_keys or ())]
        for batch in file.iter_batches(batch_rows, groups, columns=keys, use_threads=False):
            row += batch.num_rows
            yield [_take_column(batch, names) for names, _ in found], (row - chunk.start) / (end - chunk.start)
        if row < end:
            raise DataError(f"{chunk.path}: damaged parquet file (row {row} of {end} is missing); fetch the file again")


@contextmanager
def _open_arrow(path: str) -> Iterator[tuple[Any, Callable[..., Any], int]]:
    """Open an Arrow file or stream, mapped if it is local; yield it, the function that reads it, and its bytes."""
    import pyarrow as pa

    with open_input(path) as file:
        is_file = file.read(6) == b"ARROW1"
        size = file.seek(0, 2)
        file.seek(max(0, size - len(_END_OF_STREAM)))
        if not is_file and file.read() != _END_OF_STREAM:
            raise pa.ArrowInvalid("the mark of its end is missing")
        file.seek(0)
        if is_url(path):
            source = pa.PythonFile(file, "r")
        else:
            source = pa.BufferReader(pa.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
        yield source, pa.ipc.open_file if is_file else pa.ipc.open_stream, size


def _arrow_rows(chunk: Chunk, settings: ReadSettings) -> "Iterator[tuple[list[pa.Array], float]]":
    import pyarrow as pa

    with _open_arrow(chunk.path) as (source, open_reader, size):
        schema = open_reader(source).schema
        found = _find_columns(chunk.path, schema, settings)
        # No other column is read, which would be decompressed.
        fields = sorted({schema.get_field_index(names[0]) for names, _ in found})
        options = pa.ipc.IpcReadOptions(included_fields=fields)
        source.seek(0)
        reader = open_reader(source, options=options)
        is_stream = open_reader is pa.ipc.open_stream
        for batch in reader if is_stream else map(reader.get_batch, range(reader.num_record_batches)):
            batch.validate()  # damage might end the process otherwise
            columns = [_take_column(batch, names) for names, _ in found]
            for column in columns:
                _check_offsets(column)
            for first in range(0, batch.num_rows, _ROWS):
                yield [column[first : first + _ROWS] for column in columns], source.tell() / size


def _check_offsets(column: "pa.Array") -> None:
    """Raise ArrowInvalid if damage would let values be taken from outside of the column.

    Parquet is decoded, so its values are where they should be; Arrow is taken as it is, and would end the process.
    """
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        _check_offsets(column.dictionary)
        pa.DictionaryArray.from_arrays(column.indices, column.dictionary)  # looks whether the indices are within
    else:
        _as_bytes(column).validate(full=True)  # bytes, since UTF-8 is repaired, not refused


@contextmanager
def _named_damage(chunk: Chunk) -> Iterator[None]:
    import pyarrow as pa

    with named_errors(chunk.path):
        try:
            yield
        except (pa.ArrowException, OSError, ValueError, OverflowError) as error:  # a name, a date that Python has not
            if isinstance(error, OSError) and error.errno is not None:
                raise  # the file system's trouble, not the file's
            kind = "Arrow" if chunk.format == "arrow" else chunk.format
            raise DataError(
                f"{chunk.path}: damaged {kind} file ({error}); fetch the file again, or leave it out"
            ) from error


def _take_column(batch: "pa.RecordBatch", names: Sequence[str]) -> "pa.Array":
    import pyarrow.compute as pc

    column = batch.column(batch.schema.get_field_index(names[0]))
    return pc.struct_field(column, list(names[1:])) if names[1:] else column


def _find_columns(path: str, schema: "pa.Schema", settings: ReadSettings) -> "list[tuple[list[str], pa.DataType]]":
    """Return the names that lead to the columns of --text-key and --record-key, through structs, and their types.

    Of a column that is called `a.b` and one `b` within the struct `a`, the first is meant. A missing column of
    --record-key is a ConfigError, not a DataError, which --quarantine would answer by leaving the file out.
    """
    import pyarrow as pa

    found: dict[str, tuple[list[str], pa.DataType]] = {}
    waiting: list[tuple[list[str], pa.DataType]] = [([field.name], field.type) for field in schema]
    for names, arrow_type in waiting:  # which grows: columns come first, then what is in structs
        found.setdefault(".".join(names), (names, arrow_type))
        if pa.types.is_struct(arrow_type):
            waiting += [([*names, field.name], field.type) for field in arrow_type]
    texts = [name for name, (_, arrow_type) in found.items() if _holds_text(arrow_type)]
    remedy = f"its text columns: {', '.join(texts) or 'none'}; choose one with --text-key"
    key, others = settings.text_key, settings.record_keys or ()
    if key not in found:
        raise DataError(f"{path} has no column '{key}'; {remedy}")
    if not _holds_text(found[key][1]) and not pa.types.is_null(found[key][1]):
        raise DataError(f"{path}: column '{key}' holds {found[key][1]}, not strings; {remedy}")
    for other in others:
        if other not in found:
            raise ConfigError(
                f"{path} has no column '{other}'; its columns: {', '.join(found)}; choose among them with --record-key"
            )
    return [found[name] for name in (key, *others)]


def _holds_text(arrow_type: Any) -> bool:
    from pyarrow import types

    if types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    tests: list[Callable[[Any], bool]] = [types.is_string, types.is_large_string, types.is_string_view]
    tests += [types.is_binary, types.is_large_binary, types.is_binary_view]
    return any(test(arrow_type) for test in tests)
