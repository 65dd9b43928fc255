"""What becomes of one value that a shard gives as a text: kept, rejected or dropped, the same way for every format."""

import re

from megatron_neobert.data.shards.records import (
    EMPTY_TEXT,
    NOT_A_STRING,
    NULL_TEXT,
    RAW_BYTES,
    RecordBatch,
    Rejected,
)

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SURROGATE = re.compile("[\ud800-\udfff]")


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
