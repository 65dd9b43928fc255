"""What reading a shard gives: batches of texts, and an account of every record that is not among them.

A record read is kept (its text is in `RecordBatch.texts`), rejected (an error, described), or dropped (by a harmless
rule that has a name), by the same rules for every format. Nothing is lost silently; damage that hides an unknown number
of records is a DataError instead.
"""

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal, NamedTuple

MALFORMED_JSON = "malformed JSON"
MISSING_KEY = "missing key"
NULL_TEXT = "null text"
NOT_A_STRING = "text is not a string"
TOO_LONG = "longer than --max-document-bytes"
MALFORMED_RECORD = "malformed web archive record"

EMPTY_TEXT = "empty text"  # dropped, like those below
NOT_A_RESPONSE = "not a response record"
HTTP_STATUS = "HTTP status not 200"
NOT_HTML = "not HTML or text"

BATCH_BYTES = 1 << 20  # of text, in one RecordBatch
PART_BYTES = 256 << 20  # of text, in one part: about a minute for the reference tokenizer
RAW_BYTES = 64 << 10  # of a rejected record that are kept

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SURROGATE = re.compile("[\ud800-\udfff]")

Format = Literal["parquet", "arrow", "jsonl", "json", "text", "warc"]
Compression = Literal["gzip", "zstd", "bzip2", "xz"]


@dataclass(frozen=True)
class ReadSettings:
    """How the shards are to be read."""

    text_key: str = "content"
    input_format: Literal["auto"] | Format = "auto"
    text_separator: str | None = None  # between the documents of a plain text file; None: the file is one document
    max_document_bytes: int = 16 << 20  # bounds the memory: a text without spaces takes some 100 times its size


@dataclass(frozen=True)
class ShardPart:
    """What one task reads from beginning to end: a shard, or the range [start, end) of one.

    The range counts rows of a parquet or Arrow shard, bytes of an uncompressed shard of lines or separated texts.
    """

    path: str  # or URL
    format: Format
    compression: Compression | None = None
    start: int = 0
    end: int | None = None  # None: to the end

    @property
    def unit(self) -> str:
        """What its records are called in messages."""
        units = {"parquet": "row", "arrow": "row", "jsonl": "line", "json": "object", "text": "document"}
        return units.get(self.format, "record")

    @property
    def numbers_are_relative(self) -> bool:
        """True where record numbers count from the beginning of the part, since nobody has counted those before."""
        return self.start > 0 and self.format in ("jsonl", "text")


class Rejected(NamedTuple):
    """One record without a usable text."""

    reason: str  # one of the constants above
    number: int  # of the record; rows count from 0 as in pyarrow, everything else from 1 as in editors
    detail: str  # what was found
    raw: bytes  # the record's first RAW_BYTES, as far as the format has such a thing


@dataclass
class RecordBatch:
    """Some consecutive records of a part. `texts` are not empty, valid Unicode, in the order of the shard."""

    texts: list[str] = field(default_factory=list)
    utf8_bytes: int = 0  # of texts
    repaired: int = 0  # texts in which invalid UTF-8 or lone surrogates became U+FFFD
    rejected: list[Rejected] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)  # records by reason
    numbers: int = 0  # record numbers used up, blank lines included: the next part's first number follows from it
    progress: float = 0.0  # of the part, after this batch: 0 to 1


def decode(raw: bytes) -> tuple[str, bool]:
    """The text, and whether invalid UTF-8 in it became U+FFFD."""
    try:
        return raw.decode(), False
    except UnicodeDecodeError:
        return raw.decode(errors="replace"), True


def add_value(batch: RecordBatch, value: object, number: int, *, raw: bytes, repaired: bool = False) -> None:
    """Adds what a record has under the text key; `raw` is the record, for the case that it is rejected."""
    if value is None:
        reject(batch, NULL_TEXT, number, "null", raw)
    elif not isinstance(value, str):
        reject(batch, NOT_A_STRING, number, f"found {type(value).__name__}", raw)
    else:
        add_text(batch, value, repaired=repaired)


def add_text(batch: RecordBatch, text: str, *, repaired: bool = False) -> None:
    """Adds a text; one of white space only is dropped, and lone surrogates become U+FFFD."""
    if not text or text.isspace():
        batch.dropped[EMPTY_TEXT] += 1
        return
    try:
        size = utf8_size(text)
    except UnicodeEncodeError:
        text, repaired = _SURROGATE.sub("\ufffd", text), True
        size = utf8_size(text)
    batch.texts.append(text)
    batch.utf8_bytes += size
    batch.repaired += repaired


def utf8_size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def reject(batch: RecordBatch, reason: str, number: int, detail: str, raw: bytes) -> None:
    batch.rejected.append(Rejected(reason, number, detail, raw[:RAW_BYTES]))


def says_json(path: str) -> bool:
    name = PurePosixPath(path).name.lower()
    return any(ending in name for ending in (".jsonl", ".ndjson", ".json"))
