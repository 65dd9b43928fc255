"""Formats are recognised by content, and unsupported content is refused with a remedy."""

import gzip

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from backports import zstd
from unit.data.inputs.reading import JSON_LINES, TEXTS, read, texts_of, write_table

from megatron_neobert.data.inputs.recognise import recognise
from megatron_neobert.data.inputs.records import ReadSettings, Reason
from megatron_neobert.errors import DataError

TABLE = pa.table({"content": TEXTS})
WET = b"".join(
    b"WARC/1.0\r\nWARC-Type: conversion\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n%s\r\n\r\n"
    % (len(text.encode()), text.encode())
    for text in TEXTS
)


def in_memory(open_writer):
    sink = pa.BufferOutputStream()
    write_table(open_writer, sink, TABLE)
    return sink.getvalue().to_pybytes()


CONTENT = {
    "parquet": in_memory(pq.ParquetWriter),
    "arrow": in_memory(pa.ipc.new_stream),
    "jsonl": JSON_LINES,
    "warc": WET,
}


def recognised(path, **settings):
    chunk = recognise(str(path), ReadSettings(**settings))
    return chunk.format, chunk.compression


@pytest.mark.parametrize("name", ["input.parquet", "input.jsonl.gz", "input.txt", "input"])
@pytest.mark.parametrize(("format", "content"), [*CONTENT.items(), ("arrow", in_memory(pa.ipc.new_file))])
def test_format_is_recognised_by_content_whatever_the_name(tmp_path, name, format, content):
    path = tmp_path / name
    path.write_bytes(content)
    assert recognised(path) == (format, None)
    assert texts_of(path) == TEXTS


@pytest.mark.parametrize(
    ("content", "format"),
    [
        (b"A plain text.\nWith two lines.\n", "text"),
        (b"\xef\xbb\xbfA plain text.", "text"),
        (b" \n\n", "jsonl"),
        (b"not json\n" + JSON_LINES, "jsonl"),
        (b'{"content": "cut o\n' + JSON_LINES, "jsonl"),
        (b'{"content": "' + b"x" * 100_000 + b'"}\n', "jsonl"),  # longer than the head that is examined
        (b"\xef\xbb\xbf" + JSON_LINES, "jsonl"),
    ],
)
def test_text_and_json_lines_are_distinguished(tmp_path, content, format):
    (tmp_path / "input").write_bytes(content)
    assert recognised(tmp_path / "input") == (format, None)


@pytest.mark.parametrize("is_compressed", [False, True])
@pytest.mark.parametrize(("content", "query"), [(b'[{"content": "x"}]', "'.[]'"), (b'{\n  "content": "x"\n}\n', ".")])
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
    assert read(tmp_path / "input.jsonl").rejections == [(Reason.MALFORMED_JSON, 1), (Reason.MALFORMED_JSON, 2)]


def test_input_format_overrides_recognition_except_for_tables(tmp_path):
    (tmp_path / "input").write_bytes(JSON_LINES)
    assert texts_of(tmp_path / "input", input_format="text") == [JSON_LINES.decode()]
    with pytest.raises(DataError, match="input has no parquet header, but --input-format is parquet"):
        read(tmp_path / "input", input_format="parquet")


PAGE = b"<!DOCTYPE html>\n<html><body>\n" + JSON_LINES + b"</body></html>\n"
CYRILLIC = "Привет, мир, как дела?".encode("koi8-r")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("input", b"PK\x03\x04", "is neither a supported format"),
        ("tar.jsonl", b"a.jsonl" + bytes(250) + b"ustar\00000" + JSON_LINES, "is neither a supported format"),
        ("input.jsonl", '{"content": "x"}'.encode("utf-16"), "is neither .*iconv -t UTF-8"),
        ("input", CYRILLIC, r"is neither .* \(16 of its first 22 .* invalid\); .*iconv -t UTF-8"),
        ("input.parquet", b"<html><h1>404 Not Found</h1></html>", "is an HTML or XML page; .* --input-format text"),
        ("crawl", b"filedesc://crawl.arc 0.0.0.0 20080101 text/plain 73\n", "is an ARC archive; .* convert it to WARC"),
        ("paper", b"%PDF-1.7\n", "is a PDF document; .* extract its text"),
        ("page", PAGE, "is an HTML or XML page"),
        ("dump", b'<?xml version="1.0"?>\n<mediawiki><page/></mediawiki>', "is an HTML or XML page"),
        ("table.csv", b"id,content\n1,hello\n", "is a CSV or TSV table; .*: write it again as parquet"),
        *((f"input.{end}", b"", "is empty, .*; fetch it again") for end in ("parquet", "arrow", "JSONL.ZST")),
        ("input", gzip.compress(CONTENT["parquet"]), "a gzip-compressed parquet file; decompress it"),
        ("input", gzip.compress(zstd.compress(JSON_LINES)), "compressed twice"),
    ],
)
def test_unsupported_content_is_refused_with_a_remedy(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name}.*{message}"):
        read(tmp_path / name)


def test_pages_are_read_with_input_format_text_and_partitions_without_rows_are_empty(tmp_path):
    (tmp_path / "page").write_bytes(b"\xef\xbb\xbf" + PAGE)
    assert texts_of(tmp_path / "page", input_format="text") == [PAGE.decode()]
    (tmp_path / "part-00000.jsonl").touch()  # as Spark writes it
    (tmp_path / "part.jsonl.gz").write_bytes(gzip.compress(b""))
    assert read(tmp_path / "part-00000.jsonl").numbers == read(tmp_path / "part.jsonl.gz").numbers == 0
