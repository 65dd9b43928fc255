"""Filters of the user's own: what they keep, drop, rewrite and fail at, and that a corpus is made with one version."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import run_forked
from unit.data.preprocess_place import decoded

from megatron_neobert.data.preprocessing.plan import plan_preprocessing
from megatron_neobert.data.preprocessing.run import preprocess
from megatron_neobert.errors import ConfigError, DataError

FILTERS = """
def no_masks(record):
    return "a mask" if "mask" in record.text else None

def rewrite(record):
    if record.text == "xyz":
        raise ZeroDivisionError("by zero")
    return record._replace(text=record.text.replace("zy", record.fields.get("language") or ""))

def name_the_shard(record):
    return record.shard.rpartition("/")[2]

wrong = {"a": 1}
def wrong_type(record):
    return True

def no_text(record):
    return record._replace(text=5)
"""
ROWS = [("hello", "world"), ("mask", None), ("zy hello", "world"), ("xyz", "xy"), ("zy", None), ("[", "]")]


@pytest.fixture
def filters(place):
    """Gives the flag for functions of a file."""
    file = place.folder / "own_filters.py"
    file.write_text(FILTERS)
    return lambda *functions: tuple(f"{file}:{function}" for function in functions)


def write_lines(place):
    place.add_lines("a.jsonl", *(json.dumps({"content": text, "language": language}) for text, language in ROWS))


def write_parquet(place):
    texts, languages = zip(*ROWS, strict=True)
    columns = {"content": texts, "language": languages, "score": [0.5] * 6}
    pq.write_table(pa.table(columns), place.shards / "a.parquet", row_group_size=4)


def write_arrow(place):
    texts, languages = zip(*ROWS, strict=True)
    table = pa.table({"language": languages, "content": [*texts]})
    with pa.OSFile(str(place.shards / "a.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def write_archive(place):
    with (place.shards / "a.wet").open("wb") as file:
        for text, language in ROWS:
            head = f"WARC/1.0\r\nWARC-Type: conversion\r\nContent-Type: text/plain\r\nContent-Length: {len(text)}\r\n"
            head += f"Language: {language}\r\n" if language else ""
            file.write(f"{head}\r\n{text}\r\n\r\n".encode())


@pytest.mark.parametrize("write", [write_lines, write_parquet, write_arrow, write_archive])
@pytest.mark.parametrize("workers", [None, 2])
def test_records_are_kept_dropped_rewritten_and_rejected_in_the_order_of_the_filters(place, filters, write, workers):
    write(place)
    place.run(filter=filters("no_masks", "rewrite"), record_keys=("language",), workers=workers)
    assert decoded(place) == ["hello", "world hello", "["]
    manifest = place.corpus().manifest
    assert manifest.dropped == {"empty text": 1, "own_filters:no_masks: a mask": 1}
    assert manifest.rejected == {"a filter failed": 1}
    assert manifest.records == 6
    (reject,) = map(json.loads, place.contents()["content_document.rejects.jsonl"].splitlines())
    assert reject["detail"] == "own_filters:rewrite: ZeroDivisionError: by zero" and reject["raw"] == "xyz"
    assert {3, 4} & {*reject.values()}, "the record's number, of rows from 0, of others from 1"
    assert [name for name in manifest.filters if "filter" in name] == ["own_filters:no_masks", "own_filters:rewrite"]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("wrong_type", "returned bool, and not a record"),
        ("no_text", "returned a record whose text is of type int, and no str"),
    ],
)
def test_answer_of_another_type_is_a_failure_of_the_filter(place, filters, function, message):
    place.add_texts("a.jsonl", "hello")
    with pytest.raises(DataError, match=rf"own_filters:{function}: TypeError: {message}"):
        place.run(filter=filters(function, "rewrite"), record_keys=(), max_error_rate=0.5)


@pytest.mark.parametrize("where", ["own_filters.py", "other/own_filters.py"])
def test_two_filters_that_the_manifest_would_call_alike_are_refused(place, filters, where):
    place.add_texts("a.jsonl", "hello")
    file = place.folder / where
    file.parent.mkdir(exist_ok=True)
    file.write_text(FILTERS)
    both = (*filters("no_masks", "rewrite"), f"{file}:rewrite")
    with pytest.raises(ConfigError, match=rf"{where}:rewrite: another filter is called own_filters:rewrite too"):
        plan_preprocessing(place.settings(filter=both, record_keys=()))


def test_finished_chunks_of_other_code_are_not_continued(place, filters):
    place.add_texts("a.jsonl", "hello", "world")
    (place.shards / "b.jsonl").write_text("broken\n" * 9)
    with pytest.raises(DataError):
        place.run(filter=filters("rewrite"), record_keys=(), max_error_rate=0.1)
    file = place.folder / "own_filters.py"
    file.write_text(file.read_text().replace("xyz", "xy"))
    (place.shards / "b.jsonl").write_text("")
    with pytest.raises(ConfigError, match="filters"):
        place.run(filter=filters("rewrite"), record_keys=(), resume=True)
    place.run(filter=filters("rewrite"), record_keys=(), overwrite=True)
    before = place.corpus().manifest.filters["own_filters:rewrite"]
    file.write_text(file.read_text() + "\n")
    place.run(filter=filters("rewrite"), record_keys=(), overwrite=True)
    assert place.corpus().manifest.filters["own_filters:rewrite"] != before


def test_a_filter_that_changes_after_the_plan_ends_the_run(place, filters):
    place.add_texts("a.jsonl", "hello")
    place.add_texts("b.jsonl", "hello")
    plan = plan_preprocessing(place.settings(filter=filters("rewrite"), record_keys=(), workers=2))
    file = place.folder / "own_filters.py"
    file.write_text(file.read_text() + "\n")
    with pytest.raises(DataError, match="--filter own_filters:rewrite has changed since the run started"):
        preprocess(plan)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_filters.py", "give FILE.py:FUNCTION"),
        ("nowhere.py:f", "FileNotFoundError"),
        ("own_filters.py:nothing", "has no attribute 'nothing'"),
        ("own_filters.py:wrong", "wrong is no function"),
    ],
)
@pytest.mark.usefixtures("filters")
def test_what_is_no_filter_is_refused_before_anything_is_read(place, monkeypatch, name, message):
    monkeypatch.chdir(place.folder)
    place.add_texts("a.jsonl", "hello")
    with pytest.raises(ConfigError, match=message):
        plan_preprocessing(place.settings(filter=(name,), record_keys=()))


@pytest.mark.parametrize("write", [write_parquet, write_arrow])
def test_column_that_a_table_lacks_is_refused_by_the_plan_and_never_quarantined(place, write):
    write_lines(place)
    for name in ("b", "c"):
        write(place)
        next(place.shards.glob("a.[!j]*")).rename(place.shards / f"{name}.table")
    with pytest.raises(ConfigError) as caught:
        plan_preprocessing(place.settings(quarantine=True, record_keys=("url",)))
    columns = "content, language, score" if write is write_parquet else "language, content"
    message = f"has no column 'url'; its columns: {columns}; choose among them with --record-key"
    assert caught.value.problems == [f"{place.shards / name}.table {message}" for name in ("b", "c")]
    assert not (place.folder / "out").exists()


def test_the_command_takes_filters_and_its_dry_run_applies_them(place, filters):
    write_lines(place)
    command = ["--input", place.shards, "--output-prefix", place.folder / "P", "--tokenizer-model", place.vocab]
    first, second = filters("no_masks", "rewrite")
    command += ["--filter", first, "--filter", second, "--record-key", "language", "--max-error-rate", "0.5"]
    code, output = run_forked("preprocess", *command, "--dry-run")
    assert code == 0 and "text  world hello" in output
    code, output = run_forked("preprocess", *command)
    assert code == 0 and "1 own_filters:no_masks: a mask" in output and "1 a filter failed" in output
