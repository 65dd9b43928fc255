"""The format of a shard, from its first bytes: first the compression, then what the decompressed bytes look like.

The name counts only where the content leaves a doubt. What would be read as a flood of malformed lines or as a text of
rubbish is refused with the way to make a shard of it.
"""

import json
import re
from pathlib import PurePosixPath

from megatron_neobert.data.shards.records import Format, ReadSettings, ShardPart
from megatron_neobert.data.shards.streams import DamagedStream, PartStream, compression_of, named_errors, open_shard
from megatron_neobert.data.shards.texts import BYTE_ORDER_MARK
from megatron_neobert.errors import DataError

_HEAD_BYTES = 64 << 10
_FORMAT_MAGIC: dict[bytes, Format] = {
    b"PAR1": "parquet",
    b"ARROW1": "arrow",
    b"\xff\xff\xff\xff": "arrow",  # a stream, as the `datasets` library saves it
    b"WARC/": "warc",
}
_UTF_16 = ("UTF-16 text", "convert it (iconv -f UTF-16 -t UTF-8)")
_UNPACK = "unpack it"
_UNREADABLE_MAGIC = {
    b"\xff\xfe": _UTF_16,
    b"\xfe\xff": _UTF_16,
    b"PK\x03\x04": ("a zip archive", _UNPACK),
    b"7z\xbc\xaf\x27\x1c": ("a 7-zip archive", _UNPACK),
    b"Rar!": ("a rar archive", _UNPACK),
    b"\x04\x22\x4d\x18": ("lz4-compressed", "decompress it (unlz4)"),
    b"\xff\x06\x00\x00sNaPpY": ("snappy-compressed", "decompress it (snzip -d)"),
    b"\x1f\x9d": ("compressed by compress", "decompress it (uncompress)"),
    b"LZIP": ("lzip-compressed", "decompress it (lunzip)"),
    b"FEA1": ("a Feather file of version 1", "write it again as parquet"),
    b"ORC": ("an ORC table", "write it again as parquet"),
    b"Obj\x01": ("an Avro file", "write it again as parquet"),
    b"filedesc://": ("an ARC archive", "convert it to WARC"),
    b"\x89HDF": ("an HDF5 file", "write its texts as parquet"),
    b"SQLite format 3": ("an SQLite database", "write its texts as parquet"),
    b"\x80\x04\x95": ("a pickle", "write its texts as parquet"),
    b"%PDF-": ("a PDF document", "extract its text"),
    b"{\\rtf": ("an RTF document", "extract its text"),
    b"\xd0\xcf\x11\xe0": ("an Office document", "extract its text"),
    b"\x89PNG": ("an image", "leave it out"),
    b"\xff\xd8\xff": ("an image", "leave it out"),
    b"GIF8": ("an image", "leave it out"),
    b"\x7fELF": ("a program", "leave it out"),
}
_TAR_MAGIC = (b"ustar\0", b"ustar  \0")  # after the first 257 bytes
_MARKUP = re.compile(rb"<(!doctype\s+html|html|head|body)\b|<\?xml\b", re.IGNORECASE)
_TEXT_NAMES = (".txt", ".text", ".md")
_KEEP_MARKUP = "extract its text (or take it as it is: --input-format text)"
_UNREADABLE_NAMES = {  # of what cannot be told from plain text by its content
    ".csv": ("a CSV table", "write it again as parquet or JSON lines"),
    ".tsv": ("a TSV table", "write it again as parquet or JSON lines"),
    ".arc": ("an ARC archive", "convert it to WARC"),
    ".htm": ("an HTML page", _KEEP_MARKUP),
    ".html": ("an HTML page", _KEEP_MARKUP),
    ".xhtml": ("an HTML page", _KEEP_MARKUP),
    ".xml": ("an XML document", _KEEP_MARKUP),
}
# No file of these formats is empty, not even one without records: it is what a transfer that broke off has left.
_NEVER_EMPTY = (".parquet", ".arrow", ".feather", ".gz", ".zst", ".bz2", ".xz")
_COMPRESSED_NAME = re.compile(r"\.(gz|zst|bz2|xz)$")
_READ_HERE = "shards are parquet, Arrow, JSON, plain text in UTF-8 or WARC"
_CONTROL = re.compile(r"[\0-\x08\x0e-\x1a\x1c-\x1f]")  # white space and escape occur in texts
_JUNK_SHARE = 0.1  # of the first characters that are no UTF-8 or control codes; a text of another encoding has more


def recognise(path: str, settings: ReadSettings) -> ShardPart:
    """The whole of a shard as one part.

    Raises:
        DataError: The bytes belong to a format that is not read here.
    """
    with named_errors(path), open_shard(path) as file:
        head = file.read(_HEAD_BYTES)
    if not head and PurePosixPath(path).suffix.lower() in _NEVER_EMPTY:
        raise DataError(f"{path} is empty, which no file of this kind is; fetch the shard again, or leave it out")
    compression = compression_of(head)
    if compression is not None:
        head = _decompressed_head(ShardPart(path, "text", compression))
        if compression_of(head) is not None:
            raise DataError(f"{path} is compressed twice; {_READ_HERE}: decompress it once")
    if settings.input_format == "auto":
        shard_format = _format_of(path, head)
    else:
        shard_format = settings.input_format
        _check_asked_format(path, head, shard_format)
    if compression is not None and shard_format in ("parquet", "arrow"):
        raise DataError(f"{path} is a {compression}-compressed {shard_format} file, which has to be decompressed")
    return ShardPart(path, shard_format, compression)


def _decompressed_head(part: ShardPart) -> bytes:
    with PartStream(part) as stream:
        try:
            return stream.read(_HEAD_BYTES)
        except DamagedStream as damage:
            raise DataError(
                f"{part.path}: the {part.compression} stream is damaged from its beginning ({damage}); "
                "fetch the shard again, or leave it out"
            ) from damage


def _check_asked_format(path: str, head: bytes, asked: Format) -> None:
    """Tables and archives show by their first bytes what they are; asking for another format is a mistake."""
    if head and asked in _FORMAT_MAGIC.values() and _tables_and_archives(head) != asked:
        raise DataError(f"{path} does not begin like {asked}, which --input-format asks for; leave --input-format out")


def _tables_and_archives(head: bytes) -> Format | None:
    return next((name for magic, name in _FORMAT_MAGIC.items() if head.startswith(magic)), None)


def _format_of(path: str, head: bytes) -> Format:
    found = _tables_and_archives(head)
    if found is not None:
        return found
    for magic, (kind, remedy) in _UNREADABLE_MAGIC.items():
        if head.startswith(magic):
            raise DataError(f"{path} is {kind}; {_READ_HERE}: {remedy}")
    if head.startswith(_TAR_MAGIC, 257):
        raise DataError(f"{path} is a tar archive; {_READ_HERE}: unpack it (tar -xf)")
    found = _by_content(path, head)
    if found == "text":
        _refuse_markup_and_tables(path, head)
    return found


def _by_content(path: str, head: bytes) -> Format:
    content = head.removeprefix(BYTE_ORDER_MARK).lstrip()
    if not content:
        return "jsonl"  # without a record
    if re.match(rb"\[\s*[{\]]", content):
        return "json"
    lines = content.splitlines()
    is_cut = len(head) == _HEAD_BYTES
    if _is_object(lines[0]) or (is_cut and len(lines) == 1 and _is_object_up_to_the_cut(content)):
        return "jsonl"
    if content.startswith(b"{") and _is_object_in_lines(content, cut=is_cut):
        return "json"
    has_objects = any(_is_object(line) for line in lines)
    if b"\0" in head or not has_objects:
        _refuse_junk(path, head)
    if _says_text(path):
        return "text"
    if has_objects and not says_json(path) and _MARKUP.match(content):
        return "text"  # a page with some data in it
    return "jsonl" if has_objects or content.startswith(b"{") or says_json(path) else "text"


def _refuse_markup_and_tables(path: str, head: bytes) -> None:
    suffix = PurePosixPath(_COMPRESSED_NAME.sub("", path.lower())).suffix
    kind, remedy = _UNREADABLE_NAMES.get(suffix, ("", ""))
    if not kind and (markup := _MARKUP.match(head.removeprefix(BYTE_ORDER_MARK).lstrip())):
        kind, remedy = "an XML document" if b"?" in markup[0] else "an HTML page", _KEEP_MARKUP
    if kind:
        raise DataError(f"{path} is {kind}; {_READ_HERE}: {remedy}")


def says_json(path: str) -> bool:
    name = PurePosixPath(path).name.lower()
    return any(ending in name for ending in (".jsonl", ".ndjson", ".json"))


def _says_text(path: str) -> bool:
    return _COMPRESSED_NAME.sub("", path.lower()).endswith(_TEXT_NAMES)


def _is_object(line: bytes) -> bool:
    """Whether a line is a whole JSON object, some invalid UTF-8 in it notwithstanding."""
    if not line.lstrip().startswith(b"{"):
        return False
    try:
        json.loads(line.decode(errors="replace"))
    except (ValueError, RecursionError):
        return False
    return True


def _is_object_in_lines(content: bytes, *, cut: bool) -> bool:
    """Whether a file, or its head, begins with one JSON object that goes on beyond its first line."""
    text = content.decode(errors="replace").rstrip()
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except json.JSONDecodeError as error:
        return cut and "\n" in text and _is_due_to_cut(error, text)
    except (ValueError, RecursionError):
        return False
    return "\n" in text[:end]


def _is_object_up_to_the_cut(line: bytes) -> bool:
    """Whether a line of which only the head is known begins a JSON object."""
    text = line.decode(errors="replace").rstrip()
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return text.startswith("{") and _is_due_to_cut(error, text)
    except (ValueError, RecursionError):
        return False
    return False


def _is_due_to_cut(error: json.JSONDecodeError, text: str) -> bool:
    """Where only the cut is wrong with it, the parser comes to the end, or to a string that has none."""
    return error.msg.startswith("Unterminated") or error.pos >= len(text) - 6


def _refuse_junk(path: str, head: bytes) -> None:
    text = head[:-3].decode(errors="replace") if len(head) == _HEAD_BYTES else head.decode(errors="replace")
    junk = text.count("\ufffd") + len(_CONTROL.findall(text))
    if "\0" in text or junk > _JUNK_SHARE * len(text):
        raise DataError(
            f"{path} is neither a format that is read here nor UTF-8 text ({junk:,} of its first {len(text):,} "
            f"characters are none); {_READ_HERE}: convert it (other encodings: iconv -t UTF-8), or leave it out"
        )
