"""Web archives: every record gives the text of a page or is counted under a reason."""

import gzip
import sys
import zlib

import pytest
from unit.data.inputs.reading import compress_zstd, read

from megatron_neobert.data.inputs.records import Reason
from megatron_neobert.errors import DataError

pytest.importorskip("fastwarc")
pytest.importorskip("resiliparse")

HTTP = b"application/http; msgtype=response"


def record(kind, block, content_type=HTTP, *, length=None):
    header = (
        f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Record-ID: <urn:uuid:1>\r\nWARC-Date: 2024-01-01T00:00:00Z\r\n"
        f"Content-Type: {content_type.decode()}\r\nContent-Length: {len(block) if length is None else length}\r\n\r\n"
    )
    return header.encode() + block + b"\r\n\r\n"


def http(body, content_type="text/html", *, status="200 OK", more=""):
    return f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\n{more}\r\n".encode() + body


def page(text, content_type="text/html; charset=utf-8", **facts):
    return record("response", http(f"<html><body><p>{text}</p></body></html>".encode(), content_type, **facts))


BEFORE, AFTER = page("The page before."), page("The page after.")


def read_between(tmp_path, *records, **settings):
    """Read an archive with these records between two good records, and return the result without the good texts."""
    (tmp_path / "input").write_bytes(BEFORE + b"".join(records) + AFTER)
    reading = read(tmp_path / "input", **settings)
    assert reading.texts[0] == "The page before."
    assert reading.texts[-1] == "The page after."
    reading.texts = reading.texts[1:-1]
    return reading


def text_of(tmp_path, *records):
    reading = read_between(tmp_path, *records)
    assert (reading.rejected, reading.dropped) == ([], {})
    (text,) = reading.texts
    return text


def test_main_text_is_taken_without_navigation_and_with_its_paragraphs(tmp_path):
    html = """<html><head><title>Title</title><style>p {color: red}</style><script>var x = 1;</script></head><body>
      <nav><ul><li><a href="/">Home</a><li><a href="/more">More</a></ul></nav>
      <main><article><h1>Über uns</h1><p>First <b>bold</b> &amp; plain\n   text.</p><p>Second.</p>
      <pre>a\n  b</pre><img src="x.png" alt="A picture"></article></main>
      <footer>Copyright</footer></body></html>"""
    text = text_of(tmp_path, record("response", http(html.encode())))
    assert text == "Über uns\n\nFirst bold & plain text.\n\nSecond.\n\na\n  b"


LONG = b"<html><body><p>" + b" ".join(b"Whale %d." % number for number in range(200)) + b"</p></body></html>"
PACKED = gzip.compress(LONG, mtime=0)
CHUNKED = b"".join(b"%x;x=y\r\n%s\r\n" % (len(part), part) for part in (LONG[:500], LONG[500:])) + b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ("Content-Encoding: gzip", PACKED),
        ("Content-Encoding: x-gzip", PACKED),
        ("Content-Encoding: deflate", zlib.compress(LONG)),
        ("Content-Encoding: deflate", zlib.compress(LONG)[2:-4]),
        ("Content-Encoding: zstd", compress_zstd(LONG)),
        ("Content-Encoding: deflate, gzip", gzip.compress(zlib.compress(LONG))),
        ("Transfer-Encoding: chunked", CHUNKED),
        ("Content-Encoding: gzip\r\nTransfer-Encoding: chunked", b"%x\r\n%s\r\n0\r\n\r\n" % (len(PACKED), PACKED)),
        # Stored decoded, under the headers of the server.
        *((f"Content-Encoding: {encoding}", LONG) for encoding in ("gzip", "deflate", "br", "zstd", "none", "UTF-8")),
        ("Transfer-Encoding: chunked", LONG),
        ("Content-Encoding: gzip\r\nTransfer-Encoding: chunked", LONG),
        ("Content-Encoding: gzip\r\nTransfer-Encoding: chunked", CHUNKED),
    ],
)
def test_a_response_gives_its_text_whether_its_body_is_stored_encoded_or_decoded(tmp_path, headers, body):
    text = text_of(tmp_path, record("response", http(body, more=f"{headers}\r\n")))
    assert text.split() == [word for number in range(200) for word in ("Whale", f"{number}.")]


@pytest.mark.parametrize(
    ("headers", "body"),
    [("Content-Encoding: gzip", PACKED[:-200]), ("Transfer-Encoding: chunked", CHUNKED[:-900]), ("X: y", LONG[:-900])],
)
def test_a_truncated_body_is_read_as_far_as_it_goes(tmp_path, headers, body):
    text = text_of(tmp_path, record("response", http(body, more=f"{headers}\r\n")))
    assert text.startswith("Whale 0. Whale 1.") and 30 < text.count("Whale") < 190


GERMAN = "<p>Schöne Grüße aus München, größter Ort der Überlegung</p>"
JAPANESE = "<p>これは日本語のページです</p>"
EUC_JP = b"<meta charset=euc-jp>" + JAPANESE.encode("euc-jp")


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (http(b"1 < 2 <b>stays</b>\n", "text/plain"), "1 < 2 <b>stays</b>\n"),
        (b"HTTP/2 200 \r\ncontent-type: text/html\r\n\r\n<p>New.</p>", "New."),
        (b"HTTP/1.1 200 OK\nContent-Type: text/html\n\n<p>One\n\nline.", "One line."),
        (b"HTTP/1.1 200 OK\r\nX: y\r\n\r\n<!DOCTYPE html><p>Untyped.", "Untyped."),
        (http(GERMAN.encode("latin-1"), "text/html; charset=ISO-8859-1"), GERMAN[3:-4]),
        (http(GERMAN.encode("latin-1")), GERMAN[3:-4]),  # guessed
        (http(GERMAN.encode(), "text/html; charset=ISO-8859-1"), GERMAN[3:-4]),  # the server is wrong
        (http(GERMAN.encode("utf-16")), GERMAN[3:-4]),
        (http(EUC_JP, "text/html; charset=nonsense"), JAPANESE[3:-4]),
        (http(JAPANESE.encode("iso2022_jp"), "text/html; charset=ISO-2022-JP"), JAPANESE[3:-4]),
    ],
)
def test_responses_of_any_form_and_encoding_give_their_text(tmp_path, block, text):
    assert text_of(tmp_path, record("response", block)) == text


def test_wet_records_are_unchanged_texts_and_need_no_fastwarc(tmp_path, monkeypatch):
    texts = ["Grüße\n東京 <b>\n", "  zweiter  "]
    blocks = [record("conversion", text.encode(), b"text/plain") for text in texts]
    blocks += [record("conversion", b"\xff", b"text/plain"), record("conversion", b" \n", b"text/plain")]
    (tmp_path / "input").write_bytes(record("warcinfo", b"x", b"application/warc-fields") + b"".join(blocks))
    monkeypatch.setitem(sys.modules, "fastwarc.warc", None)
    reading = read(tmp_path / "input")
    assert reading.texts == [*texts, "\ufffd"]
    assert reading.dropped == {Reason.NOT_A_RESPONSE: 1, Reason.EMPTY_TEXT: 1}


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (record("request", b"GET / HTTP/1.1\r\n\r\n", b"application/http; msgtype=request"), Reason.NOT_A_RESPONSE),
        (record("resource", b"<p>x", b"text/html"), Reason.NOT_A_RESPONSE),
        (page("gone", status="404 Not Found"), Reason.HTTP_STATUS),
        (record("response", http(b"%PDF", "application/pdf")), Reason.NOT_HTML),
        (record("response", b"HTTP/1.1 200 OK\r\nX: y\r\n\r\n<p>x"), Reason.NOT_HTML),  # without a content type
        (page("<script>only()</script>"), Reason.EMPTY_TEXT),
    ],
)
def test_record_without_a_text_is_dropped_under_its_reason(tmp_path, block, reason):
    reading = read_between(tmp_path, block)
    assert (reading.texts, reading.rejected, reading.dropped) == ([], [], {reason: 1})
    assert reading.numbers == 3


NEVER_GZIP = http(bytes(range(256)), more="Content-Encoding: gzip\r\n")


@pytest.mark.parametrize(
    ("block", "detail"),
    [
        (record("response", b""), "no HTTP status"),
        (record("response", NEVER_GZIP), "HTTP: neither gzip nor text"),
        (record("response", http(b"<div>" * 10_000 + b"deep")), "HTML: elements are nested 10,"),
    ],
)
def test_malformed_record_is_rejected_and_its_neighbours_are_kept(tmp_path, block, detail):
    for content in (BEFORE + block + AFTER, b"".join(map(gzip.compress, (BEFORE, block, AFTER)))):
        (tmp_path / "input").write_bytes(content)
        reading = read(tmp_path / "input")
        assert reading.texts == ["The page before.", "The page after."]
        (rejected,) = reading.rejected
        assert (rejected.reason, rejected.number) == (Reason.MALFORMED_RECORD, 2)
        assert rejected.detail.startswith(detail) and rejected.raw[:50] in block


@pytest.mark.parametrize(
    ("block", "detail"),
    [
        (record("response", b"x" * 50, length=200_000), "ends within"),
        (record("response", b"x" * 50, length="many"), "a Content-Length is many"),
        (record("response", b"x").replace(b"Content-Length", b"Other"), "a Content-Length is missing"),
        (b"\x00" * 200_000 + b"\r\n", "no WARC header"),
        (b"WARC/1.0\r\n" + b"X: y\r\n" * 20_000 + b"\r\n", "a header has more than 65,536 bytes"),
    ],
)
def test_archive_is_damaged_after_a_record_of_the_wrong_length(tmp_path, block, detail):
    for content in (BEFORE + block + AFTER, b"".join(map(gzip.compress, (BEFORE, block, AFTER)))):
        (tmp_path / "input").write_bytes(content)
        with pytest.raises(DataError, match=f"damaged after record [12] .*{detail}"):
            read(tmp_path / "input", input_format="warc")


def test_page_below_the_depth_limit_is_read_with_thousands_of_elements_that_are_not_nested(tmp_path):
    drawing = b"<svg>" + b"<path d='M0 0'/>" * 3000 + b"</svg>"
    body = b"<div>" * 1000 + b"<br>word " * 3000 + drawing + b"</div>" * 1000
    assert text_of(tmp_path, record("response", http(body))).count("word") == 3000


def test_too_long_record_is_rejected_whether_compressed_or_not(tmp_path):
    long = b"<p>" + b"word " * 100_000
    blocks = [http(long), http(gzip.compress(long), more="Content-Encoding: gzip\r\n")]
    reading = read_between(tmp_path, *(record("response", block) for block in blocks), max_document_bytes=200_000)
    assert reading.rejections == [(Reason.TOO_LONG, 2), (Reason.TOO_LONG, 3)]
    assert reading.rejected[0].detail == f"{len(blocks[0]):,} bytes"
    assert reading.rejected[1].detail == "more than 200,000 bytes"


@pytest.mark.parametrize("is_compressed", [False, True])
def test_truncated_archive_is_refused_wherever_it_is_cut(tmp_path, is_compressed):
    records = [page(f"Page {number}.") for number in range(3)]
    if is_compressed:
        records = [gzip.compress(record, mtime=0) for record in records]
    content = b"".join(records)
    end = len(content) if is_compressed else len(content) - 4  # the line ends after the last record may be missing
    start = len(content) - len(records[2])
    message = r"input: the (gzip stream|warc file) is truncated .* (after record [23]|in the first 64 KiB) .*fetch"
    for cut in range(start + 1, end, 7):
        (tmp_path / "input").write_bytes(content[:cut])
        with pytest.raises(DataError, match=message):
            read(tmp_path / "input", input_format="warc")
    (tmp_path / "input").write_bytes(content[:start])  # control: a cut between two records cannot be detected
    assert len(read(tmp_path / "input").texts) == 2
