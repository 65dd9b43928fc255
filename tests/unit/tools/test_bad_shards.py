"""Shards as they are found in the wild, one by one through the command: what becomes of each record, and the exit code.

Every shard holds good documents beside the bad thing. Nothing may hang, and nothing may be lost without being counted.
"""

import bz2
import gzip
import json
import lzma
import os
import resource
from functools import partial
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import arguments_of, make_place, run
from unit.data.small_corpus import write_vocabulary

from megatron_neobert.data.corpus.reader import Corpus, check_content

GOOD = [b'{"content": "hello world"}'] * 20
WORDS = ["hello", "world", "[", "]", "mask", "##s", "x", "##x", *"abcdefghijklmnopqrstuv"]


class Ended(NamedTuple):
    code: int
    errors: str
    corpus: Corpus | None
    rejects: list[dict[str, object]]

    @property
    def account(self) -> tuple[int, dict[str, int], dict[str, int]]:
        manifest = self.corpus.manifest
        return manifest.documents, manifest.rejected, manifest.dropped


@pytest.fixture
def place(tmp_path):
    return make_place(tmp_path, WORDS)


def preprocess(place, *more, **options) -> Ended:
    code, _, errors = run("preprocess_data", *arguments_of(place, *more), **options)
    assert "Traceback" not in errors, errors
    corpus = None
    if code == 0:
        corpus = Corpus(place / "run_content_document")
        check_content(corpus)
        manifest = corpus.manifest
        accounted = manifest.documents + sum(manifest.rejected.values()) + sum(manifest.dropped.values())
        assert manifest.records == accounted
    rejects = place / "run_content_document.rejects.jsonl"
    lines = rejects.read_text(encoding="utf-8").splitlines() if rejects.exists() else []
    return Ended(code, errors, corpus, [json.loads(line) for line in lines])


def write_lines(place, *lines, name="a.jsonl"):
    (place / "shards" / name).write_bytes(b"\n".join(lines) + b"\n")


# Records without a usable text.
BAD_RECORDS = {
    "cut off line": (b'{"content": "hel', "malformed JSON"),
    "no JSON at all": (b"<html>", "malformed JSON"),
    "a list": (b'["hello"]', "malformed JSON"),
    "missing key": (b'{"text": "hello"}', "missing key"),
    "null": (b'{"content": null}', "null text"),
    "a number": (b'{"content": 17}', "text is not a string"),
    "nested brackets": (b"[" * 100_000, "malformed JSON"),
    "a key that is half a character": (b'{"\\ud800": "hello"}', "missing key"),
}


@pytest.mark.parametrize("name", BAD_RECORDS)
@pytest.mark.parametrize("place_of_it", ["first", "last"])
def test_bad_record_is_rejected_with_its_line_and_the_others_are_kept(place, name, place_of_it):
    line, reason = BAD_RECORDS[name]
    write_lines(place, *([line, *GOOD] if place_of_it == "first" else [*GOOD, line]))
    ended = preprocess(place, "--max-error-rate", "0.1")
    assert ended.account == (20, {reason: 1}, {})
    (reject,) = ended.rejects
    assert (reject["line"], reject["reason"]) == (1 if place_of_it == "first" else 21, reason)
    assert reject["file"] == str(place / "shards" / "a.jsonl")
    assert reject["raw"] == line.decode()[: 64 << 10]


def test_bad_records_above_the_rate_end_the_run_with_65_and_an_example(place):
    write_lines(place, *GOOD, b"broken")
    ended = preprocess(place)
    assert ended.code == 65
    assert "1 of 21 records have no usable text (4.76%), more than --max-error-rate 0.001" in ended.errors
    assert "a.jsonl, line 21: malformed JSON" in ended.errors
    assert not list(place.glob("*.bin"))


def test_bad_record_ends_a_run_that_is_to_fail_on_errors_with_65(place):
    write_lines(place, *GOOD, b'{"content": null}')
    ended = preprocess(place, "--on-error", "fail")
    assert ended.code == 65
    assert "a.jsonl, line 21: null text" in ended.errors


# Odd texts and odd files.
REFUSED_NUMBER = (20, {"malformed JSON": 1}, {})  # Python converts no number of more than 4,300 digits
KEPT = {
    "empty text first": ([b'{"content": ""}', b'{"content": " \\n"}', *GOOD], (20, {}, {"empty text": 2})),
    "blank lines": ([b"", *GOOD, b"  ", b""], (20, {}, {})),
    "only zero-width": ([*GOOD, '{"content": "\u200b\u202e"}'.encode()], (20, {}, {"no tokens": 1})),
    "NUL, zero-width, right-to-left": (
        [*GOOD, b'{"content": "h\\u0000el\\u200blo \\u202eworld"}'],
        (21, {}, {}),
    ),
    "a word of 10^6 characters": ([*GOOD, b'{"content": "' + b"x" * 1_000_000 + b'"}'], (21, {}, {})),
    "duplicate keys": ([*GOOD, b'{"content": 1, "content": "hello"}'], (21, {}, {})),
    "NaN and Infinity": ([*GOOD, b'{"score": NaN, "n": -Infinity, "content": "hello"}'], (21, {}, {})),
    "a number of 5,000 digits": ([*GOOD, b'{"n": 1' + b"0" * 5000 + b', "content": "hello"}'], REFUSED_NUMBER),
    "byte order mark": ([b"\xef\xbb\xbf" + GOOD[0], *GOOD], (21, {}, {})),
    "Windows line ends": ([line + b"\r" for line in GOOD], (20, {}, {})),
}


@pytest.mark.parametrize("name", KEPT)
def test_odd_line_is_kept_or_dropped_by_name(place, name):
    lines, account = KEPT[name]
    write_lines(place, *lines)
    ended = preprocess(place, "--max-error-rate", "0.1")
    assert ended.code == 0, ended.errors
    assert ended.account == account
    assert ended.corpus.document(len(ended.corpus) - 1)[0] != 0


def test_invalid_text_is_repaired_and_counted(place):
    write_lines(place, *GOOD, b'{"content": "hello \xff\xfe world"}', b'{"content": "\\ud800 hello"}')
    ended = preprocess(place)
    assert ended.account == (22, {}, {})
    assert ended.corpus.manifest.repaired_documents == 2


def compress_zstd(content):
    return pytest.importorskip("backports.zstd").compress(content)


WRONG_SUFFIX = {
    "gzip named jsonl": ("a.jsonl", gzip.compress),
    "zstd named gz": ("a.gz", compress_zstd),
    "bzip2 named zst": ("a.zst", bz2.compress),
    "xz named parquet": ("a.parquet", lzma.compress),
    "plain named gz": ("a.jsonl.gz", bytes),
}


@pytest.mark.parametrize("name", WRONG_SUFFIX)
def test_content_and_not_the_name_says_how_a_shard_is_compressed(place, name):
    file, compress = WRONG_SUFFIX[name]
    (place / "shards" / file).write_bytes(compress(b"\n".join(GOOD)))
    assert preprocess(place).account == (20, {}, {})


@pytest.mark.parametrize("compress", [gzip.compress, compress_zstd, bz2.compress, lzma.compress])
def test_truncated_stream_ends_the_run_with_65_and_is_never_taken_for_a_short_one(place, compress):
    lines = b"\n".join(b'{"content": "hello world", "n": %d}' % (number * 7919 % 10007) for number in range(5000))
    (place / "shards" / "a").write_bytes(compress(lines)[:-40])
    ended = preprocess(place)
    assert ended.code == 65
    assert f"{place / 'shards' / 'a'}" in ended.errors and (
        "after line" in ended.errors or "from its beginning" in ended.errors
    )
    assert not list(place.glob("run_content_document.bin"))


BINARY = {
    "UTF-16": ("\n".join(map(bytes.decode, GOOD)).encode("utf-16"), "UTF-16"),
    "zip": (b"PK\x03\x04" + b"\0" * 100, "zip"),
    "a picture": (b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 8, "image"),
}


@pytest.mark.parametrize("name", BINARY)
def test_file_that_is_no_text_is_refused_by_name_with_65(place, name):
    content, said = BINARY[name]
    write_lines(place, *GOOD)
    (place / "shards" / "b.jsonl").write_bytes(content)
    ended = preprocess(place)
    assert ended.code == 65
    assert f"{place / 'shards' / 'b.jsonl'}" in ended.errors and said in ended.errors


def test_document_of_10_megabytes_is_kept_whole(place):
    write_lines(place, *GOOD, b'{"content": "' + b"hello " * 1_700_000 + b'"}')
    ended = preprocess(place)
    assert ended.corpus.lengths.tolist() == [2] * 20 + [1_700_000]


def test_document_above_the_bound_is_rejected_and_the_others_are_kept(place):
    write_lines(place, *GOOD[:10], b'{"content": "' + b"hello " * 1_000_000 + b'"}', *GOOD[10:])
    ended = preprocess(place, "--max-document-bytes", "1MB", "--max-error-rate", "0.1")
    assert ended.account == (20, {"longer than --max-document-bytes": 1}, {})
    assert ended.rejects[0]["line"] == 11


def test_line_of_a_gigabyte_takes_no_memory(place):
    with (place / "shards" / "a.jsonl").open("wb") as stream:
        stream.write(b"\n".join(GOOD) + b'\n{"content": "')
        stream.seek(1 << 30, os.SEEK_CUR)  # a hole in the file: NUL bytes that need no disk
        stream.write(b'"}\n' + GOOD[0])
    limit = partial(resource.setrlimit, resource.RLIMIT_DATA, (700 << 20, 700 << 20))
    ended = preprocess(place, "--max-error-rate", "0.1", preexec_fn=limit)
    assert ended.account == (21, {"longer than --max-document-bytes": 1}, {})


def test_parquet_nulls_are_rejected_and_a_missing_column_is_named_with_65(place):
    pq.write_table(pa.table({"content": ["hello", None, "world"]}), place / "shards" / "a.parquet")
    assert preprocess(place, "--max-error-rate", "0.5").account == (2, {"null text": 1}, {})
    pq.write_table(pa.table({"text": ["hello"], "n": [1]}), place / "shards" / "a.parquet")
    ended = preprocess(place, "--overwrite")
    assert ended.code == 65
    assert "no column 'content'; its text columns: text" in ended.errors


@pytest.mark.parametrize("name", ["folder", "glob", "file"])
def test_input_that_matches_nothing_ends_with_66(place, name):
    given = {"folder": place / "shards", "glob": place / "shards" / "*.parquet", "file": place / "absent.jsonl"}[name]
    ended = preprocess(place, "--input", given)
    assert ended.code == 66
    assert str(given) in ended.errors
    assert not list(place.glob("run*"))


def test_vocabulary_above_16_bits_is_stored_in_32(place):
    words = [f"w{number}" for number in range(70_000)]
    write_vocabulary(place / "vocab.txt", [*WORDS, *words])
    write_lines(place, *GOOD, b'{"content": "w69999"}')
    ended = preprocess(place)
    assert ended.corpus.manifest.dtype == "int32"
    assert ended.corpus.document(20).tolist()[0] > 65_535
