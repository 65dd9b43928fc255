"""Attributes of documents (--record-key), compared with a plain Python loop over the input files."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import call
from pyarrow import feather
from unit.data.preprocess_workspace import Workspace, arguments_of, cut_small, random_text
from unit.data.small_corpus import documents_in

from megatron_neobert.data.corpus.attributes import choose_documents
from megatron_neobert.data.corpus.reader import check_content

RECORDS = 60
VALUES = ["wiki", "web", "b\u00fccher", None, 7]


@pytest.fixture
def workspace(tmp_path):
    """Three input files of JSON lines, Parquet and gzip; workspace.records has text and field of each record."""
    workspace, generator = Workspace(tmp_path), np.random.default_rng(0)
    workspace.records = []
    for name in ("a.jsonl", "b.parquet", "c.jsonl.gz"):
        values = [VALUES[number] for number in generator.integers(0, len(VALUES), RECORDS)]
        values = [None if value is None else str(value) for value in values] if name == "b.parquet" else values
        texts = [random_text(generator, tokens) for tokens in generator.integers(0, 6, RECORDS)]  # with duplicates
        workspace.records += zip(texts, values, strict=True)
        if name == "b.parquet":
            pq.write_table(
                pa.table({"content": texts, "meta": [{"from": value} for value in values]}), workspace.inputs / name
            )
            continue
        # Missing values are null in some records and absent in others.
        metas = [{} if value is None and number % 2 else {"from": value} for number, value in enumerate(values)]
        records = zip(texts, metas, strict=True)
        lines = "".join(json.dumps({"content": text, "meta": meta}) + "\n" for text, meta in records)
        (workspace.inputs / name).write_bytes(gzip.compress(lines.encode()) if name.endswith("gz") else lines.encode())
    return workspace


def shortened(record):
    """Filter that drops some texts and changes others."""
    return "has xyz first" if record.text.startswith("xyz") else record._replace(text=record.text.split("zy")[0])


def kept(records, *, filtered=False):
    """Yield the field and the number of tokens of each document; the word "xyz" has two tokens."""
    for text, value in records:
        if filtered:
            text = "" if text.startswith("xyz") else text.split("zy")[0]
        tokens = len(text.split()) + text.count("xyz")
        if text.strip():
            yield None if value is None else str(value), tokens


CASES = {
    "all": ({}, {}),
    "several corpus shards and workers": ({"shard_size": 100, "workers": 2}, {}),
    "filter": ({"filter": (f"{__file__}:shortened",)}, {"filtered": True}),
}


def attributes_of(corpus):
    """Return the field and the number of tokens of each document of a corpus."""
    check_content(corpus)
    fields = pq.read_table(corpus.files.attributes)["meta_from"].to_pylist()
    return list(zip(fields, corpus.lengths_of(np.arange(len(corpus))).tolist(), strict=True))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("chunk_bytes", [500, 1 << 20])
def test_attributes_equal_those_of_a_plain_loop_in_the_order_of_the_corpus(workspace, monkeypatch, case, chunk_bytes):
    changes, rule = CASES[case]
    cut_small(monkeypatch, chunk_bytes)
    workspace.run(record_keys=("meta.from",), **changes)
    corpus, expected = workspace.corpus(), list(kept(workspace.records, **rule))
    assert attributes_of(corpus) == expected
    expected_numbers = [number for number, (value, _) in enumerate(expected) if value in ("wiki", "7")]
    assert documents_in(choose_documents(corpus, ["meta_from in ['wiki', '7']"]), len(corpus)) == expected_numbers


def test_attributes_have_the_same_bytes_for_any_number_of_workers(workspace):
    for name, workers in (("one", 1), ("two", 2)):
        workspace.run(name, record_keys=("meta.from",), workers=workers)
    assert workspace.contents("one") == workspace.contents("two")


def scored(record):
    return record._replace(fields={"score": len(record.text)} if record.text else {})


def write_lines(table, path):
    path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))


@pytest.mark.parametrize("write", [write_lines, pq.write_table, feather.write_feather])
def test_a_filter_sets_an_attribute_that_no_input_has(tmp_path, write):
    workspace = Workspace(tmp_path)
    write(pa.table({"content": ["hello"] * 27 + ["hello world"] * 8}), workspace.inputs / "input")
    workspace.run(record_keys=("score",), filter=(f"{__file__}:scored",))
    corpus = workspace.corpus()
    assert pq.read_table(corpus.files.attributes)["score"].to_pylist() == [5] * 27 + [11] * 8


@pytest.mark.parametrize("write", [write_lines, pq.write_table, feather.write_feather])
@pytest.mark.parametrize("key", ["lnag", "meta", "meta.land"])
def test_an_absent_field_is_a_missing_value_in_every_format_and_a_key_without_any_value_is_warned_of(
    tmp_path, write, key
):
    workspace = Workspace(tmp_path)
    write(pa.table({"content": ["hello"], "meta": [{"lang": "en"}]}), workspace.inputs / "a")
    write(pa.table({"content": ["world"]}), workspace.inputs / "b")
    arguments = arguments_of(tmp_path)
    warning = f"no value of --record-key {key} in 2 documents from 2 chunks"
    code, output, errors = call("preprocess", *arguments, "--record-key", key, "--record-key", "meta.lang", "--dry-run")
    assert code == 0 and warning in errors and "The records have content, meta\n" in errors
    assert f"keys  {key}=None, meta.lang='en'" in output
    code, _, errors = call("preprocess", *arguments, "--record-key", key, "--record-key", "meta.lang")
    assert code == 0 and warning in errors
    columns = pq.read_table(tmp_path / "run_content_document.attributes.parquet").to_pydict()
    assert columns["meta_lang"] == ["en", None] and set(columns[key.replace(".", "_")]) == {None}
    code, _, errors = call("preprocess", *arguments, "--record-key", "meta.lang", "--overwrite")
    assert code == 0 and "--record-key" not in errors


def test_numbers_of_tables_keep_their_identity(workspace):
    """Ids of 64 bits without a sign, ids that pandas wrote as floats in one file, and floats of 32 bits."""
    ids = [2**63 + 1025, 2**63 + 1, 5]
    for path in workspace.inputs.iterdir():
        path.unlink()
    columns = {"content": ["hello"] * 3, "score": pa.array([0.7, 0.69, 0.71], pa.float32())}
    unsigned = {"unsigned": pa.array(ids, pa.uint64()), "id": pa.array([2**60 + 1, 2, 3])}
    pq.write_table(pa.table(columns | unsigned), workspace.inputs / "a.parquet")
    pq.write_table(pa.table(columns | {"id": pa.array([7.0, None, 9.0])}), workspace.inputs / "b.parquet")
    workspace.run(record_keys=("score", "unsigned", "id"))
    corpus = workspace.corpus()
    table = pq.read_table(corpus.files.attributes)
    assert table["unsigned"].to_pylist() == [*map(str, ids), None, None, None]
    assert (table["id"].type, table["id"].to_pylist()) == (pa.int64(), [2**60 + 1, 2, 3, 7, None, 9])
    for expression, expected in (("score>=0.7", [0, 2, 3, 5]), (f"id=={2**60 + 1}", [0]), (f"id=={2**60}", [])):
        assert documents_in(choose_documents(corpus, [expression]), 6) == expected
