"""Recognise the format of an input file by its content, cut the file into chunks, and read the records of a chunk.

The first bytes determine the compression, and the first decompressed bytes the format. The file name is used only if
the content is ambiguous. Files that could only be read as malformed lines or as text that is not language (HTML, CSV,
zip, a JSON array) are refused with a message that says how to convert them.
"""

import json
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import PurePosixPath

from megatron_neobert.data.inputs.input_reader import (
    BYTE_ORDER_MARK,
    Chunk,
    DamagedStream,
    Format,
    InputReader,
    compression_of,
    named_errors,
    open_input,
)
from megatron_neobert.data.inputs.records import ReadSettings, RecordBatch
from megatron_neobert.data.inputs.text_files import find_cuts, read_lines, read_text
from megatron_neobert.data.inputs.web_archives import read_archive
from megatron_neobert.errors import DataError
from megatron_neobert.text import parse_json

_READERS = {"jsonl": read_lines, "text": read_text, "warc": read_archive}  # and read_column for tables

CHUNK_BYTES = 256 << 20  # text in one chunk: about one minute of work for the reference tokenizer

_HEAD_BYTES = 64 << 10  # bytes that determine the format
_FORMAT_MAGIC: dict[bytes, Format] = {
    b"PAR1": "parquet",
    b"ARROW1": "arrow",
    b"\xff\xff\xff\xff": "arrow",  # the stream format, which `datasets` writes
    b"WARC/": "warc",
}
_MARKUP = re.compile(rb"<(!doctype\s+html|html|head|body)\b|<\?xml\b", re.IGNORECASE)
# Formats whose content looks like plain text.
_REFUSED_NAMES = {
    (".csv", ".tsv"): ("a CSV or TSV table", "write it again as parquet or JSON lines"),
    (".htm", ".html", ".xhtml", ".xml"): (
        "an HTML or XML page",
        "extract its text; neobert preprocess --input-format text reads it unchanged",
    ),
}
# Files of these formats have a header even without records. An empty file is the result of a failed transfer.
_NEVER_EMPTY = (".parquet", ".arrow", ".feather", ".gz", ".zst", ".bz2", ".xz")
_COMPRESSED_NAME = re.compile(r"\.(gz|zst|bz2|xz)$")
_REFUSED_CONTENT = {
    b"filedesc://": ("an ARC archive", "convert it to WARC"),
    b"%PDF-": ("a PDF document", "extract its text"),
}
_SUPPORTED = "supported formats are parquet, Arrow, JSON lines, plain text in UTF-8 and WARC"
_CONTROL = re.compile(r"[\0-\x08\x0e-\x1a\x1c-\x1f]")  # without white space and escape, which occur in texts
# Largest share of invalid UTF-8 and control characters in a text. Text in another encoding has more.
_LARGEST_INVALID_SHARE = 0.1


def split_into_chunks(path: str, settings: ReadSettings, *, chunk_bytes: int = CHUNK_BYTES) -> list[Chunk]:
    """Return the chunks of an input file in order, each with about `chunk_bytes` of text.

    Only Parquet files and uncompressed files of lines are divided into several chunks.
    """
    whole = recognise(path, settings)
    cuts: list[int] = []  # in units of Chunk.start
    has_lines = whole.format == "jsonl" or (whole.format == "text" and settings.text_separator == "\n")
    if whole.format in ("parquet", "arrow"):
        from megatron_neobert.data.inputs.tables import find_row_cuts  # see read_chunk

        cuts = find_row_cuts(whole, settings, chunk_bytes=chunk_bytes)
    elif whole.compression is None and has_lines:
        cuts = find_cuts(path, chunk_bytes=chunk_bytes)
    edges = [0, *cuts, None]
    return [Chunk(path, whole.format, whole.compression, start or 0, end) for start, end in pairwise(edges)]


def read_chunk(chunk: Chunk, settings: ReadSettings) -> Iterator[RecordBatch]:
    """Yield batches of the records of a chunk, in file order. Malformed records are in the `rejected` of their batch.

    If the file is damaged, yield the batches before the damage, then raise DataError.
    """
    numbers, reader = 0, _READERS.get(chunk.format)
    if reader is None:
        # pyarrow takes 0.2 s to import, which --help and runs without tables avoid.
        from megatron_neobert.data.inputs import tables

        reader = tables.read_column
    try:
        for batch in reader(chunk, settings):
            numbers += batch.numbers
            yield batch
    except DamagedStream as damage:
        stream = f"{chunk.compression} stream" if chunk.compression else f"{chunk.format} file"
        position = f"{chunk.unit} {numbers}" if numbers else "the beginning"
        raise DataError(
            f"{chunk.path}: the {stream} is truncated or damaged after {position} ({damage}); "
            "how many documents are lost is unknown: fetch the file again, or leave it out"
        ) from damage


def recognise(path: str, settings: ReadSettings) -> Chunk:
    """Return the whole input file as one chunk, with its format and compression.

    Raise DataError if the format is not supported or contradicts --input-format, or if the first bytes are damaged.
    """
    with named_errors(path), open_input(path) as file:
        head = file.read(_HEAD_BYTES)
    if not head and PurePosixPath(path).suffix.lower() in _NEVER_EMPTY:
        raise DataError(f"{path} is empty, but files of this format have a header; fetch it again, or leave it out")
    compression = compression_of(head)
    if compression is not None:
        with InputReader(Chunk(path, "text", compression)) as stream:
            try:
                head = stream.read(_HEAD_BYTES)
            except DamagedStream as damage:
                raise DataError(
                    f"{path}: the {compression} stream is truncated or damaged in the first 64 KiB of content "
                    f"({damage}); fetch the file again, or leave it out"
                ) from damage
        if compression_of(head) is not None:
            raise DataError(f"{path} is compressed twice; {_SUPPORTED}: decompress it once")
    magic_format = next((name for magic, name in _FORMAT_MAGIC.items() if head.startswith(magic)), None)
    file_format: Format
    if settings.input_format == "auto":
        file_format = magic_format or _format_of_text(path, compression, head)
    else:
        file_format = settings.input_format
        # A table or archive without its magic bytes can only be the wrong --input-format.
        if head and file_format in _FORMAT_MAGIC.values() and file_format != magic_format:
            raise DataError(
                f"{path} has no {file_format} header, but --input-format is {file_format}; leave --input-format out"
            )
    if compression is not None and file_format in ("parquet", "arrow"):
        raise DataError(f"{path} is a {compression}-compressed {file_format} file; decompress it")
    return Chunk(path, file_format, compression)


def _format_of_text(path: str, compression: str | None, head: bytes) -> Format:
    """Return "jsonl" or "text", the format of a file without the magic bytes of a table or web archive.

    `head` holds the first _HEAD_BYTES of the decompressed file. If `head` is ambiguous, the ending of `path`, such as
    .jsonl or .csv, decides. Raise DataError for binary content, a PDF, markup, a CSV table, and JSON whose objects span
    lines.
    """
    for magic, (kind, remedy) in _REFUSED_CONTENT.items():
        if head.startswith(magic):
            raise DataError(f"{path} is {kind}; {_SUPPORTED}: {remedy}")
    content = head.removeprefix(BYTE_ORDER_MARK).lstrip()
    if not content:
        return "jsonl"  # without records
    lines = content.splitlines()
    first_line_is_cut = len(lines) == 1 and len(head) == _HEAD_BYTES
    if _is_object(lines[0]) or (first_line_is_cut and re.match(rb'\{\s*"', content)):
        return "jsonl"
    is_array = re.match(rb"\[\s*[{\]]", content) is not None
    try:
        begins_with_object = isinstance(json.JSONDecoder().raw_decode(content.decode(errors="replace"))[0], dict)
    except (ValueError, RecursionError):  # thousands of nested brackets raise RecursionError
        begins_with_object = False
    if is_array or begins_with_object:
        kind, query = ("an array of JSON objects", "'.[]'") if is_array else ("JSON whose objects span lines", ".")
        name, output = shlex.quote(path), shlex.quote(f"{path}.jsonl")
        command = f"{compression} -dc {name} | jq -c {query}" if compression else f"jq -c {query} {name}"
        raise DataError(f"{path} is {kind}; {_SUPPORTED}: convert it with {command} > {output}")
    has_objects = any(map(_is_object, lines))
    # The head may end within a character, which has at most four bytes.
    text = (head[:-3] if len(head) == _HEAD_BYTES else head).decode(errors="replace")
    invalid = text.count("\ufffd") + len(_CONTROL.findall(text))
    if "\0" in text or (invalid > _LARGEST_INVALID_SHARE * len(text) and not has_objects):
        raise DataError(
            f"{path} is neither a supported format nor UTF-8 text ({invalid:,} of its first {len(text):,} characters "
            f"are invalid); {_SUPPORTED}: convert it (other encodings: iconv -t UTF-8), or leave it out"
        )
    name = _COMPRESSED_NAME.sub("", PurePosixPath(path).name.lower())
    is_page = _MARKUP.match(content) is not None
    if re.search(r"\.(jsonl|ndjson|json)", name) or (has_objects and not is_page):
        return "jsonl"
    for endings, (kind, remedy) in _REFUSED_NAMES.items():
        if name.endswith(endings) or (is_page and ".html" in endings):
            raise DataError(f"{path} is {kind}; {_SUPPORTED}: {remedy}")
    return "text"


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(parse_json(line.decode(errors="replace")), dict)
    except ValueError:
        return False
