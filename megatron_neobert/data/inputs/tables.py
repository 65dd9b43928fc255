"""Read the text column of Parquet and Arrow files.

Memory: for Parquet, about three times the largest decompressed page of the column and _DECODED_ROWS values; row groups
are streamed. For Arrow with compressed buffers, one record batch of the column and all dictionaries of the file.
"""

import mmap
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate, repeat
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from megatron_neobert.data.inputs.input_reader import BATCH_BYTES, Chunk, is_url, named_errors, open_input
from megatron_neobert.data.inputs.records import ReadSettings, Reason, RecordBatch
from megatron_neobert.errors import DataError, suggestion

_BUFFER_BYTES = 1 << 20  # usual size of a page
# Rows that pyarrow decodes at once. A few bytes of a page can repeat a long value (through a dictionary or a shared
# prefix), so the sizes in the file do not bound the memory of a row: 256 rows of 20 MB would take 5 GB.
_DECODED_ROWS = 8
_ENCODED_ROWS = 256  # rows per step while values are not decoded
_LONGEST_BATCH_ROWS = 4096  # in one RecordBatch
# Arrow streams end with this mark. A file that was cut between two record batches lacks it.
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
# Arrow's types of text, each with the type that has the same bytes and is not checked for UTF-8.
_BYTES_OF = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}


def find_row_cuts(chunk: Chunk, settings: ReadSettings, *, chunk_bytes: int) -> list[int]:
    """Return the rows (from 0) at which to cut a Parquet file, in ascending order. An Arrow file has no cuts.

    Each cut is the first row of a row group, except row 0. A chunk has at most `chunk_bytes` of text, unless a single
    row group has more.
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
    cuts, row, bytes_since_cut = [], 0, 0
    for group in groups:
        columns = map(group.column, range(group.num_columns))
        size = sum(c.total_uncompressed_size for c in columns if c.path_in_schema == settings.text_key)
        if bytes_since_cut and bytes_since_cut + size > chunk_bytes:
            cuts.append(row)
            bytes_since_cut = 0
        bytes_since_cut += size
        row += group.num_rows
    return cuts


def read_column(chunk: Chunk, settings: ReadSettings) -> Iterator[RecordBatch]:
    """Yield batches of the texts of a Parquet or Arrow chunk, with their --record-key fields.

    Nulls and documents above `max_document_bytes` are in the `rejected` of their batch. A field without a column is
    None.
    """
    keys, limit = settings.record_keys, settings.max_document_bytes
    batch, row = RecordBatch(), chunk.start
    with _named_damage(chunk):
        for columns, progress, names in (_parquet_rows if chunk.format == "parquet" else _arrow_rows)(chunk, settings):
            batch.field_names = names
            fields = zip(*map(_python_values, columns[1:]), strict=True) if keys else repeat(())
            for raw, values in zip(_raw_values(columns[0]), fields, strict=False):
                size = len(raw or b"")
                is_full = batch.utf8_bytes + size > BATCH_BYTES or batch.numbers >= _LONGEST_BATCH_ROWS
                if is_full and batch.numbers:
                    yield batch
                    batch = RecordBatch(progress=batch.progress, field_names=names)
                if raw is None:
                    batch.reject(Reason.NULL_TEXT, row, "null", b"")
                elif size > limit:
                    batch.reject(Reason.TOO_LONG, row, f"{size:,} bytes", raw)
                else:
                    batch.add_utf8(raw, row, dict(zip(keys, values, strict=True)) if keys else {})
                batch.numbers += 1
                row += 1
            batch.progress = progress
        if batch.numbers:
            yield batch


def _raw_values(column: pa.Array) -> Iterator[bytes | None]:
    """Yield each value of a text column as bytes, which may be invalid UTF-8, or None for a null."""
    for first in range(0, len(column), _DECODED_ROWS):
        values = column[first : first + _DECODED_ROWS]
        if pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        yield from _as_bytes(values).to_pylist()


def _as_bytes(column: pa.Array) -> pa.Array:
    # A view copies nothing. A cast takes longer than decoding short texts.
    """Return a column of strings as a column of bytes, without a copy. Other columns are returned unchanged."""
    return column.view(_BYTES_OF.get(column.type, column.type))


def _python_values(column: pa.Array) -> list[Any]:
    """Return a column's values: dates and times as texts, durations as integers, U+FFFD for invalid UTF-8.

    A float of 32 bits becomes the shortest decimal number for it, so that a stored 0.7 equals 0.7.
    """
    if column.type == pa.float32():
        column = column.cast(pa.string()).cast(pa.float64())
    if pa.types.is_duration(column.type):
        column = column.cast(pa.int64())
    elif pa.types.is_temporal(column.type):
        column = column.cast(pa.string())  # Python cannot represent all dates and times
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        values = column.cast(pa.large_binary()).to_pylist()
        return [value if value is None else value.decode(errors="replace") for value in values]


@contextmanager
def _open_parquet(path: str) -> Iterator[pq.ParquetFile]:
    source = open_input(path) if is_url(path) else pa.OSFile(os.fsencode(path))
    # Both arguments are needed to stream column chunks. The default loads a whole row group: 313 MB instead of 10 MB
    # for a row group of 313 MB.
    with source, pq.ParquetFile(source, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
        yield file


def _parquet_rows(chunk: Chunk, settings: ReadSettings) -> Iterator[tuple[list[pa.Array], float, list[str]]]:
    """Yield (columns, share of the chunk read so far, names of the file's columns) for each batch of consecutive rows.

    `columns` contains an array for --text-key, then an array for each --record-key. Raise DataError if rows are missing
    at the end or --text-key is no text column.
    """
    with _open_parquet(chunk.path) as file:
        columns = _find_columns(chunk.path, file.schema_arrow, settings)
        end, row = file.metadata.num_rows if chunk.end is None else chunk.end, chunk.start
        numbers = range(file.num_row_groups)
        first_rows = list(accumulate((file.metadata.row_group(number).num_rows for number in numbers), initial=0))
        groups = [number for number in numbers if chunk.start <= first_rows[number] < end]
        # Each batch of a dictionary column includes the whole dictionary, and its values are not decoded here.
        batch_rows = _ENCODED_ROWS if pa.types.is_dictionary(columns[0][1]) else _DECODED_ROWS
        keys = [".".join(path) for path, _ in columns if path]
        for batch in file.iter_batches(batch_rows, groups, columns=keys, use_threads=False):
            row += batch.num_rows
            arrays = [_take_column(batch, path) for path, _ in columns]
            yield arrays, (row - chunk.start) / (end - chunk.start), file.schema_arrow.names
        if row < end:
            raise DataError(f"{chunk.path}: damaged parquet file (row {row} of {end} is missing); fetch the file again")


@contextmanager
def _open_arrow(path: str) -> Iterator[tuple[Any, Callable[..., Any], int]]:
    """Context manager: open an Arrow file or stream, memory-mapped if local. Raise ArrowInvalid if it is truncated.

    Yield the source, the pyarrow function that opens a reader for it, and its size in bytes.
    """
    with open_input(path) as file:
        is_file = file.read(6) == b"ARROW1"
        size = file.seek(0, 2)
        file.seek(max(0, size - len(_END_OF_STREAM)))
        if not is_file and file.read() != _END_OF_STREAM:
            raise pa.ArrowInvalid("the end-of-stream mark is missing")
        file.seek(0)
        if is_url(path):
            source = pa.PythonFile(file, "r")
        else:
            source = pa.BufferReader(pa.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
        yield source, pa.ipc.open_file if is_file else pa.ipc.open_stream, size


def _arrow_rows(chunk: Chunk, settings: ReadSettings) -> Iterator[tuple[list[pa.Array], float, list[str]]]:
    with _open_arrow(chunk.path) as (source, open_reader, size):
        schema = open_reader(source).schema
        paths = [path for path, _ in _find_columns(chunk.path, schema, settings)]
        # Other columns would be decompressed.
        fields = sorted({schema.get_field_index(path[0]) for path in paths if path})
        options = pa.ipc.IpcReadOptions(included_fields=fields)
        source.seek(0)
        reader = open_reader(source, options=options)
        is_stream = open_reader is pa.ipc.open_stream
        batches = reader if is_stream else map(reader.get_batch, range(reader.num_record_batches))
        for number, batch in enumerate(batches, start=1):
            batch.validate()  # a damaged batch could crash the process
            columns = [_take_column(batch, path) for path in paths]
            for column in columns:
                _check_offsets(column)
            for first in range(0, batch.num_rows, _ENCODED_ROWS):
                arrays = [column[first : first + _ENCODED_ROWS] for column in columns]
                progress = source.tell() / size if is_stream else number / reader.num_record_batches
                yield arrays, progress, schema.names


def _check_offsets(column: pa.Array) -> None:
    """Raise ArrowException if an offset or dictionary index of the column is invalid, which would crash the process."""
    # Only Arrow files need this check: pyarrow builds the buffers of Parquet columns itself.
    if pa.types.is_dictionary(column.type):
        _check_offsets(column.dictionary)
        pa.DictionaryArray.from_arrays(column.indices, column.dictionary)  # checks the indices
    else:
        # A check as text would refuse invalid UTF-8, which is replaced.
        _as_bytes(column).validate(full=True)


@contextmanager
def _named_damage(chunk: Chunk) -> Iterator[None]:
    """Context manager: convert pyarrow errors, ValueError and OverflowError to DataError. Name the file in OSErrors.

    pyarrow raises plain OSErrors without errno. All other OSErrors come from the file system or the network.
    """
    with named_errors(chunk.path):
        try:
            yield
        # ValueError and OverflowError: names and dates that Python cannot represent. pyarrow's OSErrors have no errno.
        except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
            if isinstance(error, OSError) and (type(error) is not OSError or error.errno is not None):
                raise
            kind = "Arrow" if chunk.format == "arrow" else chunk.format
            raise DataError(
                f"{chunk.path}: damaged {kind} file ({error}); fetch the file again, or leave it out"
            ) from error


def _take_column(batch: pa.RecordBatch, path: Sequence[str]) -> pa.Array:
    """Return the column, or field within structs, at `path`. For an empty path, return a column of nulls."""
    if not path:
        return pa.nulls(len(batch))
    column = batch.column(batch.schema.get_field_index(path[0]))
    return pc.struct_field(column, list(path[1:])) if path[1:] else column


def _find_columns(path: str, schema: pa.Schema, settings: ReadSettings) -> list[tuple[list[str], pa.DataType]]:
    """Return (path, type) of the --text-key column, then of each --record-key column.

    A path lists the names that lead to a field within structs, or only the column's name. For the key `a.b`, a column
    named `a.b` takes precedence over the field `b` of the struct `a`. The path of a --record-key without a column is
    empty. Raise DataError if the file `path` has no column --text-key, its type is neither text nor null, or a key has
    several columns.
    """
    columns: dict[str, tuple[list[str], pa.DataType]] = {}
    queue: list[tuple[list[str], pa.DataType]] = [([field.name], field.type) for field in schema]
    # The queue grows while it is read: fields of structs come after all columns.
    for names, arrow_type in queue:
        columns.setdefault(".".join(names), (names, arrow_type))
        if pa.types.is_struct(arrow_type):
            queue += [([*names, field.name], field.type) for field in arrow_type]
    texts = [name for name, (_, arrow_type) in columns.items() if _is_text(arrow_type)]
    remedy = f" its text columns: {', '.join(texts) or 'none'}; choose one with --text-key"
    key = settings.text_key
    if key not in columns:
        raise DataError(f"{path} has no column '{key}'{suggestion(key, texts, otherwise=';')}{remedy}")
    key_type = columns[key][1]
    if not _is_text(key_type) and not pa.types.is_null(key_type):
        raise DataError(f"{path}: column '{key}' has type {key_type}, not string;{remedy}")
    found = [columns.get(name, ([], pa.null())) for name in (key, *settings.record_keys)]
    counts = Counter(tuple(names) for names, _ in queue)
    for repeated in (tuple(names[:end]) for names, _ in found for end in range(1, len(names) + 1)):
        if counts[repeated] > 1:
            raise DataError(
                f"{path} has {counts[repeated]} columns '{'.'.join(repeated)}', as joins of tables write them; rename "
                "or remove all but one"
            )
    return found


def _is_text(arrow_type: Any) -> bool:
    value_type = arrow_type.value_type if pa.types.is_dictionary(arrow_type) else arrow_type
    return value_type in (*_BYTES_OF, *_BYTES_OF.values())
