"""Cuts a file of JSON arrays or pretty-printed objects into its values without parsing them.

Only strings and brackets are looked at, so that one faulty value costs itself and the file streams. A value is an
element of an outermost array, or an object outside of one.
"""

import re
from collections.abc import Iterator

from megatron_neobert.data.shards.records import BATCH_BYTES, RAW_BYTES
from megatron_neobert.data.shards.separated import Records
from megatron_neobert.data.shards.streams import DamagedStream, PartStream
from megatron_neobert.data.shards.texts import BYTE_ORDER_MARK

_STRUCTURE = re.compile(rb'["{}\[\],]')
_BACKSLASH = ord("\\")


def read_values(stream: PartStream, *, limit: int) -> Iterator[Records]:
    """The values of a file in groups of about BATCH_BYTES; of one above `limit` bytes only the beginning is held.

    Raises:
        DamagedStream: Brackets or quotes are still open at the end.
    """
    scanner = _Scanner(limit)
    group: list[bytes] = []
    held, first = 0, True
    while block := stream.read(max(BATCH_BYTES, scanner.held)):
        if first:
            block, first = block.removeprefix(BYTE_ORDER_MARK), False
        for value, too_long in scanner.values(block):
            if group and (too_long or held + len(value) > BATCH_BYTES):
                yield Records(group)
                group, held = [], 0
            if too_long:
                yield Records([], value)
            else:
                group.append(value)
                held += len(value)
    if group:
        yield Records(group)
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

    def values(self, block: bytes) -> Iterator[tuple[bytes, bool]]:
        """The values that end in the next block, each with whether it is too long."""
        self._buffer += block
        start = 0  # of the current value
        while (token := self._next_token()) is not None:
            end = self._end_of_value(token)
            if end is not None:
                yield from self._value(self._buffer[start:end])
                start = token.end()
        self._buffer = self._buffer[start:].lstrip()
        self._scanned = len(self._buffer)
        if len(self._buffer) > self._limit or (self._head is not None and self._buffer):
            self._head = self._head or self._buffer[:RAW_BYTES]
            # Of the bytes that are forgotten, one matters: a backslash that escapes what follows.
            self._buffer = b"\\" * _is_escaped(self._buffer, len(self._buffer))
            self._scanned = len(self._buffer)

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

    def _value(self, value: bytes) -> Iterator[tuple[bytes, bool]]:
        head, self._head = self._head, None
        value = value.strip()
        if head is not None:
            yield head, True
        elif len(value) > self._limit:
            yield value[:RAW_BYTES], True
        elif value:
            yield value, False


def _is_escaped(content: bytes, place: int) -> bool:
    """Whether an odd number of backslashes stands before a place."""
    first = place
    while first > 0 and content[first - 1] == _BACKSLASH:
        first -= 1
    return (place - first) % 2 == 1
