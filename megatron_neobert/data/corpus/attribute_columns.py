"""The columns of document attributes: those of a chunk, and of a corpus, which joins the columns of its chunks.

A value is a number, a text, or true or false; lists and objects become missing values. A column has one type: whole
numbers, numbers, truth values, or texts. If a key has values of several types, all of them become texts.
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

Plain = bool | int | float | str | None  # a value as it is kept
DERIVED = ("length", "input")  # attributes that need no column
_ROW_GROUP = 1 << 17  # documents
_LONGEST_TEXT = 1000  # characters of a text that are kept


def attribute_name(key: str) -> str:
    """Return the name that an expression has for a record key: what is no letter, digit or _ becomes _.

    A keyword of Python, `length` and `input` get another _ at the end.
    """
    name = re.sub(r"\W", "_", key, flags=re.ASCII)
    return f"{name}_" if keyword.iskeyword(name) or name in DERIVED else name


def check_record_keys(keys: Sequence[str]) -> Iterator[str]:
    """Yield a message for each record key whose attribute no expression could name."""
    names = [attribute_name(key) for key in keys]
    for key, name in zip(keys, names, strict=True):
        if not name.isidentifier() or names.count(name) > 1:
            yield (
                f"--record-key {key} would be the attribute '{name}'; attributes need names of their own that begin "
                "with a letter or _. Rename the field, or leave it out"
            )


def pack_columns(columns: Mapping[str, Sequence[object]]) -> bytes:
    """Return the columns of a chunk as an Arrow file, by record key; each has a value or None for each document."""
    import pyarrow as pa

    table = pa.table({attribute_name(key): _typed([*map(plain_value, values)]) for key, values in columns.items()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def join_columns(path: Path, chunks: Sequence[Path], chosen: Iterable[NDArray[np.bool_]]) -> None:
    """Write PREFIX.attributes.parquet: the rows of all chunks, files of `pack_columns`, that are True in `chosen`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    types: dict[str, pa.DataType] = {}
    for chunk in chunks:
        with chunk.open("rb") as source:  # pyarrow takes no path that is not UTF-8
            for field in pa.ipc.open_file(source).schema:
                types[field.name] = _common_type(types.get(field.name, pa.null()), field.type)
    schema = pa.schema(list(types.items()))
    with (
        path.open("wb") as file,
        pq.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True) as writer,
    ):
        held = schema.empty_table()
        for chunk, is_chosen in zip(chunks, chosen, strict=True):
            with chunk.open("rb") as source:
                table = pa.ipc.open_file(source).read_all().filter(pa.array(is_chosen))
            held = pa.concat_tables([held, table.cast(schema, safe=False)])
            whole = len(held) - len(held) % _ROW_GROUP
            if whole:
                writer.write_table(held[:whole].combine_chunks(), _ROW_GROUP)
            held = held[whole:]
        if len(held):
            writer.write_table(held.combine_chunks(), _ROW_GROUP)


def _typed(values: Sequence[Plain]) -> "pa.Array":
    """Return values as a column; values of several types become texts, as Arrow casts them."""
    import pyarrow as pa

    kinds = {type(value) for value in values if value is not None}
    if kinds == {int, float}:
        values = [None if value is None else float(value) for value in values]
    elif len(kinds) > 1:
        values = [None if value is None else pa.scalar(value).cast(pa.string()).as_py() for value in values]
    return pa.array(values)


def plain_value(value: object) -> Plain:
    """Return a field of a record as it is kept: NaN, lists and objects become None."""
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    if value is None or isinstance(value, list | dict) or value != value:
        return None
    if isinstance(value, bool | float):
        return value
    if isinstance(value, int) and abs(value) < 10**308:
        return value if -(2**63) <= value < 2**63 else float(value)
    return str(value)[:_LONGEST_TEXT].encode(errors="replace").decode()  # no lone surrogates


def _common_type(one: "pa.DataType", other: "pa.DataType") -> "pa.DataType":
    import pyarrow as pa

    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    are_numbers = {str(one), str(other)} == {"int64", "double"}
    return pa.float64() if are_numbers else pa.string()
