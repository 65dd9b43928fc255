"""Shards in, documents and accounted rejects out."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_neobert.data.text_shards import (
    EMPTY_TEXT,
    MALFORMED_JSON,
    MISSING_KEY,
    NOT_A_STRING,
    NULL_TEXT,
    Document,
    ShardPart,
    check_text_key,
    find_shards,
    read_part,
    recognise_format,
    split_into_parts,
)
from megatron_neobert.errors import DataError, MissingInputError

TEXTS = ["first text", "Grüße 東京 🚀", "third\nwith two lines"]
JSON_LINES = "".join(json.dumps({"content": text, "url": "u"}) + "\n" for text in TEXTS).encode()


def read(path, text_key="content"):
    return [record for part in split_into_parts(path) for record in read_part(part, text_key=text_key)]


def texts_of(path, text_key="content"):
    records = read(path, text_key)
    assert all(isinstance(record, Document) for record in records), records
    return [record.text for record in records]


def write_parquet(path, values, arrow_type=None, **options):
    pq.write_table(pa.table({"content": pa.array(values, arrow_type), "n": list(range(len(values)))}), path, **options)
    return path


@pytest.mark.parametrize("name", ["shard.parquet", "shard.jsonl", "shard.gz", "shard"])
@pytest.mark.parametrize("form", ["parquet", "jsonl", "gzip"])
def test_format_is_recognised_by_content_whatever_the_name(tmp_path, name, form):
    path = tmp_path / name
    if form == "parquet":
        write_parquet(path, TEXTS)
    else:
        path.write_bytes(JSON_LINES if form == "jsonl" else gzip.compress(JSON_LINES))
    assert recognise_format(path) == form
    assert texts_of(path) == TEXTS


@pytest.mark.parametrize(
    ("line", "reason", "detail"),
    [
        (b'{"content": "cut o', MALFORMED_JSON, "column 13: Unterminated string"),
        (b"not json", MALFORMED_JSON, "column 1"),
        (b'["content"]', MALFORMED_JSON, "expected an object, found list"),
        (b'{"content": ' + b"9" * 5000 + b"}", MALFORMED_JSON, "5000 digits"),
        (b"[" * 100_000, MALFORMED_JSON, "recursion"),
        (b'{"text": "x", "url": "y"}', MISSING_KEY, "no key 'content'; keys found: text, url"),
        (b'{"content": null}', NULL_TEXT, "null"),
        (b'{"content": 3}', NOT_A_STRING, "found int"),
        (b'{"content": ["x"]}', NOT_A_STRING, "found list"),
        (b'{"content": ""}', EMPTY_TEXT, "0 characters"),
        (b'{"content": " \\t\\n\\u00a0"}', EMPTY_TEXT, "4 characters"),
    ],
)
def test_bad_line_is_rejected_with_reason_and_line_between_its_good_neighbours(tmp_path, line, reason, detail):
    path = tmp_path / "shard.jsonl"
    path.write_bytes(b'{"content": "before"}\n' + line + b'\n{"content": "after"}\n')
    before, rejected, after = read(path)
    assert (before.text, before.position, after.text, after.position) == ("before", "line 1", "after", "line 3")
    assert (rejected.reason, rejected.position) == (reason, "line 2")
    assert detail in rejected.detail


def test_bad_parquet_row_is_rejected_with_its_row_counted_from_zero(tmp_path):
    path = write_parquet(tmp_path / "shard", ["a", None, "", "b"], row_group_size=2)
    first, null, empty, last = read(path)
    assert (first.text, first.position, last.text, last.position) == ("a", "row 0", "b", "row 3")
    assert (null.reason, null.position, empty.reason, empty.position) == (NULL_TEXT, "row 1", EMPTY_TEXT, "row 2")


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf" + JSON_LINES,  # byte order mark
        JSON_LINES.replace(b"\n", b"\r\n"),
        JSON_LINES.replace(b"\n", b"\n\n  \n"),  # blank lines hold no record
        JSON_LINES.rstrip(b"\n"),
        JSON_LINES.replace(b'"url": "u"', b'"url": NaN, "url": Infinity'),  # keys nobody asks for
    ],
)
def test_harmless_variants_of_json_lines_give_the_same_texts(tmp_path, content):
    path = tmp_path / "shard.jsonl"
    path.write_bytes(content)
    assert texts_of(path) == TEXTS


def test_last_of_duplicate_json_keys_counts(tmp_path):
    path = tmp_path / "shard.jsonl"
    path.write_bytes(b'{"content": "a", "content": "b"}')
    assert texts_of(path) == ["b"]


@pytest.mark.parametrize(
    ("line", "text", "repaired"),
    [
        (b'{"content": "a\xff\xfeb"}', "a\ufffd\ufffdb", True),
        (b'{"content": "a\\ud800b"}', "a\ufffdb", True),  # half a surrogate pair
        (b'{"content": "a\\ud83d\\ude80b"}', "a🚀b", False),  # a whole one
        (b'{"content": "a\\u0000\\u200b\\u202eb"}', "a\0\u200b\u202eb", False),
    ],
)
def test_only_what_no_text_can_hold_is_replaced(tmp_path, line, text, repaired):
    path = tmp_path / "shard.jsonl"
    path.write_bytes(line)
    (document,) = read(path)
    assert (document.text, document.repaired, document.utf8_bytes) == (text, repaired, len(text.encode()))


def test_invalid_utf8_in_a_parquet_string_column_is_replaced(tmp_path):
    offsets, content = pa.py_buffer(b"\0\0\0\0\3\0\0\0"), pa.py_buffer(b"a\xffb")
    column = pa.Array.from_buffers(pa.string(), 1, [None, offsets, content])
    pq.write_table(pa.table({"content": column}), tmp_path / "shard")
    (document,) = read(tmp_path / "shard")
    assert (document.text, document.repaired) == ("a\ufffdb", True)


@pytest.mark.parametrize(
    "arrow_type",
    [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.dictionary(pa.int32(), pa.string())],
    ids=str,
)
def test_every_arrow_type_that_holds_text_is_read(tmp_path, arrow_type):
    values = [text.encode() for text in TEXTS] if pa.types.is_binary(arrow_type) else TEXTS
    assert texts_of(write_parquet(tmp_path / "shard", values, arrow_type)) == TEXTS


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (b"\x28\xb5\x2f\xfd" + b"x" * 20, "zstd-compressed.*zstd -d"),
        (b"BZh91AY", "bzip2-compressed"),
        (b"\xfd7zXZ\x00", "xz-compressed"),
        (b"PK\x03\x04", "a zip archive"),
        ('{"content": "x"}'.encode("utf-16"), "UTF-16 text.*iconv -f UTF-16"),
    ],
)
def test_format_that_is_not_read_is_named_with_a_remedy(tmp_path, head, message):
    (tmp_path / "shard.jsonl").write_bytes(head)
    with pytest.raises(DataError, match=message):
        split_into_parts(tmp_path / "shard.jsonl")


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_damaged_gzip_stream_is_refused_with_the_last_good_line(tmp_path, damage):
    lines = b"".join(json.dumps({"content": f"{number} " * 50}).encode() + b"\n" for number in range(20_000))
    packed = bytearray(gzip.compress(lines))
    if damage == "truncated":
        del packed[len(packed) // 2 :]
    else:
        packed[len(packed) // 2] ^= 0xFF
    (tmp_path / "shard.gz").write_bytes(packed)
    with pytest.raises(DataError, match=r"shard\.gz: the gzip stream .* after line \d+ .*fetch the shard again"):
        read(tmp_path / "shard.gz")


def test_truncated_parquet_file_is_refused(tmp_path):
    path = write_parquet(tmp_path / "shard", TEXTS)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="damaged parquet file"):
        read(path)


def test_parquet_page_with_flipped_bytes_is_refused(tmp_path):
    path = write_parquet(tmp_path / "shard", [f"{number} text" for number in range(1000)])
    content = bytearray(path.read_bytes())
    content[100:200] = bytes(100)
    path.write_bytes(content)
    with pytest.raises(DataError, match="damaged parquet file"):
        read(path)


def test_missing_parquet_column_is_refused_with_the_columns_there_are(tmp_path):
    path = write_parquet(tmp_path / "shard", TEXTS)
    for action in (
        lambda part: check_text_key(part, text_key="text"),
        lambda part: list(read_part(part, text_key="text")),
    ):
        with pytest.raises(DataError, match=r"no column 'text'; its text columns: content; choose one with --text-key"):
            action(split_into_parts(path)[0])


def test_parquet_column_of_numbers_is_refused_with_its_type(tmp_path):
    with pytest.raises(DataError, match="column 'n' holds int64, not strings; its text columns: content"):
        read(write_parquet(tmp_path / "shard", TEXTS), text_key="n")


def test_parts_of_a_large_parquet_shard_give_the_records_of_the_whole(tmp_path):
    path = write_parquet(tmp_path / "shard", [f"text {number}" for number in range(70)], row_group_size=10)
    one_group = path.stat().st_size // 7
    parts = split_into_parts(path, part_bytes=2 * one_group)
    assert len(parts) > 2
    assert [part.starts_shard for part in parts] == [True] + [False] * (len(parts) - 1)
    split = [record for part in parts for record in read_part(part, text_key="content")]
    assert split == list(read_part(ShardPart(path, "parquet"), text_key="content"))
    assert [record.position for record in split] == [f"row {number}" for number in range(70)]


def test_large_row_group_is_streamed_not_loaded(tmp_path):
    values = [f"{number} " + "x" * 10_000 for number in range(4000)]
    path = write_parquet(tmp_path / "shard", values, compression="none", use_dictionary=False)
    size = path.stat().st_size  # 40 MB in one row group
    before = pa.total_allocated_bytes()
    records = read_part(ShardPart(path, "parquet"), text_key="content")
    next(records)
    held = pa.total_allocated_bytes() - before
    records.close()
    with pq.ParquetFile(path) as shard:  # control: pyarrow's defaults hold the whole column chunk
        before = pa.total_allocated_bytes()
        next(shard.iter_batches(1, columns=["content"]))
        held_by_default = pa.total_allocated_bytes() - before
    assert held < 0.5 * size < 0.9 * size < held_by_default  # measured: 12, 40 and 40 MB; 10 of a group of 313 MB


def test_empty_files_hold_no_records(tmp_path):
    (tmp_path / "empty.jsonl").write_bytes(b"")
    write_parquet(tmp_path / "empty.parquet", [], pa.string())
    assert read(tmp_path / "empty.jsonl") == read(tmp_path / "empty.parquet") == []


def test_shards_are_sorted_within_a_pattern_hidden_ones_left_out_and_repeated_ones_read_once(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "deep/c.jsonl", ".hidden", "_SUCCESS", ".cache/d.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    a, b, c = (tmp_path / name for name in ("a.jsonl", "b.jsonl", "deep/c.jsonl"))
    assert find_shards([str(tmp_path)]) == [a, b, c]
    assert find_shards([str(tmp_path / "*.jsonl")]) == [a, b]
    assert find_shards([str(tmp_path / "**" / "*.jsonl")]) == [a, b, c]
    assert find_shards([str(b), str(tmp_path)]) == [b, a, c]


def test_name_with_brackets_that_exists_is_no_glob(tmp_path):
    (tmp_path / "shard[1].jsonl").touch()
    assert find_shards([str(tmp_path / "shard[1].jsonl")]) == [tmp_path / "shard[1].jsonl"]


@pytest.mark.parametrize("pattern", ["*.parquet", "missing.jsonl", "empty"])
def test_pattern_without_a_file_is_missing_input(tmp_path, pattern):
    (tmp_path / "empty").mkdir()
    with pytest.raises(MissingInputError, match=f"--input .*{pattern.lstrip('*')}: no file matches"):
        find_shards([str(tmp_path / pattern)])
