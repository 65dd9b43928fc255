"""JSON lines and plain text: every record gives a text or a counted reject, within a bounded memory."""

import gzip
import io
import json
import random
from functools import partial
from unittest import mock

import pytest
from unit.data.inputs.reading import JSON_LINES, TEXTS, peak_memory, read, texts_of

from megatron_neobert.data.inputs.recognise import read_chunk, split_into_chunks
from megatron_neobert.data.inputs.records import RAW_BYTES, ReadSettings, Reason
from megatron_neobert.data.inputs.text_files import read_records


@pytest.mark.parametrize(
    ("line", "reason", "detail"),
    [
        (b'{"content": "cut o', Reason.MALFORMED_JSON, "Unterminated string starting at: line 1 column 13"),
        (b'{"content": ' + b"9" * 5000 + b"}", Reason.MALFORMED_JSON, "5000 digits"),
        (b"[" * 100_000, Reason.MALFORMED_JSON, "nested too deeply"),
        (b'{"text": "x", "url": "y"}', Reason.MISSING_KEY, "no key 'content'; keys found: text, url"),
        (b'{"data": {"text": "x", "n": {}}, "url": "y"}', Reason.MISSING_KEY, "keys found: data, url"),
        (b'{"content": null}', Reason.NULL_TEXT, "null"),
        (b'{"content": 3}', Reason.NOT_A_STRING, "found int"),
    ],
)
def test_bad_line_is_rejected_with_reason_and_line_number_and_its_neighbours_are_kept(tmp_path, line, reason, detail):
    (tmp_path / "input.jsonl").write_bytes(b'{"content": "before"}\n' + line + b'\n{"content": "after"}\n')
    reading = read(tmp_path / "input.jsonl")
    assert (reading.texts, reading.numbers) == (["before", "after"], 3)
    (rejected,) = reading.rejected
    assert (rejected.reason, rejected.number, rejected.raw) == (reason, 2, line[:RAW_BYTES])
    assert detail in rejected.detail


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf" + JSON_LINES,  # byte order mark
        JSON_LINES.replace(b"\n", b"\r\n"),
        JSON_LINES.replace(b"\n", b"\n\n  \n"),  # blank lines
        JSON_LINES.rstrip(b"\n"),
        JSON_LINES.replace(
            b'"url": "u"', b'"url": NaN, "url": Infinity'
        ),  # values that JSON does not allow, of other keys
        JSON_LINES.replace(b'"url": "u"', b'"url": 1e999, "n": 123456789012345678901234567890'),
        JSON_LINES.replace(b'"url": "u"', b'"url": "\xff"'),
    ],
)
def test_harmless_variants_of_json_lines_give_the_same_texts(tmp_path, content):
    (tmp_path / "input.jsonl").write_bytes(content)
    assert texts_of(tmp_path / "input.jsonl") == TEXTS


@pytest.mark.parametrize("other", ["", ', "n": NaN'])  # read by orjson, and by the standard library
@pytest.mark.parametrize(
    ("line", "text"),
    [
        ({"data": {"text": "x"}}, "x"),
        ({"data": {"deep": {"er": "x"}}}, None),
        ({"data.text": "x", "data": {"text": "y"}}, "x"),  # the full name takes precedence
        ({"text": "x"}, None),
    ],
)
def test_key_with_a_dot_names_a_key_within_an_object(tmp_path, line, text, other):
    (tmp_path / "input").write_text(json.dumps(line)[:-1] + other + "}")
    reading = read(tmp_path / "input", text_key="data.text")
    assert reading.texts == ([] if text is None else [text])
    assert [record.reason for record in reading.rejected] == ([Reason.MISSING_KEY] if text is None else [])


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b'{"content": "a\xff\xfeb"}', "a\ufffd\ufffdb"),
        (b'{"content": "a\xed\xa0\x80b"}', "a\ufffd\ufffd\ufffdb"),  # a surrogate in UTF-8
        (b'{"content": "a\\ud800b"}', "a\ufffdb"),  # half a surrogate pair
        (b'{"content": "a\\ud83d\\ude80b"}', "a🚀b"),  # a whole one
        ('{"content": "a\u2028\x85b"}'.encode(), "a\u2028\x85b"),  # line ends for str.splitlines, not for JSON lines
    ],
)
def test_only_invalid_unicode_is_replaced(tmp_path, line, text):
    (tmp_path / "input.jsonl").write_bytes(line)
    reading = read(tmp_path / "input.jsonl")
    assert reading.texts == [text]


def test_chunks_of_any_size_give_the_records_of_the_whole_file(tmp_path):
    generator, settings = random.Random(0), {"input_format": "text", "text_separator": "\n"}
    path = tmp_path / "input"
    texts = [generator.choice(["a", "b", "x y" * 9]) for _ in range(30)]
    path.write_text("\n\n".join(texts) + "\n" * 5)
    assert read(path, **settings).texts == texts
    for chunk_bytes in (1, 2, 5, 17, 60):
        split = read(path, chunk_bytes=chunk_bytes, **settings)
        assert split.texts == texts and split.numbers == 30 + 29 + 4
        assert len(split.chunks) > 4


@pytest.mark.parametrize("separator", [b"\n", b"\n\n", b"aba"])
def test_records_are_the_same_wherever_the_blocks_end(separator):
    generator = random.Random(0)
    for _ in range(300):
        content = b"".join(generator.choices([b"a", b"b", b"\n", b"0123456789", separator], k=generator.randint(0, 30)))
        limit = generator.choice([1, 4, 15, 1000])
        expected = content.split(separator)
        if not expected[-1]:
            expected.pop()  # nothing follows the last separator
        for width in (1, 2, 3, 11, 1000):
            stream = mock.Mock(read=partial(io.BytesIO(content).read, width))
            groups = read_records(stream, separator=separator, limit=limit)
            for record, whole in zip((record for group in groups for record in group), expected, strict=True):
                assert whole.startswith(record) and len(record) > limit if len(whole) > limit else whole == record


def test_too_long_line_is_never_in_memory_as_a_whole(tmp_path):
    (tmp_path / "input").write_bytes(b'{"content": "' + b"x" * (64 << 20) + b'"}\n{"content": "short"}\n')

    def batches_of(settings):
        for chunk in split_into_chunks(str(tmp_path / "input"), settings, chunk_bytes=10 << 20):
            yield from read_chunk(chunk, settings)

    peaks = []
    for limit in (2 << 20, 100 << 20):
        peak, batches = peak_memory(batches_of(ReadSettings(max_document_bytes=limit)))
        peaks.append(peak)
        assert batches[-1].texts[-1] == "short"
    assert peaks[0] < 12 << 20 < 64 << 20 < peaks[1]  # control: the limit allows the line


def test_plain_text_file_is_one_unchanged_document(tmp_path):
    text = "  Title\r\n\r\nÜber 東京 🚀.\n{not json}\n"
    for content in (text.encode(), b"\xef\xbb\xbf" + text.encode(), gzip.compress(text.encode())):
        (tmp_path / "input.txt").write_bytes(content)
        assert texts_of(tmp_path / "input.txt") == [text]


@pytest.mark.parametrize("separator", ["\n", "\n\n", "<|endoftext|>", "—"])
def test_separator_cuts_a_file_into_documents(tmp_path, separator):
    documents = ["First.", " second one ", "\u3000", "", "Third 東京"]
    for end in ("", separator, separator + "\n"):
        (tmp_path / "input").write_bytes(b"\xef\xbb\xbf" + (separator.join(documents) + end).encode())
        assert texts_of(tmp_path / "input", text_separator=separator) == ["First.", " second one ", "Third 東京"]


def test_documents_are_numbered_from_one_and_blank_documents_count(tmp_path):
    (tmp_path / "input").write_bytes(b"a\n\n" + b"x" * 100 + b"\nb\xff\n")
    reading = read(tmp_path / "input", text_separator="\n", max_document_bytes=50)
    assert (reading.texts, reading.numbers) == (["a", "b\ufffd"], 4)
    assert reading.rejections == [(Reason.TOO_LONG, 3)]
