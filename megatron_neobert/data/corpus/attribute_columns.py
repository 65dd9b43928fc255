"""Columns of document attributes: writing the columns of one chunk, and joining those of all chunks.

An attribute value is a number, a text or a truth value; lists and objects become missing values. A column has one type:
integers, floats, truth values or texts. If the values of a record key have several types, all become texts.
"""

import keyword
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pyarrow as pa

Plain = bool | int | float | str | None
# Attributes that need no column, and their types; see attributes.py.
DERIVED = {"length": "a number", "input": "a text"}
# Documents per row group.
_ROW_GROUP = 1 << 17
# Longer texts are truncated.
_LONGEST_TEXT_CHARACTERS = 1000


def attribute_name(key: str) -> str:
    """Return the attribute name of a record key: characters other than ASCII letters, digits and _ become _.

    Keywords of Python, `length` and `input` get a trailing _, because they have another meaning in expressions.
    """
    name = re.sub(r"\W", "_", key, flags=re.ASCII)
    return f"{name}_" if keyword.iskeyword(name) or name in DERIVED else name


def check_record_keys(keys: Sequence[str]) -> Iterator[str]:
    """Yield an error message for each key whose attribute name is no identifier, or is the name of another key, too."""
    names = [attribute_name(key) for key in keys]
    for key, name in zip(keys, names, strict=True):
        if not name.isidentifier() or names.count(name) > 1:
            yield (
                f"--record-key {key} would be the attribute '{name}', but attribute names must be unique and begin "
                "with a letter or _. Rename the field, or leave it out"
            )


def pack_columns(columns: Mapping[str, Sequence[object]]) -> bytes:
    """Return the attributes of a chunk as the bytes of an Arrow IPC file.

    Args:
        columns: For each record key, one value per document of the chunk. None stands for a missing value.
    """
    import pyarrow as pa

    table = pa.table({attribute_name(key): _to_array(list(map(plain_value, v))) for key, v in columns.items()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def join_columns(path: Path, chunks: Sequence[Path], is_chosen: NDArray[np.bool_] | None) -> None:
    """Write a Parquet file with the attributes of the chosen documents, in the order of the chunks.

    Args:
        path: The file to write, replaced if it exists.
        chunks: Files with the content of `pack_columns`.
        is_chosen: One value per document of all chunks, True to keep its row; None keeps all rows.
    """
    import pyarrow as pa

    types: dict[str, pa.DataType] = {}
    for chunk in chunks:
        # pyarrow refuses paths that are not valid UTF-8, so it gets an open file.
        with chunk.open("rb") as source:
            for field in pa.ipc.open_file(source).schema:
                types[field.name] = _common_type(types.get(field.name, pa.null()), field.type)
    schema = pa.schema(list(types.items()))

    def read_chunks() -> "Iterator[pa.Table]":
        first = 0
        for chunk in chunks:
            with chunk.open("rb") as source:
                table = pa.ipc.open_file(source).read_all()
            first, begin = first + len(table), first
            if is_chosen is not None:
                table = table.filter(pa.array(is_chosen[begin:first]))
            yield table.cast(schema, safe=False)

    write_columns(path, schema, read_chunks())


def write_columns(path: Path, schema: "pa.Schema", tables: "Iterable[pa.Table]") -> None:
    """Write the rows of all tables as a Parquet file, in row groups of 2^17 documents. An existing file is replaced."""
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


def _to_array(values: Sequence[Plain]) -> "pa.Array":
    """Return values as a column. Integers among floats become floats; any other mixture of types becomes texts."""
    import pyarrow as pa

    kinds = {type(value) for value in values if value is not None}
    if kinds == {int, float}:
        values = [None if value is None else float(value) for value in values]
    elif len(kinds) > 1:
        values = [None if value is None else pa.scalar(value).cast(pa.string()).as_py() for value in values]
    return pa.array(values)


def plain_value(value: object) -> Plain:
    """Return a field of a record as an attribute value; NaN, lists and objects become None.

    Integers beyond 64 bits become floats, or texts from 10^308 on. Texts are cut at 1,000 characters. Values of other
    types, such as decimals, become texts.
    """
    if isinstance(value, np.generic):  # such as the score of a filter's classifier
        value = value.item()
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    if value is None or isinstance(value, list | dict) or value != value:
        return None
    if isinstance(value, bool | float):
        return value
    if isinstance(value, int) and abs(value) < 10**308:
        return value if -(2**63) <= value < 2**63 else float(value)
    # Encoding and decoding replaces lone surrogates, which Arrow refuses.
    return str(value)[:_LONGEST_TEXT_CHARACTERS].encode(errors="replace").decode()


def _common_type(first: "pa.DataType", second: "pa.DataType") -> "pa.DataType":
    """Return the type for both: the same one, the other if one is null, float64 for int64 and float64, else string."""
    import pyarrow as pa

    if first == second or pa.types.is_null(second):
        return first
    if pa.types.is_null(first):
        return second
    are_numbers = {str(first), str(second)} == {"int64", "double"}
    return pa.float64() if are_numbers else pa.string()
