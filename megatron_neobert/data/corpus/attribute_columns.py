"""Columns of document attributes: writing the columns of one chunk, and joining the columns of all chunks.

An attribute value is a number, a text or a truth value; lists and objects become missing values. A column has one type:
integers of 64 bits, floats, truth values or texts. If the values of a record key have several types, all become texts.
No integer is changed.
"""

import keyword
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_neobert.runtime.atomic_files import sha256_of, sync_to_disk
from megatron_neobert.runtime.new_file import FileRecord

if TYPE_CHECKING:
    import pyarrow as pa

Plain = bool | int | float | str | None
DERIVED = {"length": "a number", "input": "a text"}  # attributes that need no column, and their types
_ROW_GROUP = 1 << 17  # documents per row group
_LONGEST_TEXT_CHARACTERS = 1000  # longer texts are truncated


def attribute_name(key: str) -> str:
    """Return the attribute name of a record key: characters other than ASCII letters, digits and _ become _.

    Keywords of Python, `length` and `input` get a trailing _, because they have another meaning in expressions.
    """
    name = re.sub(r"\W", "_", key, flags=re.ASCII)
    return f"{name}_" if keyword.iskeyword(name) or name in DERIVED else name


def check_record_keys(keys: Sequence[str]) -> Iterator[str]:
    """Yield an error message for each key whose attribute name is no identifier or equals another key's."""
    names = [attribute_name(key) for key in keys]
    for key, name in zip(keys, names, strict=True):
        if not name.isidentifier() or names.count(name) > 1:
            yield (
                f"--record-key {key} would be the attribute '{name}', but attribute names must be unique and begin "
                "with a letter or _. Rename the field, or leave it out"
            )


def pack_columns(columns: Mapping[str, Sequence[object]]) -> bytes:
    """Return the attributes of a chunk as the bytes of an Arrow IPC file.

    `columns` maps a record key to the values of the chunk's documents. A missing value is None.
    """
    import pyarrow as pa

    table = pa.table({attribute_name(key): _to_array(list(map(plain_value, v))) for key, v in columns.items()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def join_columns(path: Path, chunks: Sequence[Path]) -> FileRecord:
    """Join the attributes of all chunks in one Parquet file, as `write_columns` does, and return the file's record.

    `chunks` are files that contain results of `pack_columns`, in document order.
    """
    import pyarrow as pa

    types: dict[str, set[pa.DataType]] = {}
    for chunk in chunks:
        # pyarrow refuses paths that are not valid UTF-8, so it gets an open file.
        with chunk.open("rb") as source:
            for field in pa.ipc.open_file(source).schema:
                types.setdefault(field.name, set()).add(field.type)

    def read_chunks() -> "Iterator[pa.Table]":
        for chunk in chunks:
            with chunk.open("rb") as source:
                yield pa.ipc.open_file(source).read_all()

    schema = pa.schema(
        [(name, _common_type(found, (table[name] for table in read_chunks()))) for name, found in types.items()]
    )
    return write_columns(path, schema, (table.cast(schema, safe=False) for table in read_chunks()))


def write_columns(path: Path, schema: "pa.Schema", tables: "Iterable[pa.Table]") -> FileRecord:
    """Write all tables, a row per document, to one Parquet file in groups of 2^17 rows, and sync it to disk.

    Overwrite an existing file in place. Return the file's size and checksum.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with (
        path.open("wb") as file,
        pq.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True) as writer,
    ):
        pending = schema.empty_table()
        for table in tables:
            pending = pa.concat_tables([pending, table])
            if whole_groups := len(pending) - len(pending) % _ROW_GROUP:
                writer.write_table(pending[:whole_groups].combine_chunks(), _ROW_GROUP)
                pending = pending[whole_groups:]
        if len(pending):
            writer.write_table(pending.combine_chunks(), _ROW_GROUP)
    sync_to_disk(path)
    return FileRecord(path.stat().st_size, sha256_of(path))


def _to_array(values: Sequence[Plain]) -> "pa.Array":
    import pyarrow as pa

    kinds = {type(value) for value in values if value is not None}
    if len(kinds) < 2:
        return pa.array(values)
    columns = [pa.array([value for value in values if type(value) is kind]) for kind in kinds]
    common = _common_type({column.type for column in columns}, columns)
    if common == pa.string():
        return pa.array([None if value is None else pa.scalar(value).cast(common).as_py() for value in values])
    convert = int if common == pa.int64() else float
    return pa.array([None if value is None else convert(value) for value in values], common)


def plain_value(value: object) -> Plain:
    """Convert a record's field to an attribute value; NaN, lists and objects become None.

    Integers beyond int64 become texts, because floats would change them. Texts are cut at 1,000 characters.
    Values of other types, such as decimals, become texts.
    """
    if isinstance(value, np.generic):  # such as the score of a filter's classifier
        # The shortest decimal number, as of an input file: 0.7, not 0.699999988.
        value = float(str(value)) if isinstance(value, np.floating) else value.item()
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    if value is None or isinstance(value, list | dict) or value != value:
        return None
    if isinstance(value, bool | float) or (isinstance(value, int) and -(2**63) <= value < 2**63):
        return value
    # Encoding and decoding replaces lone surrogates, which Arrow refuses.
    return str(value)[:_LONGEST_TEXT_CHARACTERS].encode(errors="replace").decode()


def _common_type(types: "set[pa.DataType]", columns: "Iterable[pa.ChunkedArray]") -> "pa.DataType":
    """Return the type of a column whose chunks have these types: texts for a mixture, except of integers and floats.

    That mixture becomes integers if all floats are whole numbers, such as ids that pandas wrote as floats; else floats
    if the conversion changes no integer; else texts. Only then are the `columns`, the values of all chunks, read.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    types = types - {pa.null()}
    if len(types) < 2:
        return next(iter(types), pa.null())
    if types != {pa.int64(), pa.float64()}:
        return pa.string()
    are_whole = are_exact = True
    for column in columns:
        extremes = pc.min_max(column).as_py()
        # Up to this size, integers and floats are converted into each other without a change.
        is_small = all(value is None or abs(value) <= 2**53 for value in extremes.values())
        if column.type == pa.int64():
            are_exact &= is_small
        elif column.type == pa.float64():
            are_whole &= is_small and pc.all(pc.equal(pc.floor(column), column)).as_py() is not False
    if are_whole:
        return pa.int64()
    return pa.float64() if are_exact else pa.string()
