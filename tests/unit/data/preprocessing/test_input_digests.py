"""The manifest has the sha256 of each input file, which is read once if possible."""

import gzip
import hashlib
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from backports import zstd
from unit.data.preprocess_workspace import Workspace, cut_small

from megatron_neobert.data.preprocessing import chunks

LINES = "".join(json.dumps({"content": f"hello world {number}"}) + "\n" for number in range(200)).encode()
WET = b"WARC/1.0\r\nWARC-Type: conversion\r\nContent-Type: text/plain\r\nContent-Length: 5\r\n\r\nhello\r\n\r\n" * 20
STREAMED = {
    "lines.jsonl": LINES,
    "lines.jsonl.gz": gzip.compress(LINES[:700]) + gzip.compress(LINES[700:]) + b"\0" * 100,
    "lines.jsonl.zst": zstd.compress(LINES),
    "text.txt": b"\xef\xbb\xbfhello world\n",
    "no_records.jsonl": b"",
    "pages.warc.wet.gz": gzip.compress(WET),
}


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    workspace = Workspace(tmp_path)
    workspace.add_texts("first.jsonl", "hello")  # so that a run has a document
    workspace.read_again = []
    sha256_of = chunks.sha256_of
    monkeypatch.setattr(chunks, "sha256_of", lambda path: workspace.read_again.append(path) or sha256_of(path))
    return workspace


def check(workspace, name, *, read_again, by_url=None):
    file = workspace.inputs / name
    urls = {} if by_url is None else {"inputs": (f"file://{file}", str(workspace.inputs / "first.jsonl"))}
    workspace.run(overwrite=True, **urls)
    record = next(record for path, record in workspace.corpus().manifest.inputs.items() if path.endswith(name))
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    assert (record.bytes, record.sha256) == (file.stat().st_size, sha256 if by_url is not False else None)
    assert len(workspace.read_again) == read_again


@pytest.mark.parametrize("name", STREAMED)
def test_streams_are_read_once_and_have_the_sha256_of_all_their_bytes(workspace, name):
    (workspace.inputs / name).write_bytes(STREAMED[name])
    check(workspace, name, read_again=0)
    check(workspace, name, read_again=0, by_url=True)


def test_table_is_read_again_for_its_sha256_unless_it_is_remote(workspace):
    pq.write_table(pa.table({"content": ["hello"] * 5, "other": range(5)}), workspace.inputs / "table.parquet")
    check(workspace, "table.parquet", read_again=1)
    check(workspace, "table.parquet", read_again=1, by_url=False)


def test_input_file_of_several_chunks_is_read_again_for_its_sha256(workspace, monkeypatch):
    (workspace.inputs / "lines.jsonl").write_bytes(LINES)
    cut_small(monkeypatch, 1000)
    check(workspace, "lines.jsonl", read_again=1)
