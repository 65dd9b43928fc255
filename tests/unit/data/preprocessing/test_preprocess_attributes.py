"""Attributes of documents (--record-key), compared with a plain Python loop over the input files."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import call
from pyarrow import feather
from unit.data.preprocess_workspace import Workspace, arguments_of, cut_small, decoded
from unit.data.small_corpus import documents_in

from megatron_neobert.data.corpus.attributes import choose_documents
from megatron_neobert.data.corpus.reader import check_content

VALUES = ["wiki", "web", "b\u00fccher", None, 7]


def without_web(record):
    """Filter that drops some records and changes the length of others."""
    return "web" if record.fields["meta.from"] == "web" else record._replace(text=record.text.replace("hello", ""))


@pytest.mark.parametrize("chunk_bytes", [500, 1 << 20])
@pytest.mark.parametrize("is_filtered", [False, True])
def test_attributes_equal_those_of_a_plain_loop_in_the_order_of_the_corpus(
    workspace, monkeypatch, chunk_bytes, is_filtered
):
    """Missing values are null in some records and absent in others."""
    records = [("world " * (number % 6) + "hello " * (number % 3), VALUES[number % 5]) for number in range(120)]
    metas = [{} if value is None and number % 2 else {"from": value} for number, (_, value) in enumerate(records)]
    lines = [json.dumps({"content": text, "meta": meta}) for (text, _), meta in zip(records, metas, strict=True)]
    workspace.add_lines("a.jsonl", *lines)
    texts = [text for text, _ in records]
    table = pa.table({"content": texts, "meta": [{"from": value and str(value)} for _, value in records]})
    pq.write_table(table, workspace.inputs / "b.parquet")
    cut_small(monkeypatch, chunk_bytes)
    workspace.run(record_keys=("meta.from",), filter=(f"{__file__}:without_web",) * is_filtered)
    corpus = workspace.corpus()
    check_content(corpus)
    if is_filtered:
        records = [(text.replace("hello", ""), value) for text, value in records if value != "web"]
    expected = [(value and str(value), text) for text, value in records * 2 if text.strip()]
    fields = pq.read_table(corpus.files.attributes)["meta_from"].to_pylist()
    assert list(zip(fields, decoded(workspace), strict=True)) == [(value, text.strip()) for value, text in expected]
    expected_numbers = [number for number, (value, _) in enumerate(expected) if value in ("wiki", "7")]
    assert documents_in(choose_documents(corpus, ["meta_from in ['wiki', '7']"]), len(corpus)) == expected_numbers


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
