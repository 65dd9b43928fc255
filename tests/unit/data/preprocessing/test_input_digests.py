"""What the manifest says of an input's content: the sha256 of all its bytes, which are read once where possible."""

import bz2
import gzip
import hashlib
import json
import lzma

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from backports import zstd
from unit.data.preprocess_place import Place, cut_small

from megatron_neobert.data.preprocessing import chunks

LINES = "".join(json.dumps({"content": f"hello world {number}"}) + "\n" for number in range(200)).encode()
WET = b"WARC/1.0\r\nWARC-Type: conversion\r\nContent-Type: text/plain\r\nContent-Length: 5\r\n\r\nhello\r\n\r\n" * 20
STREAMED = {
    "lines.jsonl": LINES,
    "lines.jsonl.gz": gzip.compress(LINES[:700]) + gzip.compress(LINES[700:]) + b"\0" * 100,
    "lines.jsonl.zst": zstd.compress(LINES),
    "lines.jsonl.bz2": bz2.compress(LINES),
    "lines.jsonl.xz": lzma.compress(LINES),
    "text.txt": b"\xef\xbb\xbfhello world\n",
    "no_records.jsonl": b"",
    "pages.warc.wet": WET,
    "pages.warc.wet.gz": gzip.compress(WET),
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    place = Place(tmp_path)
    place.add_texts("first.jsonl", "hello")  # so that a run has a document
    place.read_again = []
    again = chunks.input_sha256
    monkeypatch.setattr(chunks, "input_sha256", lambda path: place.read_again.append(path) or again(path))
    return place


def check(place, name, *, read_again, by_url=None):
    shard = place.shards / name
    urls = {} if by_url is None else {"inputs": (f"file://{shard}", str(place.shards / "first.jsonl"))}
    place.run(overwrite=True, **urls)
    record = next(record for path, record in place.corpus().manifest.inputs.items() if path.endswith(name))
    sha256 = hashlib.sha256(shard.read_bytes()).hexdigest()
    assert (record.bytes, record.sha256) == (shard.stat().st_size, sha256 if by_url is not False else None)
    assert len(place.read_again) == read_again


@pytest.mark.parametrize("name", STREAMED)
def test_streams_are_read_once_and_have_the_sha256_of_all_their_bytes(place, name):
    (place.shards / name).write_bytes(STREAMED[name])
    check(place, name, read_again=0)
    check(place, name, read_again=0, by_url=True)


def test_table_of_which_one_column_is_read_is_read_again_for_its_sha256_but_not_over_a_network(place):
    pq.write_table(pa.table({"content": ["hello"] * 5, "other": range(5)}), place.shards / "table.parquet")
    check(place, "table.parquet", read_again=1)
    check(place, "table.parquet", read_again=2, by_url=False)


def test_input_file_of_several_chunks_is_read_again_for_its_sha256(place, monkeypatch):
    (place.shards / "lines.jsonl").write_bytes(LINES)
    cut_small(monkeypatch, 1000)
    check(place, "lines.jsonl", read_again=1)
