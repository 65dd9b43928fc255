"""Documents and tokens by the value of a field (--source-key), against a recount of the shards in plain Python."""

import gzip
import hashlib
import json
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from unit.data.preprocess_place import Place, cut_small, random_text
from unit.tools.commands import call

from megatron_neobert.data.corpus import sources
from megatron_neobert.data.corpus.format import SourceRecord
from megatron_neobert.data.corpus.reader import check_content
from megatron_neobert.data.preprocessing.plan import is_complete, plan_preprocessing
from megatron_neobert.errors import ConfigError, DataError, OutputError

RECORDS = 60
VALUES = ["wiki", "web", "b\u00fccher", None, 7]


@pytest.fixture
def place(tmp_path):
    """Three shards of JSON lines, parquet and packed lines; place.records has the text and the source of each."""
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
        # Of records without a source, some have null in the field and some do not have it.
        metas = [{} if value is None and number % 2 else {"from": value} for number, value in enumerate(values)]
        records = zip(texts, metas, strict=True)
        lines = "".join(json.dumps({"content": text, "meta": meta}) + "\n" for text, meta in records)
        (place.shards / name).write_bytes(gzip.compress(lines.encode()) if name.endswith("gz") else lines.encode())
    return place


def shortened(record):
    """A filter that drops some texts and changes others."""
    return "has xyz first" if record.text.startswith("xyz") else record._replace(text=record.text.split("zy")[0])


def kept(records, *, least=0, filtered=False, deduplicate=False):
    """Source and tokens of each document: a text is its words, and "xyz" two of them."""
    seen = set()
    for text, value in records:
        if filtered:
            text = "" if text.startswith("xyz") else text.split("zy")[0]
        tokens = len(text.split()) + text.count("xyz")
        if not text.strip() or tokens < least or (deduplicate and text in seen):
            continue
        seen.add(text)
        yield "(none)" if value is None else str(value), tokens


def recounted(records, **rule):
    """Documents and tokens by source."""
    counts = {}
    for name, tokens in kept(records, **rule):
        counts.setdefault(name, Counter()).update(documents=1, tokens=tokens)
    return {name: SourceRecord(**counts[name]) for name in sorted(counts)}


def sources_of(corpus):
    """The source of each document."""
    names = list(corpus.manifest.sources)
    return [names[number] for number in sources.map_sources(corpus.files.sources, corpus.manifest)]


CASES = {
    "all": ({}, {}),
    "short ones dropped": ({"min_tokens": 3}, {"least": 3}),
    "kept shards": ({"keep_shards": True}, {}),
    "volumes by size and workers": ({"shard_size": 100, "workers": 2}, {}),
    "duplicates": ({"deduplicate": "exact"}, {"deduplicate": True}),
    "filter": ({"filter": (f"{__file__}:shortened",), "record_keys": ()}, {"filtered": True}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("chunk_bytes", [500, 1 << 20])
def test_sources_have_the_documents_and_tokens_of_a_recount(place, monkeypatch, case, chunk_bytes):
    changes, rule = CASES[case]
    cut_small(monkeypatch, chunk_bytes)
    place.run(source_key="meta.from", **changes)
    manifest = place.corpus().manifest
    check_content(place.corpus())
    assert manifest.sources == recounted(place.records, **rule)
    assert sources_of(place.corpus()) == [name for name, _ in kept(place.records, **rule)]
    assert len(manifest.sources) == 5 and list(manifest.sources) == sorted(manifest.sources)
    assert (rule == {}) == (manifest.sources == recounted(place.records))  # or the rule would show nothing


def test_sources_of_both_corpora_of_a_split_add_up_to_those_without_it(place):
    place.run("whole", source_key="meta.from", deduplicate="exact")
    place.run(source_key="meta.from", deduplicate="exact", split_validation=0.3)
    training, held_out = place.corpus().manifest.sources, place.corpus(end="_validation").manifest.sources
    assert (
        sum(record.documents for record in held_out.values()) == place.corpus(end="_validation").manifest.documents > 9
    )
    for name, whole in place.corpus("whole").manifest.sources.items():
        both = training.get(name, SourceRecord(0, 0)), held_out.get(name, SourceRecord(0, 0))
        assert whole == SourceRecord(sum(each.documents for each in both), sum(each.tokens for each in both))
    for corpus in (place.corpus(), place.corpus(end="_validation")):
        check_content(corpus)
        tokens = Counter()
        for name, length in zip(sources_of(corpus), corpus.lengths[np.arange(len(corpus))].tolist(), strict=True):
            tokens[name] += length
        assert tokens == {name: record.tokens for name, record in corpus.manifest.sources.items()}


def test_volumes_are_those_without_sources_and_a_manifest_without_them_does_not_mention_any(place):
    place.run("with", source_key="meta.from")
    place.run("without")
    with_them, without = place.contents("with"), place.contents("without")
    names = [name for name in without if name.endswith((".bin", ".idx"))]
    assert len(names) == 2 and all(with_them[name] == without[name] for name in names)
    manifests = [json.loads(contents["content_document.json"]) for contents in (with_them, without)]
    assert "source" not in without["content_document.json"].decode()
    assert manifests[0].pop("source_key") == "meta.from" and manifests[0].pop("sources")
    assert manifests[0].pop("sources_sha256") == hashlib.sha256(with_them["content_document.sources"]).hexdigest()
    assert "content_document.sources" not in without
    assert manifests[0] == manifests[1]


def test_headers_of_web_archives_are_sources(place):
    record = (
        b"WARC/1.0\r\nWARC-Type: conversion\r\nContent-Type: text/plain\r\n%sContent-Length: 5\r\n\r\nhello\r\n\r\n"
    )
    languages = [b"eng", b"eng", b"deu", None]
    headers = [b"" if language is None else b"WARC-Language: %s\r\n" % language for language in languages]
    for shard in place.shards.iterdir():
        shard.unlink()
    (place.shards / "a.wet").write_bytes(b"".join(record % header for header in headers))
    place.run(source_key="WARC-Language")
    expected = {"(none)": SourceRecord(1, 1), "deu": SourceRecord(1, 1), "eng": SourceRecord(2, 2)}
    assert place.corpus().manifest.sources == expected


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "content_document.sources missing beside the rest"),
        (
            lambda path: path.write_bytes(path.read_bytes()[:-2]),
            r"sources, byte \d+: expected \d+ bytes for \d+ documents",
        ),
        (
            lambda path: path.write_bytes(path.read_bytes()[::-1]),
            r"sources, byte 0: expected sha256 .* as in run_content_document\.json, found",
        ),
    ],
    ids=["missing", "cut", "changed"],
)
def test_damaged_file_of_sources_is_found_by_the_check_and_a_missing_one_is_not_complete(place, damage, message):
    place.run(source_key="meta.from")
    assert is_complete(plan_preprocessing(place.settings(source_key="meta.from", resume=True)))
    damage(place.corpus().files.sources)
    with pytest.raises(DataError, match=message):
        check_content(place.corpus())
    if "sha256" not in message:
        assert not is_complete(plan_preprocessing(place.settings(source_key="meta.from", resume=True)))


def test_corpus_that_replaces_one_with_sources_leaves_none_of_them(place):
    place.run("fresh")
    place.run(source_key="meta.from")
    with pytest.raises(OutputError, match=r"content_document\.sources"):
        place.run()
    place.run(overwrite=True)
    assert place.contents() == place.contents("fresh")


@pytest.mark.parametrize("where", ["in one part", "in all together"])
def test_more_sources_than_may_be_are_refused_in_one_sentence(place, monkeypatch, where):
    monkeypatch.setattr(sources, "MOST_SOURCES", 5)
    place.run(source_key="meta.from")  # control
    more = {"in one part": ["1", "2", "3", "4", "5", "6"], "in all together": ["5"]}[where]
    place.add_lines("d.jsonl", *(json.dumps({"content": "hello", "meta": {"from": value}}) for value in more))
    with pytest.raises(DataError, match=r"--source-key meta\.from has more than 5 values \(among them .*; choose a fi"):
        place.run("more", source_key="meta.from")
    assert not [file for file in (place.folder / "out").glob("more*") if file.suffix != ".partial"]


def test_source_with_a_long_name_and_a_column_that_no_table_has_are_refused(place):
    with pytest.raises(
        ConfigError, match=r"b\.parquet has no column 'kind'; its columns: .*with --record-key or --source"
    ):
        place.run(source_key="kind")
    place.add_lines("d.jsonl", json.dumps({"content": "hello", "meta": {"from": "x" * 201}}))
    with pytest.raises(DataError, match=r"--source-key meta\.from: a value has 201 characters .*; choose a field with"):
        place.run("more", source_key="meta.from")


def test_command_counts_sources_and_lists_them_with_their_shares(place):
    prefix = place.folder / "P"
    shards = ("--input", place.shards, "--output-prefix", prefix, "--tokenizer-model", place.vocab)
    assert call("preprocess_data", *shards, "--source-key", "meta.from")[0] == 0
    code, output, errors = call("inspect_data", f"{prefix}_content_document", "--sources")
    assert (code, errors) == (0, "")
    expected = sorted(recounted(place.records).items(), key=lambda item: -item[1].tokens)
    tokens = sum(record.tokens for _, record in expected)
    lines = [line.split() for line in output.splitlines()]
    assert lines[0] == ["documents", "tokens", "share", "meta.from"]
    rows = [[f"{r.documents}", f"{r.tokens}", f"{r.tokens / tokens:.2%}", name] for name, r in expected]
    assert lines[1:] == rows
    assert call("preprocess_data", *shards, "--overwrite")[0] == 0
    code, _, errors = call("inspect_data", f"{prefix}_content_document", "--sources")
    assert code == 65 and "does not count sources; preprocess with --source-key" in errors
