"""The text of a fetched page: fastwarc undoes what HTTP did to it, resiliparse takes the main text out of its HTML."""

import re
from typing import Any

from megatron_neobert.data.shards.records import HTTP_STATUS, MALFORMED_RECORD, NOT_HTML, TOO_LONG, RecordBatch
from megatron_neobert.data.shards.texts import add_text, reject
from megatron_neobert.errors import ConfigError

_HTML = ("text/html", "application/xhtml+xml")
_WARC_HEADER = b"WARC/1.0\r\nWARC-Type: response\r\nContent-Type: application/http\r\nContent-Length: %d\r\n\r\n"
_TAG = re.compile("<(/?)[a-zA-Z]")
# The time for finding the main text grows with the square of the depth: 0.07 s at this one, 300 s at 100,000.
_MAX_DEPTH = 2000


def add_response(batch: RecordBatch, block: bytes, number: int, *, limit: int) -> None:
    """Adds the text of an HTTP response, or counts why it has none; a body above `limit` bytes is too long.

    Raises:
        ConfigError: fastwarc or resiliparse is not installed.
    """
    _check_packages()
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
    except OSError as error:  # fastwarc's word for whatever it cannot parse; it reads from memory
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

    What is valid UTF-8 is UTF-8, whatever server and page say: no other encoding gives that by chance, and many
    declare the default of their software. Else the byte order mark counts, then the server, the page, a guess.
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


def _check_packages() -> None:
    try:
        import fastwarc.warc  # noqa: F401
        import resiliparse.extract.html2text
        import resiliparse.parse.encoding  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"reading WARC archives needs more packages ({error}): pip install 'megatron-neobert[warc]'"
        ) from error
