"""Formats are recognised by content, and unsupported content is refused with a remedy."""

import gzip

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from backports import zstd
from unit.data.inputs.reading import COMPRESS, JSON_LINES, TEXTS, read, texts_of

from megatron_neobert.data.inputs.recognise import recognise
from megatron_neobert.data.inputs.records import MALFORMED_JSON, ReadSettings
from megatron_neobert.errors import DataError

TABLE = pa.table({"content": TEXTS})
WET = b"".join(
    b"WARC/1.0\r\nWARC-Type: conversion\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n%s\r\n\r\n"
    % (len(text.encode()), text.encode())
    for text in TEXTS
)


def in_memory(write):
    sink = pa.BufferOutputStream()
    write(sink)
    return sink.getvalue().to_pybytes()


def arrow_bytes(new_writer):
    def write(sink):
        with new_writer(sink, TABLE.schema) as writer:
            writer.write_table(TABLE)

    return in_memory(write)


CONTENT = {
    "parquet": in_memory(lambda sink: pq.write_table(TABLE, sink)),
    "arrow": arrow_bytes(pa.ipc.new_stream),
    "jsonl": JSON_LINES,
    "warc": WET,
}


def recognised(path, **settings):
    chunk = recognise(str(path), ReadSettings(**settings))
    return chunk.format, chunk.compression


@pytest.mark.parametrize("name", ["input.parquet", "input.jsonl.gz", "input.txt", "input"])
@pytest.mark.parametrize(("format", "content"), [*CONTENT.items(), ("arrow", arrow_bytes(pa.ipc.new_file))])
def test_format_is_recognised_by_content_whatever_the_name(tmp_path, name, format, content):
    path = tmp_path / name
    path.write_bytes(content)
    assert recognised(path) == (format, None)
    assert texts_of(path) == TEXTS


@pytest.mark.parametrize("format", ["jsonl", "warc"])
@pytest.mark.parametrize("compression", COMPRESS)
def test_format_is_recognised_in_every_compression(tmp_path, format, compression):
    (tmp_path / "input").write_bytes(COMPRESS[compression](CONTENT[format]))
    assert recognised(tmp_path / "input") == (format, compression)
    assert texts_of(tmp_path / "input") == TEXTS


@pytest.mark.parametrize(
    ("content", "format"),
    [
        (b"A plain text.\nWith two lines.\n", "text"),
        (b"\xef\xbb\xbfA plain text.", "text"),
        (b"[see above] and so on", "text"),
        (b" \n\n", "jsonl"),
        (b"not json\n" + JSON_LINES, "jsonl"),
        (b'["content"]\n' + JSON_LINES, "jsonl"),
        (b'{"content": "cut o\n' + JSON_LINES, "jsonl"),
        (b'{"content": "' + b"x" * 100_000 + b'"}\n', "jsonl"),  # longer than the head that is examined
        (b'{"content": NaN}\n{"content": "x"}', "jsonl"),
        (b"\xef\xbb\xbf" + JSON_LINES, "jsonl"),
    ],
)
def test_text_and_json_lines_are_distinguished(tmp_path, content, format):
    (tmp_path / "input").write_bytes(content)
    assert recognised(tmp_path / "input") == (format, None)


@pytest.mark.parametrize("is_compressed", [False, True])
@pytest.mark.parametrize(
    ("content", "query"),
    [
        (b'[{"content": "x"}]', "'.[]'"),
        (b'\xef\xbb\xbf [\n\n {"content": "x"}]', "'.[]'"),
        (b"[]", "'.[]'"),
        (b'{\n  "content": "x"\n}\n', "."),
        (b'{"url": "u",\n "content": "x"}\n', "."),
    ],
)
def test_json_that_spans_lines_is_refused_with_the_command_that_converts_it(tmp_path, content, query, is_compressed):
    path = tmp_path / "it is.json"
    path.write_bytes(gzip.compress(content) if is_compressed else content)
    command = f"gzip -dc '{path}' | jq -c {query}" if is_compressed else f"jq -c {query} '{path}'"
    with pytest.raises(DataError) as caught:
        read(path)
    assert f"convert it with {command} > '{path}.jsonl'" in str(caught.value)
    assert caught.value.exit_code == 65


def test_name_decides_if_no_line_is_an_object(tmp_path):
    for name in ("input.txt", "input.jsonl", "input.ndjson"):
        (tmp_path / name).write_bytes(b"one\ntwo\n")
    assert recognised(tmp_path / "input.txt") == ("text", None)
    assert recognised(tmp_path / "input.jsonl") == recognised(tmp_path / "input.ndjson") == ("jsonl", None)
    assert read(tmp_path / "input.jsonl").rejections == [(MALFORMED_JSON, 1), (MALFORMED_JSON, 2)]


def test_input_format_overrides_recognition_except_for_tables(tmp_path):
    (tmp_path / "input").write_bytes(JSON_LINES)
    assert texts_of(tmp_path / "input", input_format="text") == [JSON_LINES.decode()]
    with pytest.raises(DataError, match="input has no parquet header, but --input-format is parquet"):
        read(tmp_path / "input", input_format="parquet")


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (b"PK\x03\x04", "neither a supported format"),
        (b"a.jsonl" + bytes(250) + b"ustar\00000" + JSON_LINES, "neither a supported format"),  # a tar archive
        ('{"content": "x"}'.encode("utf-16"), "neither .*iconv -t UTF-8"),
        (bytes(range(256)) * 20, "neither a supported format nor UTF-8 text"),
        ("Привет, мир, как дела?".encode("koi8-r"), r"neither .* \(16 of its first 22 .* invalid\); .*iconv -t UTF-8"),
    ],
)
@pytest.mark.parametrize("name", ["input.jsonl", "input"])
def test_unsupported_content_is_refused_with_a_remedy(tmp_path, name, head, message):
    (tmp_path / name).write_bytes(head)
    with pytest.raises(DataError, match=f"{name} is {message}"):
        read(tmp_path / name)


PAGE = b"<!DOCTYPE html>\n<html><body>\n" + JSON_LINES + b"</body></html>\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("page.html", b"Only text.\n", "an HTML or XML page"),
        (
            "input.parquet",
            b"<html><h1>404 Not Found</h1></html>",
            "HTML or XML .*preprocess --input-format text",
        ),
        ("page", PAGE, "an HTML or XML page"),
        ("page.txt", b"\xef\xbb\xbf\n <HTML lang='en'>\nHello.", "an HTML or XML page"),
        ("dump", b'<?xml version="1.0"?>\n<mediawiki><page/></mediawiki>', "an HTML or XML page"),
        ("table.csv", b"id,content\n1,hello\n", "a CSV or TSV table; .*: write it again as parquet"),
        ("table.TSV.gz", b"id\tcontent\n1\thello\n", "a CSV or TSV table"),
    ],
)
def test_pages_and_csv_tables_are_refused_unless_input_format_is_text(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    with pytest.raises(DataError, match=f"{name} is {message}"):
        read(path)
    text = content.decode("utf-8-sig")
    assert texts_of(path, input_format="text") == [text]


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "jsonl.gz", "JSONL.ZST", "txt.bz2", "warc.xz"])
def test_empty_file_of_a_format_with_a_header_is_refused(tmp_path, suffix):
    (tmp_path / f"input.{suffix}").touch()
    with pytest.raises(DataError, match=rf"input\.{suffix} is empty, .*; fetch it again"):
        read(tmp_path / f"input.{suffix}")
    (tmp_path / "part-00000.jsonl").touch()  # control: Spark writes this for a partition without rows
    (tmp_path / "part.jsonl.gz").write_bytes(gzip.compress(b""))
    assert read(tmp_path / "part-00000.jsonl").numbers == read(tmp_path / "part.jsonl.gz").numbers == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (CONTENT["parquet"], "a gzip-compressed parquet file; decompress it"),
        (CONTENT["arrow"], "a gzip-compressed arrow file; decompress it"),
        (zstd.compress(JSON_LINES), "compressed twice"),
    ],
)
def test_content_that_is_compressed_twice_and_compressed_tables_are_refused(tmp_path, content, message):
    (tmp_path / "input").write_bytes(gzip.compress(content))
    with pytest.raises(DataError, match=message):
        read(tmp_path / "input")
