"""JSON lines in, texts and accounted rejects out."""

import json

import pytest
from unit.data.shards.reading import TEXTS, read, texts_of

from megatron_neobert.data.shards.json_objects import _keys
from megatron_neobert.data.shards.records import (
    EMPTY_TEXT,
    MALFORMED_JSON,
    MISSING_KEY,
    NOT_A_STRING,
    NULL_TEXT,
    RAW_BYTES,
)

JSON_LINES = "".join(json.dumps({"content": text, "url": "u"}) + "\n" for text in TEXTS).encode()


@pytest.mark.parametrize(
    ("line", "reason", "detail"),
    [
        (b'{"content": "cut o', MALFORMED_JSON, "column 13: Unterminated string"),
        (b"not json", MALFORMED_JSON, "column 1"),
        (b'["content"]', MALFORMED_JSON, "expected an object, found list"),
        (b'{"content": ' + b"9" * 5000 + b"}", MALFORMED_JSON, "5000 digits"),
        (b"[" * 100_000, MALFORMED_JSON, "recursion"),
        (b'{"content": "raw\ttab"}', MALFORMED_JSON, "Invalid control character"),
        (b'{"text": "x", "url": "y"}', MISSING_KEY, "no key 'content'; keys found: text, url"),
        (b'{"data": {"text": "x", "n": {}}, "url": "y"}', MISSING_KEY, "keys found: data.n, data.text, url"),
        (b'{"a": {"b": {"c": {"d": 1}}}}', MISSING_KEY, "keys found: a.b"),
        (b"{}", MISSING_KEY, "keys found: none"),
        (b'{"content": null}', NULL_TEXT, "null"),
        (b'{"content": 3}', NOT_A_STRING, "found int"),
        (b'{"content": ["x"]}', NOT_A_STRING, "found list"),
    ],
)
def test_bad_line_is_rejected_with_reason_and_line_between_its_good_neighbours(tmp_path, line, reason, detail):
    (tmp_path / "shard.jsonl").write_bytes(b'{"content": "before"}\n' + line + b'\n{"content": "after"}\n')
    reading = read(tmp_path / "shard.jsonl")
    assert (reading.texts, reading.numbers) == (["before", "after"], 3)
    (rejected,) = reading.rejected
    assert (rejected.reason, rejected.number, rejected.raw) == (reason, 2, line[:RAW_BYTES])
    assert detail in rejected.detail


def test_keys_of_a_deep_object_are_listed_two_levels_deep():
    deep: dict[str, object] = {}
    for _ in range(10_000):
        deep = {"a": deep, "b": 1}
    assert list(_keys(deep)) == ["a.a", "a.b", "b"]


@pytest.mark.parametrize("text", ["", r" \t\n\u00a0"])
def test_text_of_white_space_is_dropped_not_rejected(tmp_path, text):
    (tmp_path / "shard").write_text(f'{{"content": "a"}}\n{{"content": "{text}"}}\n')
    reading = read(tmp_path / "shard")
    assert (reading.texts, reading.rejected, reading.dropped) == (["a"], [], {EMPTY_TEXT: 1})


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf" + JSON_LINES,  # byte order mark
        JSON_LINES.replace(b"\n", b"\r\n"),
        JSON_LINES.replace(b"\n", b"\n\n  \n"),  # blank lines hold no record
        JSON_LINES.rstrip(b"\n"),
        JSON_LINES.replace(b'"url": "u"', b'"url": NaN, "url": Infinity'),  # keys nobody asks for
        JSON_LINES.replace(b'"url": "u"', b'"url": 1e999, "n": 123456789012345678901234567890'),
        JSON_LINES.replace(b'"url": "u"', b'"url": "\xff"').replace(b'"third', b'"third'),
    ],
)
def test_harmless_variants_of_json_lines_give_the_same_texts(tmp_path, content):
    (tmp_path / "shard.jsonl").write_bytes(content)
    assert texts_of(tmp_path / "shard.jsonl") == TEXTS


def test_blank_lines_count_as_lines_and_as_nothing_else(tmp_path):
    (tmp_path / "shard").write_bytes(b'\n \n{"content": "x"}\n\r\n{}\n')
    reading = read(tmp_path / "shard")
    assert (reading.texts, reading.faults, reading.numbers) == (["x"], [(MISSING_KEY, 5)], 5)


def test_last_of_duplicate_keys_counts(tmp_path):
    for other in (b"", b', "n": NaN'):  # read by orjson, and by the standard library
        (tmp_path / "shard.jsonl").write_bytes(b'{"content": "a", "content": "b"' + other + b"}")
        assert texts_of(tmp_path / "shard.jsonl") == ["b"]


@pytest.mark.parametrize("other", ["", ', "n": NaN'])  # read by orjson, and by the standard library
@pytest.mark.parametrize(
    ("line", "text"),
    [
        ({"data": {"text": "x"}}, "x"),
        ({"data": {"deep": {"er": "x"}}}, None),
        ({"data.text": "x", "data": {"text": "y"}}, "x"),  # the name as it stands comes first
        ({"data": {"text.text": "x"}}, None),
        ({"data": "text"}, None),
        ({"text": "x"}, None),
    ],
)
def test_key_with_a_dot_names_a_key_within_an_object(tmp_path, line, text, other):
    (tmp_path / "shard").write_text(json.dumps(line)[:-1] + other + "}")
    reading = read(tmp_path / "shard", text_key="data.text")
    assert reading.texts == ([] if text is None else [text])
    assert [record.reason for record in reading.rejected] == ([MISSING_KEY] if text is None else [])


def test_null_within_the_nested_object_is_a_null_text(tmp_path):
    (tmp_path / "shard").write_text('{"data": {"text": null}}\n{"data": null}\n')
    assert read(tmp_path / "shard", text_key="data.text").faults == [(NULL_TEXT, 1), (MISSING_KEY, 2)]


@pytest.mark.parametrize(
    ("line", "text", "repaired"),
    [
        (b'{"content": "a\xff\xfeb"}', "a\ufffd\ufffdb", 1),
        (b'{"content": "a\xed\xa0\x80b"}', "a\ufffd\ufffd\ufffdb", 1),  # a surrogate in UTF-8
        (b'{"content": "a\\ud800b"}', "a\ufffdb", 1),  # half a surrogate pair
        (b'{"content": "a\\ud83d\\ude80b"}', "a🚀b", 0),  # a whole one
        (b'{"content": "a\\u0000\\u200b\\u202eb"}', "a\0\u200b\u202eb", 0),
        ('{"content": "a\u2028\x85b"}'.encode(), "a\u2028\x85b", 0),  # line ends for str.splitlines, not for JSON lines
    ],
)
def test_only_what_no_text_can_hold_is_replaced(tmp_path, line, text, repaired):
    (tmp_path / "shard.jsonl").write_bytes(line)
    reading = read(tmp_path / "shard.jsonl")
    assert (reading.texts, reading.repaired) == ([text], repaired)


def test_empty_file_holds_no_record(tmp_path):
    (tmp_path / "empty.jsonl").write_bytes(b"")
    assert read(tmp_path / "empty.jsonl").numbers == 0


def test_real_web_pages_are_all_read_plain_and_compressed(shared_data):
    folder = shared_data / "web" / "dolma" / "multiple_files"
    shards = sorted(folder.iterdir())
    assert [shard.suffix for shard in shards] == [".jsonl", ".gz", ".jsonl", ".gz"]
    for shard in shards:
        texts = texts_of(shard, text_key="text")
        assert len(texts) == 10
        assert texts == texts_of(shard.with_suffix("") if shard.suffix == ".gz" else shard, text_key="text")
