"""Attributes of documents (--record-key), against a reading of the inputs in plain Python."""

import gzip
import json
import os
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from unit.data.preprocess_place import Place, cut_small, random_text

from megatron_neobert.data.corpus.attributes import ChosenDocuments, attribute_types, choose_documents
from megatron_neobert.data.corpus.reader import Corpus, check_content
from megatron_neobert.errors import ConfigError, DataError, OutputError

RECORDS = 60
VALUES = ["wiki", "web", "b\u00fccher", None, 7]


@pytest.fixture
def place(tmp_path):
    """Three shards of JSON lines, parquet and packed lines; place.records has the text and the field of each."""
    place, generator = Place(tmp_path), np.random.default_rng(0)
    place.records = []
    for name in ("a.jsonl", "b.parquet", "c.jsonl.gz"):
        values = [VALUES[number] for number in generator.integers(0, len(VALUES), RECORDS)]
        values = [None if value is None else str(value) for value in values] if name == "b.parquet" else values
        texts = [random_text(generator, tokens) for tokens in generator.integers(0, 6, RECORDS)]  # with duplicates
        place.records += zip(texts, values, strict=True)
        if name == "b.parquet":
            pq.write_table(
                pa.table({"content": texts, "meta": [{"from": value} for value in values]}), place.shards / name
            )
            continue
        # Of records without the field, some have null in the field and some do not have it.
        metas = [{} if value is None and number % 2 else {"from": value} for number, value in enumerate(values)]
        records = zip(texts, metas, strict=True)
        lines = "".join(json.dumps({"content": text, "meta": meta}) + "\n" for text, meta in records)
        (place.shards / name).write_bytes(gzip.compress(lines.encode()) if name.endswith("gz") else lines.encode())
    return place


def shortened(record):
    """A filter that drops some texts and changes others."""
    return "has xyz first" if record.text.startswith("xyz") else record._replace(text=record.text.split("zy")[0])


def kept(records, *, filtered=False, deduplicate=False):
    """The field and the tokens of each document: a text is its words, and "xyz" two of them."""
    seen = set()
    for text, value in records:
        if filtered:
            text = "" if text.startswith("xyz") else text.split("zy")[0]
        tokens = len(text.split()) + text.count("xyz")
        if not text.strip() or (deduplicate and text in seen):
            continue
        seen.add(text)
        yield None if value is None else str(value), tokens


CASES = {
    "all": ({}, {}),
    "shards by size and workers": ({"shard_size": 100, "workers": 2}, {}),
    "duplicates": ({"deduplicate": "exact"}, {"deduplicate": True}),
    "filter": ({"filter": (f"{__file__}:shortened",)}, {"filtered": True}),
}


def attributes_of(corpus):
    """The field and the tokens of each document, as the corpus has them."""
    check_content(corpus)
    fields = pq.read_table(corpus.files.attributes)["meta_from"].to_pylist()
    return list(zip(fields, corpus.lengths_of(np.arange(len(corpus))).tolist(), strict=True))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("chunk_bytes", [500, 1 << 20])
def test_attributes_are_those_of_the_records_in_the_order_of_the_corpus(place, monkeypatch, case, chunk_bytes):
    changes, rule = CASES[case]
    cut_small(monkeypatch, chunk_bytes)
    place.run(record_keys=("meta.from",), **changes)
    corpus, expected = place.corpus(), list(kept(place.records, **rule))
    assert attributes_of(corpus) == expected
    chosen = ChosenDocuments(choose_documents(corpus, ["meta_from in ['wiki', '7']"], None), range(len(corpus)))
    wanted = [number for number, (value, _) in enumerate(expected) if value in ("wiki", "7")]
    assert chosen.numbers(np.arange(len(chosen))).tolist() == wanted


def test_attributes_are_the_same_bytes_for_any_number_of_workers_and_after_a_split(place):
    for name, workers in (("one", 1), ("two", 2)):
        place.run(name, record_keys=("meta.from",), deduplicate="exact", split_validation=0.3, workers=workers)
    assert place.contents("one") == place.contents("two")
    place.run(record_keys=("meta.from",), deduplicate="exact")
    both = [attributes_of(place.corpus("one", end=end)) for end in ("", "_validation")]
    assert all(both) and Counter(both[0] + both[1]) == Counter(attributes_of(place.corpus()))


def test_headers_of_web_archives_are_attributes(place):
    record = (
        b"WARC/1.0\r\nWARC-Type: conversion\r\nContent-Type: text/plain\r\n%sContent-Length: 5\r\n\r\nhello\r\n\r\n"
    )
    languages = [b"eng", b"eng", b"deu", None]
    headers = [b"" if language is None else b"WARC-Language: %s\r\n" % language for language in languages]
    for shard in place.shards.iterdir():
        shard.unlink()
    (place.shards / "a.wet").write_bytes(b"".join(record % header for header in headers))
    place.run(record_keys=("WARC-Language",))
    table = pq.read_table(place.corpus().files.attributes)
    assert table["WARC_Language"].to_pylist() == ["eng", "eng", "deu", None]


def test_corpus_that_replaces_one_with_attributes_leaves_none_of_them(place):
    place.run("fresh")
    place.run(record_keys=("meta.from",))
    with pytest.raises(OutputError, match=r"content_document\.attributes\.parquet"):
        place.run()
    place.run(overwrite=True)
    assert place.contents() == place.contents("fresh")
    assert "attributes" not in place.contents()["content_document.json"].decode()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), r"content_document\.attributes\.parquet missing: the corpus is unfinished"),
        (lambda path: path.write_bytes(path.read_bytes()[::-1]), r"attributes\.parquet, byte 0: expected sha256"),
    ],
    ids=["missing", "changed"],
)
def test_damaged_attributes_are_found_by_the_check(place, damage, message):
    place.run(record_keys=("meta.from",))
    damage(place.corpus().files.attributes)
    with pytest.raises(DataError, match=message):
        check_content(place.corpus())


def test_key_that_no_expression_could_name_is_refused(place):
    with pytest.raises(ConfigError, match="--record-key 2nd would be the attribute '2nd'"):
        place.settings(record_keys=("2nd",))


def test_corpus_of_an_earlier_version_with_sources_and_limits_of_length_is_read(place):
    place.run()
    manifest, filters = place.corpus().files.manifest, place.corpus().manifest.filters
    counted = {
        "source_key": "from",
        "sources": {"a": {"documents": 1, "tokens": 1}},
        "sources_sha256": "0" * 64,
        "eod_id": None,
        "filters": {**filters, "min_tokens": 0, "max_tokens": None},
    }
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | counted))
    check_content(Corpus(place.corpus().prefix))


def test_names_that_are_not_utf8_keep_their_attributes(place):
    shard, name = os.fsdecode(b"d\xff.jsonl"), os.fsdecode(b"run\xff")
    place.add_lines(shard, *(json.dumps({"content": "hello world", "meta": {"from": "new"}}) for _ in range(3)))
    place.run(name, record_keys=("meta.from",))
    corpus = place.corpus(name)
    assert attribute_types(corpus) == {"meta_from": "a text", "length": "a number", "input": "a text"}
    chosen = [choose_documents(corpus, [where], None) for where in ("meta_from=='new'", "input=='d*'", "length>=1")]
    assert [len(ChosenDocuments(bits, range(len(corpus)))) for bits in chosen] == [3, 3, len(corpus)]
