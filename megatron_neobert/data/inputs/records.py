"""The records of input files: kept with a text, rejected as an error, or dropped by a harmless rule that has a name.

The rules are the same for every format. Nothing is lost silently.
"""

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from megatron_neobert.cli import option
from megatron_neobert.data.inputs.stream import Chunk, Format

MALFORMED_JSON = "malformed JSON"
MISSING_KEY = "missing key"
NULL_TEXT = "null text"
NOT_A_STRING = "text is not a string"
TOO_LONG = "longer than --max-document-bytes"
MALFORMED_RECORD = "malformed web archive record"
FILTER_FAILED = "a filter failed"

EMPTY_TEXT = "empty text"  # dropped, like those below
NOT_A_RESPONSE = "not a response record"
HTTP_STATUS = "HTTP status not 200"
NOT_HTML = "not HTML or text"

RAW_BYTES = 64 << 10  # of a rejected record that are kept

_SURROGATE = re.compile("[\ud800-\udfff]")


def read_size(text: str) -> int:
    """Return the number of bytes of a text such as 10GB or 64MiB; ValueError if it is no size."""
    number = text.rstrip("BKMGTi")
    unit = text[len(number) :]
    scales = {"": 1, "B": 1}
    scales |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)}
    scales |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)}
    try:
        size = int(float(number) * scales[unit])
    except (KeyError, ValueError, OverflowError):
        size = 0
    if size < 1:
        raise ValueError("is not a size; use a number of bytes, or one like 10GB or 64MiB")
    return size


def read_separator(text: str) -> str:
    """Return a text with its escapes, such as \\n, replaced; ValueError if an escape is not legal."""
    try:
        separator = text.encode("latin-1", "backslashreplace").decode("unicode_escape")
        separator.encode()
    except UnicodeError as error:
        raise ValueError(f"is no text with escapes like \\n ({error})") from error
    return separator


@dataclass(frozen=True)
class ReadSettings:
    """Settings that decide how input files are read."""

    text_key: str = option("content", "column or JSON key of the text; a.b is b inside a")
    input_format: Literal["auto", Format] = option("auto", "where the content is not to be asked")
    text_separator: str | None = option(
        None,
        r"between the documents of a plain text file: '\n' for one a line, '\n\n' for empty lines; without it a file "
        "is one document",
        metavar="STRING",
        read=read_separator,
    )
    # The limit bounds the memory: a text without spaces takes some 100 times its size.
    max_document_bytes: int = option(
        16 << 20, "longer documents are rejected; bounds the memory (default 16MiB)", metavar="SIZE", read=read_size
    )
    # None: neither attributes nor filters need them, and texts need no origins.
    record_keys: tuple[str, ...] | None = option(
        None,
        "a field of the records (column, JSON key, WARC header) that is kept as an attribute of each document, by "
        "which training can choose (--data-path PREFIX:where=EXPRESSION), and that filters see; repeatable",
        flag="--record-key",
        metavar="KEY",
        repeat=True,
    )


class Origin(NamedTuple):
    """Origin of a text, for filters and counts by source."""

    number: int  # of the record, as in Rejected
    fields: dict[str, Any]  # by record key; None where the record has no such field


class Rejected(NamedTuple):
    """One record without a usable text."""

    reason: str  # one of the constants above
    number: int  # of the record; rows count from 0 as in pyarrow, everything else from 1 as in editors
    detail: str  # what was found
    raw: bytes  # the record's first RAW_BYTES, as far as the format has such a thing

    def describe(self, chunk: Chunk, file_name: str) -> str:
        """Format the place of the record and what is wrong with it."""
        after = f" after byte {chunk.start}" if chunk.numbers_are_relative else ""
        return f"{file_name}, {chunk.unit} {self.number}{after}: {self.reason} ({self.detail})"


@dataclass
class RecordBatch:
    """Some consecutive records of a chunk. `texts` are not empty, valid Unicode, in the order of the file."""

    texts: list[str] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)  # of the texts, where filters or sources ask for them
    utf8_bytes: int = 0  # of texts
    repaired: int = 0  # texts in which invalid UTF-8 or lone surrogates became U+FFFD
    rejected: list[Rejected] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)  # records by reason
    numbers: int = 0  # record numbers used up, blank lines included: the next chunk's first number follows from it
    progress: float = 0.0  # of the chunk, after this batch: 0 to 1


def decode(raw: bytes) -> tuple[str, bool]:
    """Return the text, and whether invalid UTF-8 in it became U+FFFD."""
    try:
        return raw.decode(), False
    except UnicodeDecodeError:
        return raw.decode(errors="replace"), True


def add_value(
    batch: RecordBatch,
    value: object,
    number: int,
    *,
    raw: bytes,
    repaired: bool = False,
    origin: Origin | None = None,
) -> None:
    """Add what a record has under the text key; `raw` is the record, for the case that it is rejected."""
    if value is None:
        reject(batch, NULL_TEXT, number, "null", raw)
    elif not isinstance(value, str):
        reject(batch, NOT_A_STRING, number, f"found {type(value).__name__}", raw)
    else:
        add_text(batch, value, repaired=repaired, origin=origin)


def add_text(
    batch: RecordBatch, text: str, *, repaired: bool = False, origin: Origin | None = None, size: int | None = None
) -> None:
    """Add a text of `size` bytes of UTF-8, None: unknown. White space is dropped, lone surrogates become U+FFFD."""
    if not text or text.isspace():
        batch.dropped[EMPTY_TEXT] += 1
        return
    try:
        size = size or utf8_size(text)
    except UnicodeEncodeError:
        text, repaired = _SURROGATE.sub("\ufffd", text), True
        size = utf8_size(text)
    batch.texts.append(text)
    if origin is not None:
        batch.origins.append(origin)
    batch.utf8_bytes += size
    batch.repaired += repaired


def utf8_size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def reject(batch: RecordBatch, reason: str, number: int, detail: str, raw: bytes) -> None:
    batch.rejected.append(Rejected(reason, number, detail, raw[:RAW_BYTES]))
