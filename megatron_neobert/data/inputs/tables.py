"""Texts out of the text column of parquet and Arrow files, a little at a time.

A row group is not held whole. Damage is a DataError. Memory: parquet takes some three times the
largest page of the column, decompressed, and _DECODED_ROWS values; Arrow with compressed buffers one record batch of
the column, and all dictionaries of the file.
"""

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate, chain
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
    """Return the rows at which to cut a parquet file: between row groups, and inside those that are too large.

    An Arrow file is one chunk. Raises DataError or ConfigError if a column is missing.
    """
    with _named_damage(chunk), ExitStack() as stack:
        if chunk.format == "arrow":
            schema, _ = stack.enter_context(_open_arrow(chunk.path))
            groups = []
        else:
            file = stack.enter_context(_open_parquet(chunk.path))
            schema, groups = file.schema_arrow, [file.metadata.row_group(n) for n in range(file.num_row_groups)]
        _find_column(chunk.path, schema, settings.text_key)
        for key in settings.record_keys or ():
            _find_column(chunk.path, schema, key, of_text=False)
        cuts, row, held = [], 0, 0  # held: bytes since the latest cut
        for group in groups:
            columns = map(group.column, range(group.num_columns))
            size = sum(c.total_uncompressed_size for c in columns if c.path_in_schema == settings.text_key)
            if held and held + size > chunk_bytes:
                cuts.append(row)
                held = 0
            pieces = max(1, min(-(-size // chunk_bytes), group.num_rows))
            cuts += [row + group.num_rows * piece // pieces for piece in range(1, pieces)]
            held = size // pieces + (held if pieces == 1 else 0)
            row += group.num_rows
    return cuts


def read_column(chunk: Chunk, settings: ReadSettings) -> Iterator[RecordBatch]:
    """Read the texts of the rows [start, end) of a parquet or Arrow file."""
    read = _parquet_rows if chunk.format == "parquet" else _arrow_rows
    with _named_damage(chunk):
        # Each field in a reading of its own.
        fields = {
            key: chain.from_iterable(_python_values(column) for column, _ in read(chunk, key, of_text=False))
            for key in settings.record_keys or ()
        }
        batch, row, limit = RecordBatch(), chunk.start, settings.max_document_bytes
        for column, progress in read(chunk, settings.text_key):
            for raw in _raw_values(column):
                size = len(raw or b"")
                is_full = batch.utf8_bytes + size > BATCH_BYTES or batch.numbers >= _RECORD_BATCH_ROWS
                if is_full and batch.numbers:
                    yield batch
                    batch = RecordBatch(progress=batch.progress)
                origin = None
                if settings.record_keys is not None:
                    origin = Origin(row, {key: next(values) for key, values in fields.items()})
                if raw is None:
                    reject(batch, NULL_TEXT, row, "null", b"")
                elif size > limit:
                    reject(batch, TOO_LONG, row, f"{size:,} bytes", raw)
                else:
                    text, repaired = decode(raw)
                    add_text(batch, text, repaired=repaired, origin=origin, size=None if repaired else size)
                batch.numbers += 1
                row += 1
            batch.progress = progress
        if batch.numbers:
            yield batch


def _raw_values(column: "pa.Array") -> Iterator[bytes | None]:
    """Yield the values of a column of texts as bytes, since what is no UTF-8 is repaired later."""
    import pyarrow as pa

    starts = range(0, len(column), _DECODED_ROWS)
    for piece in (column[first : first + _DECODED_ROWS] for first in starts):
        if pa.types.is_dictionary(piece.type):
            piece = piece.dictionary_decode()
        yield from piece.cast(pa.large_binary()).to_pylist()


def _python_values(column: "pa.Array") -> list[Any]:
    import pyarrow as pa

    if pa.types.is_duration(column.type):
        column = column.cast(pa.int64())
    elif pa.types.is_temporal(column.type):
        column = column.cast(pa.string())  # Python does not have all dates and times
    try:
        return column.to_pylist()
    except UnicodeDecodeError:  # strings that are none
        raw = column.cast(pa.large_binary()).to_pylist()
        return [value if value is None else decode(value)[0] for value in raw]


@contextmanager
def _open_parquet(path: str) -> "Iterator[pq.ParquetFile]":
    import pyarrow as pa  # here, because runs without tables and --help do without its 0.2 seconds
    import pyarrow.parquet as pq

    source = open_input(path) if is_url(path) else pa.OSFile(os.fsencode(path))
    # Both arguments make column chunks stream; by default a whole row group is loaded (313 MB of one: 10 MB so).
    with source, pq.ParquetFile(source, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
        yield file


def _parquet_rows(chunk: Chunk, key: str, *, of_text: bool = True) -> "Iterator[tuple[pa.Array, float]]":
    """Yield some values of a column, and the share of the chunk that is read with them."""
    import pyarrow as pa

    with _open_parquet(chunk.path) as file:
        names, arrow_type = _find_column(chunk.path, file.schema_arrow, key, of_text=of_text)
        end = file.metadata.num_rows if chunk.end is None else chunk.end
        numbers = range(file.num_row_groups)
        begins = list(accumulate((file.metadata.row_group(number).num_rows for number in numbers), initial=0))
        groups = [number for number in numbers if begins[number + 1] > chunk.start and begins[number] < end]
        row = begins[groups[0]] if groups else end
        # A dictionary comes whole with every batch, and its values are not decoded here.
        batch_rows = _ROWS if pa.types.is_dictionary(arrow_type) else _DECODED_ROWS
        for batch in file.iter_batches(batch_rows, groups, columns=[key], use_threads=False):
            column = _take_column(batch, names)[max(0, chunk.start - row) : max(0, end - row)]
            row += batch.num_rows
            if len(column):
                yield column, (min(row, end) - chunk.start) / (end - chunk.start)
            if row >= end:
                break
        if row < end:
            raise DataError(f"{chunk.path}: damaged parquet file (row {row} of {end} is missing); fetch the file again")


@contextmanager
def _open_arrow(path: str) -> Iterator[tuple["pa.Schema", Callable[[list[str]], Any]]]:
    """Open an Arrow file or stream, mapped if it is local; yield its schema, and a function that reads one column."""
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
        open_reader = pa.ipc.open_file if is_file else pa.ipc.open_stream
        schema = open_reader(source).schema

        def read(names: list[str]) -> "Iterator[tuple[pa.Array, float]]":
            # No other column is read, which would be decompressed.
            options = pa.ipc.IpcReadOptions(included_fields=[schema.get_field_index(names[0])])
            source.seek(0)
            reader = open_reader(source, options=options)
            for batch in map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader:
                batch.validate()  # damage might end the process otherwise
                column = _take_column(batch, names)
                _check_offsets(column)
                for first in range(0, len(column), _ROWS):
                    yield column[first : first + _ROWS], source.tell() / size

        yield schema, read


def _arrow_rows(chunk: Chunk, key: str, *, of_text: bool = True) -> "Iterator[tuple[pa.Array, float]]":
    with _open_arrow(chunk.path) as (schema, read):
        names, _ = _find_column(chunk.path, schema, key, of_text=of_text)
        yield from read(names)


def _check_offsets(column: "pa.Array") -> None:
    """Raise ArrowInvalid if damage would let values be taken from outside of the column.

    Parquet is decoded, so its values are where they should be; Arrow is taken as it is, and would end the process.
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


def _find_column(path: str, schema: "pa.Schema", key: str, *, of_text: bool = True) -> "tuple[list[str], pa.DataType]":
    """Return the names that lead to the column (those of the structs around it, and its own), and its type.

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
    if key not in found and not of_text:
        raise ConfigError(
            f"{path} has no column '{key}'; its columns: {', '.join(found)}; choose among them with --record-key"
        )
    remedy = f"its text columns: {', '.join(texts) or 'none'}; choose one with --text-key"
    if key not in found:
        raise DataError(f"{path} has no column '{key}'; {remedy}")
    names, arrow_type = found[key]
    if of_text and not _holds_text(arrow_type) and not pa.types.is_null(arrow_type):
        raise DataError(f"{path}: column '{key}' holds {arrow_type}, not strings; {remedy}")
    return names, arrow_type


def _holds_text(arrow_type: Any) -> bool:
    from pyarrow import types

    if types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    tests: list[Callable[[Any], bool]] = [types.is_string, types.is_large_string, types.is_string_view]
    tests += [types.is_binary, types.is_large_binary, types.is_binary_view]
    return any(test(arrow_type) for test in tests)
