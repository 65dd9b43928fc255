"""Texts out of web archives: WARC (pages as they were fetched) and WET (the texts of pages, taken out by somebody).

The archive is cut into records here, by their lengths, and every cut is checked against what follows it: so a faulty
record costs itself, and a file that breaks off is noticed. fastwarc undoes what HTTP did to a page, resiliparse takes
the main text out of its HTML.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from megatron_neobert.data.shards.records import (
    BATCH_BYTES,
    HTTP_STATUS,
    MALFORMED_RECORD,
    NOT_A_RESPONSE,
    NOT_HTML,
    RAW_BYTES,
    TOO_LONG,
    ReadSettings,
    RecordBatch,
    ShardPart,
    add_text,
    decode,
    reject,
)
from megatron_neobert.data.shards.streams import DamagedStream, PartStream

_HEADER_BYTES = 64 << 10  # more before a blank line is no header
_BLANK_LINE = re.compile(rb"\r?\n\r?\n")
_NEXT_RECORD = re.compile(rb"[\r\n]WARC/[01]\.")
_MARGIN_BYTES = 16  # between two records: two line ends and the beginning of the next, with some to spare
_VERSION = b"WARC/"
_RECORD_END = b"\r\n\r\n"
_LENGTH_DIGITS = 18
_BATCH_RECORDS = 1024  # at most in one RecordBatch
_HTML = ("text/html", "application/xhtml+xml")
_WARC_HEADER = b"WARC/1.0\r\nWARC-Type: response\r\nContent-Type: application/http\r\nContent-Length: %d\r\n\r\n"
_TAG = re.compile("<(/?)[a-zA-Z]")
# The time for finding the main text grows with the square of the depth: 0.07 s at this one, 300 s at 100,000.
_MAX_DEPTH = 2000


class ArchiveRecord(NamedTuple):
    """One record, or some bytes that are none."""

    headers: dict[bytes, bytes]  # names in lower case
    block: bytes  # what the headers describe; of a problem its first RAW_BYTES at most
    problem: tuple[str, str] | None = None  # a reason and its detail


def read_archive(part: ShardPart, settings: ReadSettings) -> Iterator[RecordBatch]:
    """The texts of pages that were fetched with success, and of WET records.

    Raises:
        ModuleNotFoundError: fastwarc or resiliparse is not installed.
        DamagedStream: The archive ends within a record.
    """
    batch, number, held = RecordBatch(), 0, 0
    with PartStream(part) as stream:
        try:
            for number, record in enumerate(cut_records(stream, limit=settings.max_document_bytes), start=1):
                rejected = len(batch.rejected)
                _add_record(batch, record, number, settings.max_document_bytes)
                held += sum(len(each.raw) for each in batch.rejected[rejected:])
                batch.numbers += 1
                if batch.utf8_bytes + held >= BATCH_BYTES or batch.numbers >= _BATCH_RECORDS:
                    batch.progress = stream.progress
                    yield batch
                    batch, held = RecordBatch(), 0
        except DamagedStream:
            yield batch  # so that the message can name the last good record
            raise
        batch.progress = stream.progress
    if batch.numbers:
        yield batch


def _add_record(batch: RecordBatch, record: ArchiveRecord, number: int, limit: int) -> None:
    kind = record.headers.get(b"warc-type")
    content_type = record.headers.get(b"content-type", b"").lower()
    if record.problem is not None:
        reject(batch, record.problem[0], number, record.problem[1], record.block)
    elif kind == b"response" and content_type.startswith(b"application/http"):
        _add_response(batch, record.block, number, limit=limit)
    elif kind == b"conversion" and content_type.startswith(b"text/"):
        text, repaired = decode(record.block)
        add_text(batch, text, repaired=repaired)
    else:
        batch.dropped[NOT_HTML if kind in (b"response", b"conversion") else NOT_A_RESPONSE] += 1


def _add_response(batch: RecordBatch, block: bytes, number: int, *, limit: int) -> None:
    """Adds the text of an HTTP response, or counts why it has none; a body above `limit` bytes is too long.

    Raises:
        ModuleNotFoundError: fastwarc or resiliparse is not installed.
    """
    from fastwarc.warc import WarcRecord

    try:
        record = WarcRecord.from_bytes(_WARC_HEADER % len(block) + block)
        record.parse_http(auto_decode="all")
        status = record.http_headers.status_code if record.http_headers else None
        if status is None:
            return reject(batch, MALFORMED_RECORD, number, "no HTTP status", block)
        if status != 200:
            batch.dropped[HTTP_STATUS] += 1
            return None
        content_type = (record.http_content_type or "").lower()
        if content_type not in (*_HTML, "text/plain"):
            batch.dropped[NOT_HTML] += 1
            return None
        body = record.reader.read(limit + 1)
    except OSError as error:  # raised by fastwarc for all it cannot parse; it reads from memory
        return reject(batch, MALFORMED_RECORD, number, f"HTTP: {error}", block)
    if len(body) > limit:
        return reject(batch, TOO_LONG, number, f"more than {limit:,} bytes", block)
    text, repaired = decode_page(body, record.http_charset, is_html=content_type in _HTML)
    if content_type in _HTML:
        try:
            text = main_text(text)
        except ValueError as error:
            return reject(batch, MALFORMED_RECORD, number, f"HTML: {error}", block)
    return add_text(batch, text, repaired=repaired)


def decode_page(body: bytes, charset: str | None, *, is_html: bool) -> tuple[str, bool]:
    """The page, and whether something of it became U+FFFD.

    What is valid UTF-8 is UTF-8, even where server or page declare another: no other encoding gives that by chance, and
    many declare the default of their software. Else the byte order mark counts, then the server, the page, a guess.
    """
    from resiliparse.parse.encoding import detect_encoding, map_encoding_to_html5

    if b"\0" not in body and b"\x1b" not in body:  # neither UTF-16 nor ISO-2022, whose bytes are ASCII
        try:
            return body.decode("utf-8-sig"), False
        except UnicodeDecodeError:
            pass
    encoding = "utf-16" if body.startswith((b"\xff\xfe", b"\xfe\xff")) else None
    encoding = encoding or map_encoding_to_html5(charset or "", fallback_utf8=False)
    encoding = encoding or detect_encoding(body, from_html_meta=is_html) or "utf-8"
    try:
        return body.decode(encoding), False
    except UnicodeDecodeError:
        return body.decode(encoding, errors="replace"), True


def main_text(html: str) -> str:
    """The text of a page without navigation, forms and the like, a paragraph or list item to a line.

    Raises:
        ValueError: The page cannot be parsed.
    """
    from resiliparse.extract.html2text import extract_plain_text
    from resiliparse.parse.html import HTMLTree

    tree = HTMLTree.parse(html)
    if _may_be_deep(html) and (depth := _depth(tree)) > _MAX_DEPTH:
        raise ValueError(f"elements are nested {depth:,} deep")
    text: str = extract_plain_text(tree, preserve_formatting=True, main_content=True, alt_texts=False)
    return text


def _may_be_deep(html: str) -> bool:
    """A quick look at the tags alone; elements that need no end tag count as open here."""
    if html.count("<") <= _MAX_DEPTH:
        return False
    depth = deepest = 0
    for tag in _TAG.finditer(html):
        depth += -1 if tag[1] else 1
        deepest = max(deepest, depth)
    return deepest > _MAX_DEPTH


def _depth(tree: Any) -> int:
    from resiliparse.parse.html import traverse_dom

    deepest = 0

    def note(context: Any) -> None:
        nonlocal deepest
        deepest = max(deepest, context.depth)

    traverse_dom(tree.document, note)
    return deepest


def cut_records(stream: PartStream, *, limit: int) -> Iterator[ArchiveRecord]:
    """All records of an archive; of one above `limit` bytes only the beginning is held.

    Raises:
        DamagedStream: The archive ends within a record.
    """
    window = _Window(stream)
    while window.skip_line_ends():
        start = window.peek(RAW_BYTES)
        header = window.header()
        if header is None:
            window.skip_to_next_record()
            yield _faulty(start, "no WARC header where a record should begin")
            continue
        pairs = (line.partition(b":") for line in header.splitlines()[1:])
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        length = headers.get(b"content-length", b"none")
        window.skip(len(header))
        if not length.isdigit() or len(length) > _LENGTH_DIGITS:
            window.skip_to_next_record()
            yield _faulty(start, f"its Content-Length is {length[:50].decode('latin-1')}")
        elif int(length) > limit:
            window.skip(int(length))
            yield ArchiveRecord(headers, start, (TOO_LONG, f"{int(length):,} bytes"))
        elif (block := window.take_block(int(length))) is None:
            window.skip_to_next_record()
            yield _faulty(start, f"no record follows after its {int(length):,} bytes")
        else:
            yield ArchiveRecord(headers, block)


def _faulty(start: bytes, detail: str) -> ArchiveRecord:
    following = _NEXT_RECORD.search(start)
    return ArchiveRecord({}, start[: following.start()] if following else start, (MALFORMED_RECORD, detail))


class _Window:
    """What has been read of an archive and not been used. Damage behind it counts only once it is used up."""

    def __init__(self, stream: PartStream) -> None:
        self._stream = stream
        self._data = b""
        self._at = 0
        self._damaged = False
        self._end = DamagedStream("it ends within a record")  # why there is no more where there should be

    def peek(self, count: int) -> bytes:
        """The next bytes; fewer at the end of the archive."""
        while (missing := self._at + count - len(self._data)) > 0 and (block := self._read(missing)):
            self._data, self._at = self._data[self._at :] + block, 0
        return self._data[self._at : self._at + count]

    def skip_line_ends(self) -> bool:
        """Whether anything is left behind the line ends that separate records."""
        while head := self.peek(_MARGIN_BYTES):
            rest = head.lstrip(b"\r\n")
            self._at += len(head) - len(rest)
            if rest:
                return True
        if self._damaged:
            raise self._end
        return False

    def header(self) -> bytes | None:
        """The header that comes next, with its blank line; None if something else does."""
        head = self.peek(_HEADER_BYTES)
        end = _BLANK_LINE.search(head)
        is_header = _begins_record(head)
        if is_header and end is None and len(head) < _HEADER_BYTES:
            raise self._end
        return head[: end.end()] if is_header and end else None

    def take_block(self, length: int) -> bytes | None:
        """The next bytes, unless what follows them shows that the length is wrong."""
        block = self.peek(length + _MARGIN_BYTES)
        if len(block) < length:
            if _NEXT_RECORD.search(block):
                return None
            raise self._end
        following = block[length:]
        if not following.startswith(_RECORD_END) and not _begins_record(following.lstrip(b"\r\n")):
            return None
        self._at += length
        return block[:length]

    def skip(self, count: int) -> None:
        while count > (held := len(self._data) - self._at):
            count -= held
            self._data, self._at = self._read(), 0
            if not self._data:
                raise self._end
        self._at += count

    def skip_to_next_record(self) -> None:
        while (match := _NEXT_RECORD.search(self._data, self._at)) is None:
            kept = self._data[max(self._at, len(self._data) - _MARGIN_BYTES) :]
            block = self._read()
            if not block:
                self._data, self._at = b"", 0
                return
            self._data, self._at = kept + block, 0
        self._at = match.start() + 1

    def _read(self, least: int = 0) -> bytes:
        try:
            return self._stream.read(max(BATCH_BYTES, least))
        except DamagedStream as damage:
            self._end, self._damaged = damage, True
            return b""


def _begins_record(content: bytes) -> bool:
    """Whether it begins as a record does; what is too short to tell may."""
    return _VERSION.startswith(content[: len(_VERSION)])
