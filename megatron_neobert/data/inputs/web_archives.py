"""Texts out of web archives: WARC (pages as they were fetched) and WET (the texts of pages, taken out by somebody).

The archive is cut into records here, by their lengths, so that one that breaks off is noticed, as it is by no library:
where no record begins at the end of another, a length is wrong and the archive damaged. fastwarc undoes what HTTP did
to a page, resiliparse takes the main text out of its HTML.
"""

import io
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

from megatron_neobert.data.inputs.records import (
    HTTP_STATUS,
    MALFORMED_RECORD,
    NOT_A_RESPONSE,
    NOT_HTML,
    RAW_BYTES,
    TOO_LONG,
    Origin,
    ReadSettings,
    RecordBatch,
    add_text,
    decode,
    reject,
)
from megatron_neobert.data.inputs.stream import BATCH_BYTES, Chunk, ChunkStream, DamagedStream, InputDigest

_HEADER_BYTES = 64 << 10  # more before a blank line is no header
_LENGTH_DIGITS = 18  # what int64 holds for certain
_ENDS_WITHIN = "it ends within a record"
_BATCH_RECORDS = 1024  # at most in one RecordBatch
_HTML = ("text/html", "application/xhtml+xml")
_WARC_HEADER = b"WARC/1.0\r\nWARC-Type: response\r\nContent-Type: application/http\r\nContent-Length: %d\r\n\r\n"
# The time for finding the main text grows with the square of the depth: 0.07 s at this one, 300 s at 100,000.
_MAX_DEPTH = 2000


class ArchiveRecord(NamedTuple):
    """One record of an archive."""

    headers: dict[bytes, bytes]  # names in lower case
    block: bytes  # what the headers describe; of one that is too long, its first RAW_BYTES with the headers
    too_long: str | None = None  # how long


def read_archive(chunk: Chunk, settings: ReadSettings, digest: InputDigest | None = None) -> Iterator[RecordBatch]:
    """Read the texts of pages that were fetched, and of WET records. DamagedStream if a length is wrong."""
    batch, number, held = RecordBatch(), 0, 0
    with ChunkStream(chunk, digest) as stream:
        try:
            archive = io.BufferedReader(stream, BATCH_BYTES)
            for number, record in enumerate(cut_records(archive, limit=settings.max_document_bytes), start=1):
                rejected = len(batch.rejected)
                _add_record(batch, record, number, settings)
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


def _add_record(batch: RecordBatch, record: ArchiveRecord, number: int, settings: ReadSettings) -> None:
    origin = None
    if settings.record_keys is not None:
        found = {key: record.headers.get(key.lower().encode()) for key in settings.record_keys}
        origin = Origin(number, {key: None if value is None else decode(value)[0] for key, value in found.items()})
    kind = record.headers.get(b"warc-type")
    content_type = record.headers.get(b"content-type", b"").lower()
    if record.too_long is not None:
        reject(batch, TOO_LONG, number, record.too_long, record.block)
    elif kind == b"response" and content_type.startswith(b"application/http"):
        _add_response(batch, record.block, number, limit=settings.max_document_bytes, origin=origin)
    elif kind == b"conversion" and content_type.startswith(b"text/"):
        text, repaired = decode(record.block)
        add_text(batch, text, repaired=repaired, origin=origin)
    else:
        batch.dropped[NOT_HTML if kind in (b"response", b"conversion") else NOT_A_RESPONSE] += 1


def _add_response(batch: RecordBatch, block: bytes, number: int, *, limit: int, origin: Origin | None) -> None:
    """Add the text of an HTTP response, or count why it has none; a body above `limit` bytes is too long."""
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
    return add_text(batch, text, repaired=repaired, origin=origin)


def decode_page(body: bytes, charset: str | None, *, is_html: bool) -> tuple[str, bool]:
    """Return the page, and whether something of it became U+FFFD.

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
    """Return the text of a page without navigation, forms and the like, a paragraph or list item to a line.

    Raises ValueError if the page cannot be parsed.
    """
    from resiliparse.extract.html2text import extract_plain_text
    from resiliparse.parse.html import HTMLTree

    tree = HTMLTree.parse(html)
    if html.count("<") > _MAX_DEPTH and (depth := _depth(tree)) > _MAX_DEPTH:
        raise ValueError(f"elements are nested {depth:,} deep")
    text: str = extract_plain_text(tree, preserve_formatting=True, main_content=True, alt_texts=False)
    return text


def _depth(tree: Any) -> int:
    from resiliparse.parse.html import traverse_dom

    deepest = 0

    def note(context: Any) -> None:
        nonlocal deepest
        deepest = max(deepest, context.depth)

    traverse_dom(tree.document, note)
    return deepest


def cut_records(archive: BinaryIO, *, limit: int) -> Iterator[ArchiveRecord]:
    """Yield all records of an archive; of one above `limit` bytes only the beginning is held.

    Raises DamagedStream if the archive ends within a record, or none begins where one should.
    """
    while line := archive.readline(_HEADER_BYTES):
        if not line.strip():  # between two records
            continue
        if not line.startswith(b"WARC/"):
            raise DamagedStream("no WARC header where a record should begin")
        header = [line]
        while header[-1].strip():
            if sum(map(len, header)) >= _HEADER_BYTES:
                raise DamagedStream(f"a header has more than {_HEADER_BYTES:,} bytes")
            header.append(archive.readline(_HEADER_BYTES))
        if not header[-1]:
            raise DamagedStream(_ENDS_WITHIN)
        pairs = (line.partition(b":") for line in header[1:])
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        given = headers.get(b"content-length", b"none")
        if not given.isdigit() or len(given) > _LENGTH_DIGITS:
            raise DamagedStream(f"a Content-Length is {given[:50].decode('latin-1')}")
        length, too_long = int(given), None
        block = archive.read(length if length <= limit else min(length, RAW_BYTES))
        held = len(block)
        if length > limit:
            too_long = f"{length:,} bytes"
            block = (b"".join(header) + block)[:RAW_BYTES]
            while held < length and (more := archive.read(min(BATCH_BYTES, length - held))):
                held += len(more)
        if held < length:
            raise DamagedStream(_ENDS_WITHIN)
        yield ArchiveRecord(headers, block, too_long)
