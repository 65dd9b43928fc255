"""Recognise the format of an input file by its content, cut the file into chunks, and read the records of a chunk.

The first bytes show the compression, and the decompressed bytes the format. The file name decides only where the
content is ambiguous. A file that would only parse as malformed lines or as a text of rubbish (HTML, CSV, zip, a JSON
array) is refused; the message names a way to convert it. A further format is one more reader in the table below.
"""

import json
import re
import shlex
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import PurePosixPath

from megatron_neobert.data.inputs.records import ReadSettings, RecordBatch
from megatron_neobert.data.inputs.stream import (
    BYTE_ORDER_MARK,
    Chunk,
    ChunkStream,
    DamagedStream,
    Format,
    InputDigest,
    compression_of,
    named_errors,
    open_input,
)
from megatron_neobert.data.inputs.tables import find_row_cuts, read_column
from megatron_neobert.data.inputs.text_files import find_cuts, read_lines, read_text
from megatron_neobert.data.inputs.web_archives import read_archive
from megatron_neobert.errors import DataError
from megatron_neobert.text import parse_json

CHUNK_BYTES = 256 << 20  # of text in a chunk: about a minute for the reference tokenizer

_STREAMED: dict[Format, Callable[[Chunk, ReadSettings, InputDigest | None], Iterator[RecordBatch]]] = {
    "jsonl": read_lines,
    "text": read_text,
    "warc": read_archive,
}

_HEAD_BYTES = 64 << 10  # by which a format is recognised
_FORMAT_MAGIC: dict[bytes, Format] = {
    b"PAR1": "parquet",
    b"ARROW1": "arrow",
    b"\xff\xff\xff\xff": "arrow",  # a stream, as the `datasets` library saves it
    b"WARC/": "warc",
}
_MARKUP = re.compile(rb"<(!doctype\s+html|html|head|body)\b|<\?xml\b", re.IGNORECASE)
_REFUSED_CONTENT = {
    b"filedesc://": ("an ARC archive", "convert it to WARC"),
    b"%PDF-": ("a PDF document", "extract its text"),
}
_REFUSED_NAMES = {  # what cannot be told from plain text by its content
    (".csv", ".tsv"): ("a CSV or TSV table", "write it again as parquet or JSON lines"),
    (".htm", ".html", ".xhtml", ".xml"): (
        "an HTML or XML page",
        "extract its text (or take it as it is: --input-format text)",
    ),
}
# No file of these formats is empty, not even one without records: it is what a transfer that broke off has left.
_NEVER_EMPTY = (".parquet", ".arrow", ".feather", ".gz", ".zst", ".bz2", ".xz")
_COMPRESSED_NAME = re.compile(r"\.(gz|zst|bz2|xz)$")
_READ_HERE = "input files are parquet, Arrow, JSON lines, plain text in UTF-8 or WARC"
_CONTROL = re.compile(r"[\0-\x08\x0e-\x1a\x1c-\x1f]")  # white space and escape occur in texts
_JUNK_SHARE = 0.1  # of the first characters that are no UTF-8 or control codes; a text of another encoding has more


def split_into_chunks(path: str, settings: ReadSettings, *, chunk_bytes: int = CHUNK_BYTES) -> list[Chunk]:
    """Return the chunks of an input file in order, about `chunk_bytes` of text each where the format can be cut.

    Raises:
        DataError: The format is not supported, the file is damaged, or it has no text column of that name.
        ConfigError: The file has no column for a --record-key.
    """
    whole = recognise(path, settings)
    cuts: list[int] = []  # rows of a table, bytes of uncompressed lines
    has_lines = whole.format == "jsonl" or (whole.format == "text" and settings.text_separator == "\n")
    if whole.format in ("parquet", "arrow"):
        cuts = find_row_cuts(whole, settings, chunk_bytes=chunk_bytes)
    elif whole.compression is None and has_lines:
        cuts = find_cuts(path, chunk_bytes=chunk_bytes)
    edges = [0, *cuts, None]
    return [Chunk(path, whole.format, whole.compression, start or 0, end) for start, end in pairwise(edges)]


def read_chunk(chunk: Chunk, settings: ReadSettings, digest: InputDigest | None = None) -> Iterator[RecordBatch]:
    """Read all records of a chunk, in order. Raise DataError if the file is damaged or has no text column of that name.

    `digest` receives the bytes if they are read in order; of a table, only some columns are read.
    """
    numbers = 0
    try:
        read = _STREAMED.get(chunk.format)
        for batch in read(chunk, settings, digest) if read else read_column(chunk, settings):
            numbers += batch.numbers
            yield batch
    except DamagedStream as damage:
        stream = f"{chunk.compression} stream" if chunk.compression else f"{chunk.format} file"
        position = f"{chunk.unit} {numbers}" if numbers else "the beginning"
        raise DataError(
            f"{chunk.path}: the {stream} breaks off or is damaged after {position} ({damage}); "
            "how many documents are lost is unknown: fetch the file again, or leave it out"
        ) from damage


def recognise(path: str, settings: ReadSettings) -> Chunk:
    """Return a whole input file as one chunk. Raise DataError if its bytes belong to a format that is not read here."""
    with named_errors(path), open_input(path) as file:
        head = file.read(_HEAD_BYTES)
    if not head and PurePosixPath(path).suffix.lower() in _NEVER_EMPTY:
        raise DataError(f"{path} is empty, which no file of this kind is; fetch the file again, or leave it out")
    compression = compression_of(head)
    if compression is not None:
        with ChunkStream(Chunk(path, "text", compression)) as stream:
            try:
                head = stream.read(_HEAD_BYTES)
            except DamagedStream as damage:
                raise DataError(
                    f"{path}: the {compression} stream is damaged from its beginning ({damage}); "
                    "fetch the file again, or leave it out"
                ) from damage
        if compression_of(head) is not None:
            raise DataError(f"{path} is compressed twice; {_READ_HERE}: decompress it once")
    # Tables and archives show by their first bytes what they are; asking for another format is a mistake.
    table = next((name for magic, name in _FORMAT_MAGIC.items() if head.startswith(magic)), None)
    file_format: Format
    if settings.input_format == "auto":
        file_format = table or _format_of_text(path, compression, head)
    else:
        file_format = settings.input_format
        if head and file_format in _FORMAT_MAGIC.values() and file_format != table:
            raise DataError(
                f"{path} does not begin like {file_format}, which --input-format asks for; leave --input-format out"
            )
    if compression is not None and file_format in ("parquet", "arrow"):
        raise DataError(f"{path} is a {compression}-compressed {file_format} file, which has to be decompressed")
    return Chunk(path, file_format, compression)


def _format_of_text(path: str, compression: str | None, head: bytes) -> Format:
    """Tell JSON lines from plain text. Raise DataError for JSON that spans lines, and for what is neither."""
    for magic, (kind, remedy) in _REFUSED_CONTENT.items():
        if head.startswith(magic):
            raise DataError(f"{path} is {kind}; {_READ_HERE}: {remedy}")
    content = head.removeprefix(BYTE_ORDER_MARK).lstrip()
    if not content:
        return "jsonl"  # without a record
    if re.match(rb"\[\s*[{\]]", content):
        raise _spans_lines(path, compression, "an array of JSON objects", "'.[]'")
    lines = content.splitlines()
    first_is_cut = len(lines) == 1 and len(head) == _HEAD_BYTES
    if _is_object(lines[0]) or (first_is_cut and re.match(rb'\{\s*"', content)):
        return "jsonl"
    if _begins_with_object(content):
        raise _spans_lines(path, compression, "JSON whose objects span lines", ".")
    has_objects = any(map(_is_object, lines))
    if b"\0" in head or not has_objects:
        _refuse_junk(path, head)
    name = _COMPRESSED_NAME.sub("", PurePosixPath(path).name.lower())
    is_page = _MARKUP.match(content) is not None
    if re.search(r"\.(jsonl|ndjson|json)", name) or (has_objects and not is_page):
        return "jsonl"
    for endings, (kind, remedy) in _REFUSED_NAMES.items():
        if name.endswith(endings) or (is_page and ".html" in endings):
            raise DataError(f"{path} is {kind}; {_READ_HERE}: {remedy}")
    return "text"


def _spans_lines(path: str, compression: str | None, kind: str, query: str) -> DataError:
    name = shlex.quote(path)
    command = f"{compression} -dc {name} | jq -c {query}" if compression else f"jq -c {query} {name}"
    return DataError(f"{path} is {kind}; {_READ_HERE}: convert it with {command} > {shlex.quote(path + '.jsonl')}")


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(parse_json(line.decode(errors="replace")), dict)
    except ValueError:
        return False


def _begins_with_object(content: bytes) -> bool:
    try:
        return isinstance(json.JSONDecoder().raw_decode(content.decode(errors="replace"))[0], dict)
    except (ValueError, RecursionError):  # RecursionError: thousands of nested brackets
        return False


def _refuse_junk(path: str, head: bytes) -> None:
    text = head[:-3].decode(errors="replace") if len(head) == _HEAD_BYTES else head.decode(errors="replace")
    junk = text.count("\ufffd") + len(_CONTROL.findall(text))
    if "\0" in text or junk > _JUNK_SHARE * len(text):
        raise DataError(
            f"{path} is neither a format that is read here nor UTF-8 text ({junk:,} of its first {len(text):,} "
            f"characters are none); {_READ_HERE}: convert it (other encodings: iconv -t UTF-8), or leave it out"
        )
