"""Texts out of the text column of parquet and Arrow files, a little at a time.

Neither a row group nor a mapped file stays in memory, and a chunk may begin within either. What is damaged is a
DataError. Memory: parquet takes some three times the largest page of the column, decompressed, and _DECODED_ROWS
values; Arrow with compressed buffers one record batch of the column, and all dictionaries of the file. Values are taken
over some rows at a time; only rows with a null, a blank, an over-long or an undecodable value among them are looked at
one by one.
"""

import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_neobert.data.inputs.records import TOO_LONG, Origin, ReadSettings, RecordBatch, add_value, decode, reject
from megatron_neobert.data.inputs.stream import BATCH_BYTES, Chunk, is_url, named_errors, open_input
from megatron_neobert.errors import ConfigError, DataError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_BUFFER_BYTES = 1 << 20  # of a column at a time: what writers make a page of
_ROWS = 256  # looked at together at most: 64 rows of web text cost a quarter more time, 1,024 are not faster
_STEP_BYTES = 1 << 20  # of text in them, unless one row alone has more
# Decoded by pyarrow at once. A few bytes of a page may stand for a long value once more (by a dictionary, by a shared
# prefix), so no size in the file bounds what a row takes: 256 rows of 20 MB would come to 5 GB before anyone sees one.
_DECODED_ROWS = 8
_RECORD_BATCH_ROWS = 4096  # at most in one RecordBatch
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"  # without it, a file cut off between two batches would look whole


class RowGroup(NamedTuple):
    """A row group of a parquet file, or a record batch of an Arrow file."""

    rows: int
    text_bytes: int


class Rows(NamedTuple):
    """Consecutive values of the text column, and how much of the chunk is read with them."""

    column: "pa.Array"
    progress: float


def row_groups(chunk: Chunk, settings: ReadSettings) -> list[RowGroup]:
    """Return the units of a table; an empty list for a remote Arrow file, whose units only a download would show.

    Raises:
        DataError: The file is damaged, or has no text column of that name.
        ConfigError: The file has no column for --record-key.
    """
    text_key = settings.text_key
    if chunk.format == "parquet":
        with _open_parquet(chunk.path) as file:
            _find_columns(chunk.path, file.schema_arrow, settings)
            groups = (file.metadata.row_group(number) for number in range(file.num_row_groups))
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
    with _open_arrow(chunk.path, text_key) as arrow:
        _find_columns(chunk.path, arrow.schema, settings)
        return [] if is_url(chunk.path) else [RowGroup(len(column), column.nbytes) for column in arrow.columns]


def read_column(chunk: Chunk, settings: ReadSettings) -> Iterator[RecordBatch]:
    """The texts of the rows [start, end) of a parquet or Arrow file.

    Raises:
        DataError: The file is damaged, or has no such text column.
    """
    with _named_damage(chunk.path, chunk.format):
        yield from _read_column(chunk, settings)


def _read_column(chunk: Chunk, settings: ReadSettings) -> Iterator[RecordBatch]:
    import pyarrow.compute as pc

    batch, row = RecordBatch(), chunk.start
    read = parquet_rows if chunk.format == "parquet" else arrow_rows
    # Each field in a reading of its own.
    others = {key: _values(read(chunk, key, of_text=False)) for key in settings.record_keys or ()}
    for column, progress in take_together(read(chunk, settings.text_key)):
        text_bytes = pc.sum(pc.binary_length(column)).as_py() or 0
        full = batch.utf8_bytes + text_bytes > BATCH_BYTES or batch.numbers >= _RECORD_BATCH_ROWS
        if batch.numbers and full:
            yield batch
            batch = RecordBatch()
        origins = None
        if settings.record_keys is not None:
            numbers = range(row, row + len(column))
            origins = [Origin(number, {key: next(values) for key, values in others.items()}) for number in numbers]
        _add_rows(batch, column, row, text_bytes, settings.max_document_bytes, origins)
        row += len(column)
        batch.numbers += len(column)
        batch.progress = progress
    if batch.numbers:
        yield batch


def take_together(steps: Iterable[Rows]) -> Iterator[Rows]:
    """The same rows up to _ROWS or _STEP_BYTES at a time, longer values alone, as columns whose values have offsets.

    What rows share, by a dictionary or by views, is decoded for _DECODED_ROWS of them at a time.
    """
    import pyarrow as pa

    is_view_or_null = (pa.types.is_null, pa.types.is_string_view, pa.types.is_binary_view)
    held: list[pa.Array] = []
    held_rows, held_bytes, done = 0, 0, 0.0
    for column, progress in steps:
        pieces = [column[first : first + _DECODED_ROWS] for first in range(0, len(column), _DECODED_ROWS)]
        for piece in pieces:
            if pa.types.is_dictionary(piece.type):
                piece = piece.dictionary_decode()
            if any(test(piece.type) for test in is_view_or_null):
                piece = piece.cast(pa.large_binary())  # not to a string: what is no UTF-8 is repaired later
            rows = [piece[row : row + 1] for row in range(len(piece))] if piece.nbytes > _STEP_BYTES else [piece]
            for some in rows:
                if held and (held_bytes + some.nbytes > _STEP_BYTES or held_rows >= _ROWS):
                    yield Rows(pa.concat_arrays(held), done)
                    held, held_rows, held_bytes = [], 0, 0
                held.append(some)
                held_rows += len(some)
                held_bytes += some.nbytes
        done = progress
    if held:
        yield Rows(pa.concat_arrays(held), done)


def _values(steps: Iterable[Rows]) -> Iterator[Any]:
    import pyarrow as pa

    for column, _ in steps:
        if pa.types.is_duration(column.type):
            column = column.cast(pa.int64())
        elif pa.types.is_temporal(column.type):
            column = column.cast(pa.string())  # Python does not have all dates and times
        try:
            values = column.to_pylist()
        except UnicodeDecodeError:  # strings that are none
            values = [
                value if value is None else decode(value)[0] for value in column.cast(pa.large_binary()).to_pylist()
            ]
        yield from values


def _add_rows(
    batch: RecordBatch,
    column: "pa.Array",
    first_row: int,
    text_bytes: int,
    limit: int,
    origins: Sequence[Origin] | None,
) -> None:
    import pyarrow as pa

    texts = _faultless_texts(column, limit)
    if texts is not None:
        batch.texts += texts
        batch.origins += origins or ()
        batch.utf8_bytes += text_bytes
        return
    for row, value in enumerate(column.cast(pa.large_binary()).to_pylist(), first_row):
        if value is None:
            add_value(batch, None, row, raw=b"")
        elif len(value) > limit:
            reject(batch, TOO_LONG, row, f"{len(value):,} bytes", value)
        else:
            text, repaired = decode(value)
            origin = origins[row - first_row] if origins else None
            add_value(batch, text, row, raw=value, repaired=repaired, origin=origin)


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
    import pyarrow.parquet as pq  # here, because runs without tables and --help do without its 0.2 seconds

    with _named_damage(path, "parquet"), ExitStack() as stack:
        source = stack.enter_context(open_input(path)) if is_url(path) else path
        # Both arguments make column chunks stream; by default a whole row group is loaded (313 MB of one: 10 MB so).
        yield stack.enter_context(pq.ParquetFile(source, buffer_size=_BUFFER_BYTES, pre_buffer=False))


def parquet_rows(chunk: Chunk, key: str, *, of_text: bool = True) -> Iterator[Rows]:
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
                yield Rows(column, (min(row, end) - chunk.start) / (end - chunk.start))
            if row >= end:
                break
        if row < end:
            raise DataError(f"{chunk.path}: damaged parquet file (row {row} of {end} is missing); fetch the file again")


class _Arrow(NamedTuple):
    schema: "pa.Schema"
    columns: "Iterator[pa.Array]"  # the text column of each record batch
    progress: Callable[[], float]
    forget: Callable[[], None]  # gives back the memory of what has been read; the file still has it


@contextmanager
def _open_arrow(path: str, key: str, *, of_text: bool = True) -> Iterator[_Arrow]:
    """An Arrow file or stream, mapped if local, so that rows nobody asks for are not read.

    Nor are columns, which would be decompressed, except those in one struct with the text.
    """
    import pyarrow as pa

    with _named_damage(path, "Arrow"), open_input(path) as file:
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
        names, _ = _find_column(path, schema, key, of_text=of_text)
        options = pa.ipc.IpcReadOptions(included_fields=[schema.get_field_index(names[0])])
        source.seek(0)
        reader = open_reader(source, options=options)
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader

        def columns() -> "Iterator[pa.Array]":
            for batch in batches:
                batch.validate()  # damage might end the process otherwise
                yield _take_column(batch, names)

        yield _Arrow(schema, columns(), lambda: source.tell() / size, forget)


def arrow_rows(chunk: Chunk, key: str, *, of_text: bool = True) -> Iterator[Rows]:
    with _open_arrow(chunk.path, key, of_text=of_text) as arrow:
        row = 0
        for column in arrow.columns:
            first, row = row, row + len(column)
            if row <= chunk.start:
                continue
            _check_offsets(column)
            end = row if chunk.end is None else min(row, chunk.end)
            for start in range(max(first, chunk.start), end, _ROWS):
                stop = min(start + _ROWS, end)
                done = arrow.progress() if chunk.end is None else (stop - chunk.start) / (chunk.end - chunk.start)
                yield Rows(column[start - first : stop - first], done)
                arrow.forget()
            if chunk.end is not None and row >= chunk.end:
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
        except (pa.ArrowException, OSError, ValueError, OverflowError) as error:  # names, dates that Python has not
            if isinstance(error, OSError) and error.errno is not None:
                raise  # the file system's trouble, not the file's
            raise DataError(f"{path}: damaged {kind} file ({error}); fetch the file again, or leave it out") from error


def _take_column(batch: "pa.RecordBatch", names: Sequence[str]) -> "pa.Array":
    import pyarrow.compute as pc

    column = batch.column(batch.schema.get_field_index(names[0]))
    return pc.struct_field(column, list(names[1:])) if names[1:] else column


def _find_columns(path: str, schema: "pa.Schema", settings: ReadSettings) -> None:
    """Raise as `_find_column` does unless a file has all columns that the settings name."""
    _find_column(path, schema, settings.text_key)
    for key in settings.record_keys or ():
        _find_column(path, schema, key, of_text=False)


def _find_column(path: str, schema: "pa.Schema", key: str, *, of_text: bool = True) -> "tuple[list[str], pa.DataType]":
    """The names that lead to the column (its own, or those of the structs around it before it), and its type.

    Of a column that is called `a.b` and one `b` within the struct `a`, the first is meant.

    Raises:
        DataError: There is no text column of that name, or it holds something else than strings.
        ConfigError: There is no column of that name for --record-key. Not a DataError, which
            --quarantine would answer by leaving the file out.
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
