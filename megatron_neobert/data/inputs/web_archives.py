"""Read web archives: WARC (HTTP responses) and WET (texts that were extracted from pages).

This module splits the archive into records by their Content-Length, to detect truncated archives, which no library
does. If no record begins where the previous record ends, the archive is damaged. fastwarc parses the HTTP headers,
and resiliparse extracts the main text of an HTML page.
"""

import io
import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, BinaryIO, NamedTuple

from megatron_neobert.data.inputs.input_reader import BATCH_BYTES, Chunk, DamagedStream, InputReader
from megatron_neobert.data.inputs.records import RAW_BYTES, Fields, ReadSettings, Reason, RecordBatch

_LONGEST_HEADER_BYTES = 64 << 10
_LONGEST_LENGTH_DIGITS = 18  # every number of 18 digits fits into int64
_ENDS_WITHIN = "it ends within a record"
_LONGEST_BATCH_RECORDS = 1024  # in one RecordBatch
_HTML = ("text/html", "application/xhtml+xml")
_PAGE = re.compile(rb"\s*<(!doctype\s+html|html|head|body)\b", re.IGNORECASE)
_CHUNK_HEADER = re.compile(rb"([0-9a-fA-F]{1,8})[ \t]*(?:;[^\r\n]*)?\r?\n")
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
# Control characters without white space and escape. A tenth of compressed bytes are such characters.
_CONTROL = bytes({*range(32)} - {*b"\t\n\r\f\v\x1b"})
_LARGEST_CONTROL_SHARE = 0.02
_WARC_HEADER = b"WARC/1.0\r\nWARC-Type: response\r\nContent-Type: application/http\r\nContent-Length: %d\r\n\r\n"
# Extraction of the main text takes time proportional to the square of the nesting depth: 0.07 s for this depth, 300 s
# for a depth of 100,000.
_MAX_DEPTH = 2000


class ArchiveRecord(NamedTuple):
    """One record of an archive."""

    headers: dict[bytes, bytes]  # names in lower case
    length: int  # of the content after the headers, in bytes
    block: bytes  # the content; if the record is too long, first RAW_BYTES of headers and content


def read_archive(chunk: Chunk, settings: ReadSettings) -> Iterator[RecordBatch]:
    """Yield the texts of HTTP responses and WET records in batches. Other records are counted in `dropped`.

    If the archive is damaged, yield the records before the damage, then raise DamagedStream.
    """
    batch, limit = RecordBatch(), settings.max_document_bytes
    with InputReader(chunk) as stream:
        try:
            archive = io.BufferedReader(stream, BATCH_BYTES)
            for number, record in enumerate(cut_records(archive, limit=limit), start=1):
                values = [(key, record.headers.get(key.lower().encode())) for key in settings.record_keys]
                fields = {key: value if value is None else value.decode(errors="replace") for key, value in values}
                kind = record.headers.get(b"warc-type")
                content_type = record.headers.get(b"content-type", b"").lower()
                if record.length > limit:
                    batch.reject(Reason.TOO_LONG, number, f"{record.length:,} bytes", record.block)
                elif kind == b"response" and content_type.startswith(b"application/http"):
                    _add_response(batch, record.block, number, fields, limit=limit)
                elif kind == b"conversion" and content_type.startswith(b"text/"):
                    batch.add_utf8(record.block, number, fields)
                else:
                    is_page = kind in (b"response", b"conversion")
                    batch.dropped[Reason.NOT_HTML if is_page else Reason.NOT_A_RESPONSE] += 1
                batch.numbers += 1
                batch.field_names = [name.decode("latin-1") for name in record.headers]
                batch_bytes = batch.utf8_bytes + sum(len(rejected.raw) for rejected in batch.rejected)
                if batch_bytes >= BATCH_BYTES or batch.numbers >= _LONGEST_BATCH_RECORDS:
                    batch.progress = stream.progress
                    yield batch
                    batch = RecordBatch()
        except DamagedStream:
            yield batch  # the message counts its records
            raise
        batch.progress = stream.progress
    if batch.numbers:
        yield batch


def _add_response(batch: RecordBatch, block: bytes, number: int, fields: Fields, *, limit: int) -> None:
    """Add the text of an HTTP response (`block`: status line, headers, body) to the batch, or drop or reject it.

    Responses with another status than 200, or with content that is neither HTML nor text, are dropped. Malformed
    responses, and bodies of more than `limit` decoded bytes, are rejected. A truncated body is read as far as it goes.
    """
    from fastwarc.warc import WarcRecord

    try:
        record = WarcRecord.from_bytes(_WARC_HEADER % len(block) + block)
        record.parse_http(quirks_mode=True)  # accepts lines that end without a carriage return
        status = record.http_headers.status_code if record.http_headers else None
        if status is None:
            return batch.reject(Reason.MALFORMED_RECORD, number, "no HTTP status", block)
        if status != 200:
            batch.dropped[Reason.HTTP_STATUS] += 1
            return None
        headers = {name.lower(): value.lower() for name, value in record.http_headers.astuples()}
        body = record.reader.read()
        if "chunked" in headers.get("transfer-encoding", ""):
            body = join_chunks(body)
        content_type = (record.http_content_type or "").lower()
        if not headers.get("content-type") and _PAGE.match(body):
            content_type = _HTML[0]
        if content_type not in (*_HTML, "text/plain"):
            batch.dropped[Reason.NOT_HTML] += 1
            return None
        for encoding in reversed(headers.get("content-encoding", "").split(",")):
            body = decompress(body, encoding.strip(), limit=limit)
    except OSError as error:  # fastwarc cannot parse the response
        return batch.reject(Reason.MALFORMED_RECORD, number, f"HTTP: {error}", block)
    encodings, text_bytes = headers.get("content-encoding"), len(body.translate(None, _CONTROL))
    if encodings and text_bytes < (1 - _LARGEST_CONTROL_SHARE) * len(body) and not body.startswith(_UTF_16):
        return batch.reject(Reason.MALFORMED_RECORD, number, f"HTTP: neither {encodings} nor text", block)
    if len(body) > limit:
        return batch.reject(Reason.TOO_LONG, number, f"more than {limit:,} bytes", block)
    text = decode_page(body, record.http_charset, is_html=content_type in _HTML)
    if content_type in _HTML:
        try:
            text = main_text(text)
        except ValueError as error:
            return batch.reject(Reason.MALFORMED_RECORD, number, f"HTML: {error}", block)
    return batch.add_text(text, number, fields)


def join_chunks(body: bytes) -> bytes:
    """Join the chunks of a body that was sent with chunked `Transfer-Encoding`.

    Archives often join the chunks but keep the server's header, so a body without chunks is returned unchanged.
    """
    chunks, at = [], 0
    while (header := _CHUNK_HEADER.match(body, at)) and (size := int(header[1], 16)):
        at = header.end() + size
        chunks.append(body[header.end() : at])
        at += len(b"\r\n") if body.startswith(b"\r\n", at) else 0
    return b"".join(chunks) if chunks or header else body


def decompress(body: bytes, encoding: str, *, limit: int) -> bytes:
    """Return up to `limit` + 1 decompressed bytes of a body with this `Content-Encoding`.

    Archives often decompress the body but keep the server's header, so a body that cannot be decompressed is returned
    unchanged. For a truncated body, the part that can be decompressed is returned.
    """
    content = b""
    if encoding == "br":
        from fastwarc.stream_io import BrotliReader

        with suppress(OSError):
            content = BrotliReader(io.BytesIO(body)).read(limit + 1)
    elif encoding == "zstd":
        from backports import zstd

        with suppress(zstd.ZstdError):
            content = zstd.ZstdDecompressor().decompress(body, limit + 1)
    elif encoding in ("gzip", "x-gzip", "deflate"):
        # 47: a gzip or zlib header; -15: none, which some servers call deflate.
        for window_bits in (47, -15):
            with suppress(zlib.error):
                content = content or zlib.decompressobj(window_bits).decompress(body, limit + 1)
    return content or body


def decode_page(body: bytes, charset: str | None, *, is_html: bool) -> str:
    """Return the text of a page, with U+FFFD for invalid bytes.

    The encoding is UTF-8 if the body is valid UTF-8 without NUL and escape bytes. Otherwise, the first of these
    that exists is used: a UTF-16 byte order mark, the server's known `charset`, an HTML page's declaration, a guess.
    """
    from resiliparse.parse.encoding import detect_encoding, map_encoding_to_html5

    # UTF-8 comes first because servers and pages often declare the default of their software, and other encodings are
    # not valid UTF-8 by chance. The exceptions are UTF-16 and ISO-2022, whose bytes are ASCII, with NUL or escape.
    if b"\0" not in body and b"\x1b" not in body:
        with suppress(UnicodeDecodeError):
            return body.decode("utf-8-sig")
    encoding = "utf-16" if body.startswith(_UTF_16) else None
    encoding = encoding or map_encoding_to_html5(charset or "", fallback_utf8=False)
    encoding = encoding or detect_encoding(body, from_html_meta=is_html) or "utf-8"
    return body.decode(encoding, errors="replace")


def main_text(html: str) -> str:
    """Return the main text of a page without navigation and forms, with one line per paragraph or list item.

    Raise ValueError if elements are nested more than _MAX_DEPTH deep.
    """
    from resiliparse.extract.html2text import extract_plain_text
    from resiliparse.parse.html import HTMLTree, traverse_dom

    tree: Any = HTMLTree.parse(html)
    if html.count("<") > _MAX_DEPTH:
        depths = {0}
        traverse_dom(tree.document, lambda context: depths.add(context.depth))
        if max(depths) > _MAX_DEPTH:
            raise ValueError(f"elements are nested {max(depths):,} deep")
    text: str = extract_plain_text(tree, preserve_formatting=True, main_content=True, alt_texts=False)
    return text


def cut_records(archive: BinaryIO, *, limit: int) -> Iterator[ArchiveRecord]:
    """Yield all records of a decompressed archive. Only the beginning of a record of more than `limit` bytes is kept.

    Raise DamagedStream if the archive ends within a record, has an invalid header, or contains data between records.
    """
    while line := archive.readline(_LONGEST_HEADER_BYTES):
        if not line.strip():  # between two records
            continue
        if not line.startswith(b"WARC/"):
            raise DamagedStream("no WARC header where a record should begin")
        header = [line]
        while header[-1].strip():
            if sum(map(len, header)) >= _LONGEST_HEADER_BYTES:
                raise DamagedStream(f"a header has more than {_LONGEST_HEADER_BYTES:,} bytes")
            header.append(archive.readline(_LONGEST_HEADER_BYTES))
        if not header[-1]:
            raise DamagedStream(_ENDS_WITHIN)
        pairs = (line.partition(b":") for line in header[1:])
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        declared = headers.get(b"content-length", b"missing")
        if not declared.isdigit() or len(declared) > _LONGEST_LENGTH_DIGITS:
            raise DamagedStream(f"a Content-Length is {declared[:50].decode('latin-1')}")
        length = int(declared)
        block = archive.read(length if length <= limit else min(length, RAW_BYTES))
        bytes_read = len(block)
        if length > limit:
            block = (b"".join(header) + block)[:RAW_BYTES]
            while bytes_read < length and (skipped := archive.read(min(BATCH_BYTES, length - bytes_read))):
                bytes_read += len(skipped)
        if bytes_read < length:
            raise DamagedStream(_ENDS_WITHIN)
        yield ArchiveRecord(headers, length, block)
