"""Plain text files: one document each, or many with a separator between them."""

import gzip

import pytest
from unit.data.shards.reading import read, texts_of

from megatron_neobert.data.shards.records import EMPTY_TEXT, RAW_BYTES, TOO_LONG


def test_file_is_one_document_exactly_as_it_is(tmp_path):
    text = "  Title\r\n\r\nÜber 東京 🚀.\n{not json}\n"
    (tmp_path / "shard.txt").write_bytes(text.encode())
    assert texts_of(tmp_path / "shard.txt") == [text]
    (tmp_path / "shard.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert texts_of(tmp_path / "shard.txt") == [text]
    (tmp_path / "shard.txt").write_bytes(gzip.compress(text.encode()))
    assert texts_of(tmp_path / "shard.txt") == [text]


def test_file_that_is_asked_to_be_text_and_is_blank_is_dropped(tmp_path):
    for content in (b"", b" \n\n"):
        (tmp_path / "shard").write_bytes(content)
        assert read(tmp_path / "shard", input_format="text").dropped == {EMPTY_TEXT: 1}


def test_file_above_the_limit_is_rejected(tmp_path):
    content = b"word " * 100_000
    (tmp_path / "shard").write_bytes(content)
    assert len(texts_of(tmp_path / "shard", max_document_bytes=500_000)) == 1
    (rejected,) = read(tmp_path / "shard", max_document_bytes=499_999).rejected
    assert (rejected.reason, rejected.number, rejected.raw) == (TOO_LONG, 1, content[:RAW_BYTES])
    assert rejected.detail == "more than 499,999 bytes"


@pytest.mark.parametrize("separator", ["\n", "\n\n", "<|endoftext|>", "—"])
def test_separator_cuts_a_file_into_documents(tmp_path, separator):
    documents = ["First.", " second one ", "\u3000", "", "Third 東京"]
    for end in ("", separator, separator + "\n"):
        (tmp_path / "shard").write_bytes(b"\xef\xbb\xbf" + (separator.join(documents) + end).encode())
        assert texts_of(tmp_path / "shard", text_separator=separator) == ["First.", " second one ", "Third 東京"]


def test_documents_are_numbered_as_they_stand_in_the_file(tmp_path):
    (tmp_path / "shard").write_bytes(b"a\n\n" + b"x" * 100 + b"\nb\xff\n")
    reading = read(tmp_path / "shard", text_separator="\n", max_document_bytes=50)
    assert (reading.texts, reading.repaired, reading.numbers) == (["a", "b\ufffd"], 1, 4)
    assert reading.faults == [(TOO_LONG, 3)]
