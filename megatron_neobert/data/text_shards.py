"""Documents out of raw shards: parquet and JSON lines, plain or gzip-compressed.

A format is recognised by the first bytes of the file, never by its name. Reading streams: memory follows the longest
document, not the shard. Every record is either a Document or a Rejected with its reason and position, so nothing is
lost silently; damage that hides an unknown number of records (a truncated stream, a broken parquet page) is a
DataError instead. A further format is one more signature, one more reading function, one more branch in `read_part`.
"""

import glob
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_neobert.errors import DataError, MissingInputError

if TYPE_CHECKING:
    import pyarrow.parquet

MALFORMED_JSON = "malformed JSON"
MISSING_KEY = "missing key"
NULL_TEXT = "null text"
NOT_A_STRING = "text is not a string"
EMPTY_TEXT = "empty text"

# Shards above this size are read in several parts, so that one huge file occupies all workers.
PART_BYTES = 512 << 20

_UTF8_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_PARQUET_MAGIC = b"PAR1"
_GZIP_MAGIC = b"\x1f\x8b"
_UNREADABLE_MAGIC = {  # would otherwise be reported as a flood of malformed JSON lines
    b"\x28\xb5\x2f\xfd": ("zstd-compressed", "decompress it (zstd -d)"),
    b"BZh": ("bzip2-compressed", "decompress it (bunzip2)"),
    b"\xfd7zXZ\x00": ("xz-compressed", "decompress it (unxz)"),
    b"PK\x03\x04": ("a zip archive", "unpack it"),
    b"\xff\xfe": ("UTF-16 text", "convert it (iconv -f UTF-16 -t UTF-8)"),
    b"\xfe\xff": ("UTF-16 text", "convert it (iconv -f UTF-16 -t UTF-8)"),
}
_BUFFER_BYTES = 1 << 20
_PARQUET_ROWS = 64  # rows decoded at a time, about 300 kB of web text; larger batches are not faster
_SURROGATE = re.compile("[\ud800-\udfff]")


class Document(NamedTuple):
    """One text. `position` is "line 17" (from 1, as editors count) or "row 16" (from 0, as pyarrow counts)."""

    text: str
    position: str
    utf8_bytes: int
    repaired: bool  # invalid UTF-8 or lone surrogates became U+FFFD


class Rejected(NamedTuple):
    """One record without a usable text; `reason` is one of the constants above, `detail` what was found."""

    reason: str
    position: str
    detail: str


@dataclass(frozen=True)
class ShardPart:
    """What one worker reads from beginning to end: a whole shard, or some row groups of a large parquet shard."""

    path: Path
    format: str
    row_groups: tuple[int, int] | None = None  # [first, end) of a parquet shard; None: all of it

    @property
    def starts_shard(self) -> bool:
        return self.row_groups is None or self.row_groups[0] == 0


def find_shards(patterns: Sequence[str]) -> list[Path]:
    """Files named by paths, globs (`**` descends) and folders, in the order given, each glob and folder sorted.

    A folder gives all files below it except hidden ones and those that start with an underscore (`_SUCCESS`). A file
    that several patterns name is read once.

    Raises:
        MissingInputError: A pattern matches no file.
    """
    shards: dict[Path, None] = {}
    for pattern in patterns:
        matches = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207  (Path.glob refuses absolute patterns)
        files = [file for match in matches for file in _files_of(Path(match))]
        if not files:
            raise MissingInputError(f"--input {pattern}: no file matches; check the path, and quote globs in scripts")
        shards.update(dict.fromkeys(files))
    return list(shards)


def _files_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    below = (file for file in path.rglob("*") if file.is_file())
    return sorted(file for file in below if not any(part[0] in "._" for part in file.relative_to(path).parts))


def recognise_format(path: Path) -> str:
    """ "parquet", "gzip" (JSON lines inside) or "jsonl", from the first bytes.

    Raises:
        DataError: The bytes belong to a format that is not read here.
    """
    with path.open("rb") as stream:
        head = stream.read(8)
    if head.startswith(_PARQUET_MAGIC):
        return "parquet"
    if head.startswith(_GZIP_MAGIC):
        return "gzip"
    for magic, (name, remedy) in _UNREADABLE_MAGIC.items():
        if head.startswith(magic):
            raise DataError(f"{path} is {name}; shards are parquet, or JSON lines in UTF-8, plain or gzip: {remedy}")
    return "jsonl"


def split_into_parts(path: Path, *, part_bytes: int = PART_BYTES) -> list[ShardPart]:
    """The parts of one shard in order. Only parquet shards above `part_bytes` (compressed) have more than one."""
    shard_format = recognise_format(path)
    if shard_format != "parquet" or path.stat().st_size <= part_bytes:
        return [ShardPart(path, shard_format)]
    with _open_parquet(path) as shard:
        sizes = [_compressed_bytes(shard.metadata.row_group(group)) for group in range(shard.num_row_groups)]
    parts, first, taken = [], 0, 0
    for group, size in enumerate(sizes):
        if taken and taken + size > part_bytes:
            parts.append(ShardPart(path, shard_format, (first, group)))
            first, taken = group, 0
        taken += size
    return [*parts, ShardPart(path, shard_format, (first, len(sizes)))]


def _compressed_bytes(row_group: Any) -> int:
    return sum(row_group.column(column).total_compressed_size for column in range(row_group.num_columns))


def check_text_key(part: ShardPart, *, text_key: str) -> None:
    """Fails early where the schema alone shows that the part has no text; JSON lines have no schema.

    Raises:
        DataError: The parquet column is missing or holds something else than strings.
    """
    if part.format == "parquet":
        with _open_parquet(part.path) as shard:
            _check_text_column(part.path, shard, text_key)


def read_part(part: ShardPart, *, text_key: str) -> Iterator[Document | Rejected]:
    """Documents and rejected records of one part, in order.

    Raises:
        DataError: The shard is damaged, or a parquet shard has no text column of that name.
    """
    if part.format == "parquet":
        return _read_parquet(part, text_key)
    if part.format == "gzip":
        return _read_gzip(part.path, text_key)
    return _read_jsonl(part.path, text_key)


def _read_jsonl(path: Path, text_key: str) -> Iterator[Document | Rejected]:
    with path.open("rb", buffering=_BUFFER_BYTES) as stream:
        yield from _read_json_lines(stream, text_key)


def _read_gzip(path: Path, text_key: str) -> Iterator[Document | Rejected]:
    position = "the beginning"
    try:
        with gzip.open(path, "rb") as packed, io.BufferedReader(packed, _BUFFER_BYTES) as stream:
            for record in _read_json_lines(stream, text_key):
                yield record
                position = record.position
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path}: the gzip stream breaks off or is damaged after {position} ({error}); "
            "how many documents are lost is unknown: fetch the shard again, or leave it out"
        ) from error


def _read_json_lines(stream: Iterable[bytes], text_key: str) -> Iterator[Document | Rejected]:
    for number, line in enumerate(stream, start=1):
        if number == 1:
            line = line.removeprefix(_UTF8_BYTE_ORDER_MARK)
        if line and not line.isspace():
            yield _read_json_line(line.removesuffix(b"\n"), f"line {number}", text_key)


def _read_json_line(line: bytes, position: str, text_key: str) -> Document | Rejected:
    decoded, repaired = _decode(line)
    try:
        record = json.loads(decoded)
    except json.JSONDecodeError as error:
        return Rejected(MALFORMED_JSON, position, f"column {error.colno}: {error.msg}")
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; thousands of nested brackets
        return Rejected(MALFORMED_JSON, position, str(error))
    if not isinstance(record, dict):
        return Rejected(MALFORMED_JSON, position, f"expected an object, found {type(record).__name__}")
    if text_key not in record:
        found = ", ".join(sorted(record)[:10]) or "none"
        return Rejected(MISSING_KEY, position, f"no key '{text_key}'; keys found: {found}")
    return _to_document(record[text_key], position, repaired=repaired)


def _read_parquet(part: ShardPart, text_key: str) -> Iterator[Document | Rejected]:
    with _open_parquet(part.path) as shard:
        _check_text_column(part.path, shard, text_key)
        first, end = part.row_groups or (0, shard.num_row_groups)
        row = sum(shard.metadata.row_group(group).num_rows for group in range(first))
        for values in _text_columns(part.path, shard, row_groups=range(first, end), text_key=text_key):
            for value in values:
                text, repaired = (None, False) if value is None else _decode(value)
                yield _to_document(text, f"row {row}", repaired=repaired)
                row += 1


def _text_columns(
    path: Path, shard: "pyarrow.parquet.ParquetFile", *, row_groups: range, text_key: str
) -> Iterator[list[bytes | None]]:
    """The text column, some rows at a time. As bytes: a string column of another writer may hold invalid UTF-8."""
    import pyarrow as pa

    try:
        batches = shard.iter_batches(_PARQUET_ROWS, list(row_groups), columns=[text_key], use_threads=False)
        for batch in batches:
            column = batch.column(0)
            if pa.types.is_dictionary(column.type):
                column = column.dictionary_decode()
            yield column.cast(pa.large_binary()).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise _damaged_parquet(path, error) from error


def _open_parquet(path: Path) -> "pyarrow.parquet.ParquetFile":
    import pyarrow as pa  # here, because runs without parquet shards and --help do without its 0.2 seconds
    import pyarrow.parquet as pq

    try:
        # Both arguments make column chunks stream; by default a whole row group is loaded (313 MB of one: 10 MB so).
        return pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        raise _damaged_parquet(path, error) from error


def _damaged_parquet(path: Path, error: Exception) -> Exception:
    if isinstance(error, OSError) and error.errno is not None:
        return error  # the file system's trouble, not the file's
    return DataError(f"{path}: damaged parquet file ({error}); fetch the shard again, or leave it out")


def _check_text_column(path: Path, shard: "pyarrow.parquet.ParquetFile", text_key: str) -> None:
    import pyarrow as pa

    schema = shard.schema_arrow
    texts = [field.name for field in schema if _holds_text(field.type, pa.types)]
    remedy = f"its text columns: {', '.join(texts) or 'none'}; choose one with --text-key"
    if text_key not in schema.names:
        raise DataError(f"{path} has no column '{text_key}'; {remedy}")
    if text_key not in texts and not pa.types.is_null(schema.field(text_key).type):
        raise DataError(f"{path}: column '{text_key}' holds {schema.field(text_key).type}, not strings; {remedy}")


def _holds_text(arrow_type: Any, types: Any) -> bool:
    if types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    tests: list[Callable[[Any], bool]] = [types.is_string, types.is_large_string, types.is_string_view]
    tests += [types.is_binary, types.is_large_binary, types.is_binary_view]
    return any(test(arrow_type) for test in tests)


def _decode(raw: bytes) -> tuple[str, bool]:
    try:
        return raw.decode(), False
    except UnicodeDecodeError:
        return raw.decode(errors="replace"), True


def _to_document(value: object, position: str, *, repaired: bool) -> Document | Rejected:
    if value is None:
        return Rejected(NULL_TEXT, position, "null")
    if not isinstance(value, str):
        return Rejected(NOT_A_STRING, position, f"found {type(value).__name__}")
    if not value or value.isspace():
        return Rejected(EMPTY_TEXT, position, f"{len(value)} characters of white space")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        value, repaired = _SURROGATE.sub("\ufffd", value), True
        size = len(value.encode())
    return Document(value, position, size, repaired)
