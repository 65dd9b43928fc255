"""A shard is what its content says, whatever its name."""

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


def found(path, **settings):
    part = recognise(str(path), ReadSettings(**settings))
    return part.format, part.compression


@pytest.mark.parametrize("name", ["shard.parquet", "shard.jsonl.gz", "shard.txt", "shard"])
@pytest.mark.parametrize(("form", "content"), [*CONTENT.items(), ("arrow", arrow_bytes(pa.ipc.new_file))])
def test_format_is_recognised_by_content_whatever_the_name(tmp_path, name, form, content):
    path = tmp_path / name
    path.write_bytes(content)
    assert found(path) == (form, None)
    assert texts_of(path) == TEXTS


@pytest.mark.parametrize("form", ["jsonl", "warc"])
@pytest.mark.parametrize("compression", COMPRESS)
def test_format_is_recognised_below_every_compression(tmp_path, form, compression):
    (tmp_path / "shard").write_bytes(COMPRESS[compression](CONTENT[form]))
    assert found(tmp_path / "shard") == (form, compression)
    assert texts_of(tmp_path / "shard") == TEXTS


@pytest.mark.parametrize(
    ("content", "form"),
    [
        (b"A plain text.\nWith two lines.\n", "text"),
        (b"\xef\xbb\xbfA plain text.", "text"),
        (b"[see above] and so on", "text"),
        (b" \n\n", "jsonl"),
        (b"not json\n" + JSON_LINES, "jsonl"),
        (b'["content"]\n' + JSON_LINES, "jsonl"),
        (b'{"content": "cut o\n' + JSON_LINES, "jsonl"),
        (b'{"content": "' + b"x" * 100_000 + b'"}\n', "jsonl"),  # the first line is longer than what is looked at
        (b'{"content": NaN}\n{"content": "x"}', "jsonl"),
        (b"\xef\xbb\xbf" + JSON_LINES, "jsonl"),
    ],
)
def test_text_and_json_lines_are_told_apart(tmp_path, content, form):
    (tmp_path / "shard").write_bytes(content)
    assert found(tmp_path / "shard") == (form, None)


@pytest.mark.parametrize("packed", [False, True])
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
def test_json_that_spans_lines_is_refused_with_the_command_that_converts_it(tmp_path, content, query, packed):
    path = tmp_path / "it is.json"
    path.write_bytes(gzip.compress(content) if packed else content)
    command = f"gzip -dc '{path}' | jq -c {query}" if packed else f"jq -c {query} '{path}'"
    with pytest.raises(DataError) as caught:
        read(path)
    assert f"convert it with {command} > '{path}.jsonl'" in str(caught.value)
    assert caught.value.exit_code == 65


def test_name_decides_where_no_line_is_an_object(tmp_path):
    for name in ("shard.txt", "shard.jsonl", "shard.ndjson"):
        (tmp_path / name).write_bytes(b"one\ntwo\n")
    assert found(tmp_path / "shard.txt") == ("text", None)
    assert found(tmp_path / "shard.jsonl") == found(tmp_path / "shard.ndjson") == ("jsonl", None)
    assert read(tmp_path / "shard.jsonl").faults == [(MALFORMED_JSON, 1), (MALFORMED_JSON, 2)]


def test_asked_format_counts_more_than_the_content(tmp_path):
    (tmp_path / "shard").write_bytes(JSON_LINES)
    assert texts_of(tmp_path / "shard", input_format="text") == [JSON_LINES.decode()]
    with pytest.raises(DataError, match="shard does not begin like parquet, which --input-format asks for"):
        read(tmp_path / "shard", input_format="parquet")


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (b"PK\x03\x04", "neither a format"),
        (b"a.jsonl" + bytes(250) + b"ustar\00000" + JSON_LINES, "neither a format"),  # a tar archive
        ('{"content": "x"}'.encode("utf-16"), "neither .*iconv -t UTF-8"),
        (bytes(range(256)) * 20, "neither a format that is read here"),
        (
            "Привет, мир, как дела?".encode("koi8-r"),
            r"neither .* \(16 of its first 22 characters are none\); .*iconv -t UTF-8",
        ),
    ],
)
@pytest.mark.parametrize("name", ["shard.jsonl", "shard"])
def test_content_that_is_not_read_is_refused_with_a_remedy(tmp_path, name, head, message):
    (tmp_path / name).write_bytes(head)
    with pytest.raises(DataError, match=f"{name} is {message}"):
        read(tmp_path / name)


PAGE = b"<!DOCTYPE html>\n<html><body>\n" + JSON_LINES + b"</body></html>\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("page.html", b"Only text.\n", "an HTML or XML page"),
        ("shard.parquet", b"<html><h1>404 Not Found</h1></html>", "an HTML or XML page; .*--input-format text"),
        ("page", PAGE, "an HTML or XML page"),
        ("page.txt", b"\xef\xbb\xbf\n <HTML lang='en'>\nHello.", "an HTML or XML page"),
        ("dump", b'<?xml version="1.0"?>\n<mediawiki><page/></mediawiki>', "an HTML or XML page"),
        ("table.csv", b"id,content\n1,hello\n", "a CSV or TSV table; .*: write it again as parquet"),
        ("table.TSV.gz", b"id\tcontent\n1\thello\n", "a CSV or TSV table"),
    ],
)
def test_pages_and_tables_are_no_plain_text_unless_asked_for(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    with pytest.raises(DataError, match=f"{name} is {message}"):
        read(path)
    text = content.decode("utf-8-sig")
    assert texts_of(path, input_format="text") == [text]


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "jsonl.gz", "JSONL.ZST", "txt.bz2", "warc.xz"])
def test_empty_file_whose_name_promises_more_is_refused(tmp_path, suffix):
    (tmp_path / f"shard.{suffix}").touch()
    with pytest.raises(DataError, match=rf"shard\.{suffix} is empty, .*; fetch the file again"):
        read(tmp_path / f"shard.{suffix}")
    (tmp_path / "part-00000.jsonl").touch()  # control: Spark writes these where a partition has no rows
    (tmp_path / "part.jsonl.gz").write_bytes(gzip.compress(b""))
    assert read(tmp_path / "part-00000.jsonl").numbers == read(tmp_path / "part.jsonl.gz").numbers == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (CONTENT["parquet"], "a gzip-compressed parquet file, which has to be decompressed"),
        (CONTENT["arrow"], "a gzip-compressed arrow file, which has to be decompressed"),
        (zstd.compress(JSON_LINES), "compressed twice"),
    ],
)
def test_compressed_content_that_is_compressed_or_a_table_is_refused(tmp_path, content, message):
    (tmp_path / "shard").write_bytes(gzip.compress(content))
    with pytest.raises(DataError, match=message):
        read(tmp_path / "shard")
