"""Texts out of JSON objects: JSON lines, and files that are arrays of objects or pretty-printed objects.

orjson reads what is faultless; everything else is read again by the standard library, which reports precisely what is
wrong and forgives more (NaN, numbers of any size). A key `data.text` names the key of that spelling or, where there is
none, `text` within `data`. A file of arrays is cut into its values without parsing them, by its strings and brackets
alone, so that one faulty value costs itself and the file streams.
"""

import json
import re
from collections.abc import Iterator
from functools import partial
from operator import itemgetter

import orjson

from megatron_neobert.data.shards.records import (
    BATCH_BYTES,
    BYTE_ORDER_MARK,
    MALFORMED_JSON,
    MISSING_KEY,
    RAW_BYTES,
    TOO_LONG,
    ReadSettings,
    RecordBatch,
    ShardPart,
    add_value,
    decode,
    reject,
    says_json,
    utf8_size,
)
from megatron_neobert.data.shards.separated import Records, group_records, read_records
from megatron_neobert.data.shards.streams import DamagedStream, PartStream

_STRUCTURE = re.compile(rb'["{}\[\],]')
_BACKSLASH = ord("\\")


def read_json(part: ShardPart, settings: ReadSettings) -> Iterator[RecordBatch]:
    """The objects of JSON lines, of arrays, or over several lines.

    Raises:
        DamagedStream: The file ends within an object or an array.
    """
    number, limit = 1, settings.max_document_bytes
    is_guess = settings.input_format == "auto" and part.start == 0 and not says_json(part.path)
    with PartStream(part) as stream:
        lines = part.format == "jsonl"
        groups = read_records(stream, separator=b"\n", limit=limit) if lines else read_values(stream, limit=limit)
        for records in groups:
            if number == 1 and part.start == 0 and records.whole:
                records.whole[0] = records.whole[0].removeprefix(BYTE_ORDER_MARK)
            batch = _read_objects(records, number, settings)
            batch.progress = stream.progress
            if lines and is_guess and number == 1 and batch.rejected:
                first = batch.rejected[0]
                if first.number == 1 and first.reason == MALFORMED_JSON:  # then JSON lines may have been a wrong guess
                    hint = f"{first.detail} (if this is plain text: --input-format text)"
                    batch.rejected[0] = first._replace(detail=hint)
            number += batch.numbers
            yield batch


def _read_objects(records: Records, first_number: int, settings: ReadSettings) -> RecordBatch:
    """The texts of some JSON objects, given as bytes; blank ones are no records but have numbers."""
    batch = RecordBatch(numbers=len(records.whole))
    key, texts, size = settings.text_key, batch.texts, 0
    take = partial(_look_up, key=key) if "." in key else itemgetter(key)
    for number, line in enumerate(records.whole, first_number):
        try:
            text = take(orjson.loads(line))
        except (orjson.JSONDecodeError, KeyError, TypeError):
            _read_object(batch, line, number, key)
            continue
        if text.__class__ is str and text and not text.isspace():
            texts.append(text)
            size += utf8_size(text)
        else:
            add_value(batch, text, number, raw=line)
    batch.utf8_bytes += size
    if records.too_long is not None:
        number = first_number + batch.numbers
        batch.numbers += 1
        detail = f"more than {settings.max_document_bytes:,} bytes"
        reject(batch, TOO_LONG, number, detail, records.too_long)
    return batch


def _read_object(batch: RecordBatch, line: bytes, number: int, key: str) -> None:
    if not line or line.isspace():
        return None
    decoded, repaired = decode(line)
    try:
        record = json.loads(decoded)
    except json.JSONDecodeError as error:
        return reject(batch, MALFORMED_JSON, number, f"column {error.colno}: {error.msg}", line)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; thousands of nested brackets
        return reject(batch, MALFORMED_JSON, number, str(error), line)
    if not isinstance(record, dict):
        return reject(batch, MALFORMED_JSON, number, f"expected an object, found {type(record).__name__}", line)
    try:
        value = _look_up(record, key)
    except KeyError:
        found = ", ".join(sorted(_keys(record))[:10]) or "none"
        return reject(batch, MISSING_KEY, number, f"no key '{key}'; keys found: {found}", line)
    return add_value(batch, value, number, raw=line, repaired=repaired)


def _look_up(record: dict[str, object], key: str) -> object:
    if key in record:
        return record[key]
    first, dot, rest = key.partition(".")
    inner = record[first]
    if not dot or not isinstance(inner, dict):
        raise KeyError(key)
    return _look_up(inner, rest)


def _keys(record: dict[str, object]) -> Iterator[str]:
    """Its keys, and those of the objects within it; of what is deeper, there may be thousands of levels."""
    for key, value in record.items():
        if isinstance(value, dict) and value:
            yield from (f"{key}.{inner}" for inner in value)
        else:
            yield key


def read_values(stream: PartStream, *, limit: int) -> Iterator[Records]:
    """The elements of outermost arrays and the objects outside of one, in groups of about BATCH_BYTES.

    Of a value above `limit` bytes only the beginning is held.

    Raises:
        DamagedStream: Brackets or quotes are still open at the end.
    """
    scanner = _Scanner(limit)
    first = True
    while block := stream.read(max(BATCH_BYTES, scanner.held)):
        head, values = scanner.values(block.removeprefix(BYTE_ORDER_MARK) if first else block)
        first = False
        if head is not None:
            yield Records([], head)
        if values:
            yield from group_records(values, limit)
    scanner.check_end()


class _Scanner:
    """What is known of the file up to some byte."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = b""  # begins where the current value does
        self._scanned = 0  # bytes of it
        self._depth = 0  # open brackets within the value
        self._in_string = False
        self._in_array = False
        self._head: bytes | None = None  # of a value that has become too long; its bytes are forgotten

    @property
    def held(self) -> int:
        return len(self._buffer)

    def values(self, block: bytes) -> tuple[bytes | None, list[bytes]]:
        """The values that end in the next block; before them the beginning of one that was too long to be held."""
        self._buffer += block
        values, start = [], 0  # start: of the current value
        while (token := self._next_token()) is not None:
            end = self._end_of_value(token)
            if end is not None:
                values.append(self._buffer[start:end].strip())
                start = token.end()
        head = None
        if values and self._head is not None:
            head, self._head = self._head, None
            del values[0]  # what was left of it
        self._buffer = self._buffer[start:].lstrip()
        self._scanned = len(self._buffer)
        if len(self._buffer) > self._limit or (self._head is not None and self._buffer):
            self._head = self._head or self._buffer[:RAW_BYTES]
            # Of the bytes that are forgotten, one matters: a backslash that escapes what follows.
            self._buffer = b"\\" * _is_escaped(self._buffer, len(self._buffer))
            self._scanned = len(self._buffer)
        return head, [value for value in values if value]

    def check_end(self) -> None:
        if self._in_string or self._in_array or self._depth or self._head is not None or self._buffer.strip():
            raise DamagedStream("it ends with open brackets or quotes")

    def _next_token(self) -> "re.Match[bytes] | None":
        """The next bracket or comma outside of strings."""
        while True:
            if self._in_string:
                quote = self._buffer.find(b'"', self._scanned)  # ten times as fast as a regular expression
                if quote < 0:
                    return None
                self._scanned = quote + 1
                self._in_string = _is_escaped(self._buffer, quote)
            else:
                token = _STRUCTURE.search(self._buffer, self._scanned)
                if token is None:
                    return None
                self._scanned = token.end()
                if token[0] != b'"':
                    return token
                self._in_string = True

    def _end_of_value(self, match: "re.Match[bytes]") -> int | None:
        """Where the current value ends if this bracket or comma ends it."""
        token = match[0]
        if token == b"[" and not self._depth and not self._in_array:
            self._in_array = True
            return match.start()
        if token in b"{[":
            self._depth += 1
        elif token in b"}]" and self._depth:
            self._depth -= 1
            if not self._depth and not self._in_array:
                return match.end()
        elif not self._depth:  # a comma, or a closing bracket of the array or of nothing
            self._in_array = self._in_array and token == b","
            return match.start()
        return None


def _is_escaped(content: bytes, place: int) -> bool:
    """Whether an odd number of backslashes stands before a place."""
    first = place
    while first > 0 and content[first - 1] == _BACKSLASH:
        first -= 1
    return (place - first) % 2 == 1
