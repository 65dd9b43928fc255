"""Records of input files: kept with a text, rejected as an error, or dropped for a harmless reason.

The rules are the same for every format, and every record is counted.
"""

import re
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple

from megatron_neobert.cli import option
from megatron_neobert.data.inputs.input_reader import Chunk, Format

RAW_BYTES = 64 << 10  # stored of a rejected record

_SURROGATE = re.compile("[\ud800-\udfff]")
_UNIT_BYTES = {"": 1, "B": 1}
_UNIT_BYTES |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)}
_UNIT_BYTES["kB"] = 1000
_UNIT_BYTES |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)}


class Reason(StrEnum):
    """Reasons why records are rejected or dropped. Filters may drop records for other reasons."""

    # Of rejected records.
    MALFORMED_JSON = "malformed JSON"
    MISSING_KEY = "missing key"
    NULL_TEXT = "null text"
    NOT_A_STRING = "text is not a string"
    TOO_LONG = "longer than --max-document-bytes"
    MALFORMED_RECORD = "malformed web archive record"
    FILTER_FAILED = "a filter failed"
    # Of dropped records.
    EMPTY_TEXT = "empty text"
    NOT_A_RESPONSE = "not a response record"
    HTTP_STATUS = "HTTP status not 200"
    NOT_HTML = "not HTML or text"


def read_size(text: str) -> int:
    """Convert a size like 500, 10GB (10^10) or 64MiB (2^26) to bytes. Raise ValueError if invalid or below 1."""
    number = text.rstrip("BkKMGTi")
    try:
        size = int(float(number) * _UNIT_BYTES[text[len(number) :]])
    except (KeyError, ValueError, OverflowError):
        size = 0
    if size < 1:
        raise ValueError("is not a size; use a number of bytes, or a size such as 10GB or 64MiB")
    return size


def read_separator(text: str) -> str:
    """Replace escapes such as \\n by their characters. Raise ValueError if an escape is invalid."""
    try:
        separator = text.encode("latin-1", "backslashreplace").decode("unicode_escape")
        separator.encode()
    except UnicodeError as error:
        raise ValueError(f"has an invalid escape ({error}); use escapes such as \\n") from error
    return separator


@dataclass(frozen=True)
class ReadSettings:
    """Settings that decide how input files are read."""

    text_key: str = option("content", "column or JSON key of the text; a.b is the key b inside a")
    input_format: Literal["auto", Format] = option("auto", "format of all input files; auto recognises it by content")
    text_separator: str | None = option(
        None,
        r"separator between the documents of a plain text file, such as '\n' (one document per line) or '\n\n' "
        "(empty lines between documents); without it, each file is one document",
        metavar="STRING",
        read=read_separator,
    )
    # The limit bounds the memory: a text without spaces takes about 100 times its size.
    max_document_bytes: int = option(
        16 << 20, "reject longer documents, which bounds the memory (default 16MiB)", metavar="SIZE", read=read_size
    )
    record_keys: tuple[str, ...] = option(
        (),
        "field of the records (column, JSON key, WARC header) to keep as an attribute of each document; training "
        "selects documents by it (--data-path PREFIX:where=EXPRESSION), and filters can read it; repeatable",
        flag="--record-key",
        metavar="KEY",
        repeat=True,
    )


# Fields of a record by --record-key; None if the record does not have the field.
Fields = dict[str, Any]


class Rejected(NamedTuple):
    """A record without a usable text."""

    reason: Reason
    number: int  # table rows count from 0 as in pyarrow, lines and other records from 1 as in editors
    detail: str  # what is wrong, with its value
    raw: bytes  # first RAW_BYTES of the record; empty for a null

    def describe(self, chunk: Chunk, file_name: str) -> str:
        """Return the position of the record and what is wrong with it, for a message."""
        after = f" after byte {chunk.start}" if chunk.numbers_are_relative else ""
        return f"{file_name}, {chunk.unit} {self.number}{after}: {self.reason} ({self.detail})"


@dataclass
class RecordBatch:
    """Consecutive records of a chunk."""

    texts: list[str] = field(default_factory=list)  # in file order; not empty, valid Unicode
    text_numbers: list[int] = field(default_factory=list)  # of the record of each text, see Rejected.number
    fields: list[Fields] = field(default_factory=list)  # of the record of each text
    utf8_bytes: int = 0  # size of all texts
    rejected: list[Rejected] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)  # number of records by reason
    numbers: int = 0  # record numbers that the batch uses; blank lines have numbers, too
    progress: float = 0.0  # share of the chunk that is read after this batch, 0 to 1
    field_names: list[str] = field(default_factory=list)  # of its last record; outermost names only

    def add_utf8(self, raw: bytes, number: int, fields: Fields) -> None:
        """Add a text given as UTF-8; see `add_text`. U+FFFD replaces invalid bytes."""
        try:
            self.add_text(raw.decode(), number, fields, size=len(raw))
        except UnicodeDecodeError:
            self.add_text(raw.decode(errors="replace"), number, fields)

    def add_text(self, text: str, number: int, fields: Fields, *, size: int | None = None) -> None:
        """Add a text, or count it in `dropped` if it is only white space. U+FFFD replaces lone surrogates.

        `number` and `fields` belong to the text's record. `size` is the text's size in UTF-8 bytes, computed if None.
        """
        if not text or text.isspace():
            self.dropped[Reason.EMPTY_TEXT] += 1
            return
        try:
            size = size or (len(text) if text.isascii() else len(text.encode()))
        except UnicodeEncodeError:
            text = _SURROGATE.sub("\ufffd", text)
            size = len(text.encode())
        self.texts.append(text)
        self.text_numbers.append(number)
        self.fields.append(fields)
        self.utf8_bytes += size

    def reject(self, reason: Reason, number: int, detail: str, raw: bytes) -> None:
        self.rejected.append(Rejected(reason, number, detail, raw[:RAW_BYTES]))
