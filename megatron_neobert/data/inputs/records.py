"""The records of input files: kept with a text, rejected as an error, or dropped by a harmless rule that has a name.

The rules are the same for every format. Nothing is lost silently.
"""

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

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


@dataclass(frozen=True)
class ReadSettings:
    """Settings that decide how input files are read."""

    text_key: str = "content"
    input_format: Literal["auto"] | Format = "auto"
    text_separator: str | None = None  # between the documents of a plain text file; None: the file is one document
    max_document_bytes: int = 16 << 20  # bounds the memory: a text without spaces takes some 100 times its size
    # Fields of a record that become attributes and that filters see; None: neither, and texts need no origins.
    record_keys: tuple[str, ...] | None = None


class Origin(NamedTuple):
    """Where a text comes from, for filters and counts by source."""

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
    """The text, and whether invalid UTF-8 in it became U+FFFD."""
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
    """Adds what a record has under the text key; `raw` is the record, for the case that it is rejected."""
    if value is None:
        reject(batch, NULL_TEXT, number, "null", raw)
    elif not isinstance(value, str):
        reject(batch, NOT_A_STRING, number, f"found {type(value).__name__}", raw)
    else:
        add_text(batch, value, repaired=repaired, origin=origin)


def add_text(batch: RecordBatch, text: str, *, repaired: bool = False, origin: Origin | None = None) -> None:
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
    if origin is not None:
        batch.origins.append(origin)
    batch.utf8_bytes += size
    batch.repaired += repaired


def utf8_size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def reject(batch: RecordBatch, reason: str, number: int, detail: str, raw: bytes) -> None:
    batch.rejected.append(Rejected(reason, number, detail, raw[:RAW_BYTES]))
