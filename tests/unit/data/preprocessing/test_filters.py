"""The user's filters keep, drop, rewrite and reject records, and a corpus has one version of each filter."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import run_forked
from unit.data.preprocess_workspace import arguments_of, decoded

from megatron_neobert.data.preprocessing.run import plan_preprocessing
from megatron_neobert.errors import ConfigError, DataError
from megatron_neobert.runtime.atomic_files import sha256_of

FILTERS = """
def no_masks(record):
    return "a mask" if "mask" in record.text and "/inputs/a." in record.input_file else None

def rewrite(record):
    if record.text == "xyz":
        raise ZeroDivisionError("by zero")
    return record._replace(text=record.text.replace("zy", record.fields.get("language") or ""))

def ends(record):
    raise SystemExit(0)

def score(record):
    return None if record.text == "hello" else f"score {record.text}" + "!" * 999

wrong = {"a": 1}
def no_text(record):
    return record._replace(text=5)
def no_fields(record):
    return record._replace(fields=record.fields.update(language="en"))
"""
ROWS = [("hello", "world"), ("mask", None), ("zy hello", "world"), ("xyz", "xy"), ("zy", None), ("[", "]")]


@pytest.fixture
def filters(workspace):
    """Return a function that gives the values of --filter for functions of a file."""
    file = workspace.folder / "own_filters.py"
    file.write_text(FILTERS)
    return lambda *functions: tuple(f"{file}:{function}" for function in functions)


def write_lines(workspace):
    workspace.add_lines("a.jsonl", *(json.dumps({"content": text, "language": language}) for text, language in ROWS))


def write_parquet(workspace):
    texts, languages = zip(*ROWS, strict=True)
    columns = {"content": texts, "language": languages, "score": [0.5] * 6}
    pq.write_table(pa.table(columns), workspace.inputs / "a.parquet", row_group_size=4)


def write_archive(workspace):
    with (workspace.inputs / "a.wet").open("wb") as file:
        for text, language in ROWS:
            head = f"WARC/1.0\r\nWARC-Type: conversion\r\nContent-Type: text/plain\r\nContent-Length: {len(text)}\r\n"
            head += f"Language: {language}\r\n" if language else ""
            file.write(f"{head}\r\n{text}\r\n\r\n".encode())


@pytest.mark.parametrize("write", [write_lines, write_parquet, write_archive])
@pytest.mark.parametrize("workers", [None, 2])
def test_records_are_kept_dropped_rewritten_and_rejected_in_the_filters_order(workspace, filters, write, workers):
    write(workspace)
    workspace.run(filter=filters("no_masks", "rewrite"), record_keys=("language",), workers=workers)
    assert decoded(workspace) == ["hello", "world hello", "["]
    manifest = workspace.corpus().manifest
    assert manifest.dropped == {"empty text": 1, "own_filters:no_masks: a mask": 1}
    assert manifest.rejected == {"a filter failed": 1}
    assert manifest.records == 6
    (reject,) = map(json.loads, workspace.contents()["content_document.rejects.jsonl"].splitlines())
    assert reject["detail"] == "own_filters:rewrite: ZeroDivisionError: by zero" and reject["raw"] == "xyz"
    assert {3, 4} & {*reject.values()}, "record number: 3 counted from 0 for rows, 4 counted from 1 for others"
    version = f"sha256 {sha256_of(workspace.folder / 'own_filters.py')}"
    assert manifest.filters.items() >= {"own_filters:no_masks": version, "own_filters:rewrite": version}.items()


@pytest.mark.parametrize(
    ("function", "message"),
    [("no_text", "text is int instead of str"), ("no_fields", "fields is NoneType instead of dict")],
)
def test_result_of_a_wrong_type_is_a_failure_of_the_filter(workspace, filters, function, message):
    workspace.add_texts("a.jsonl", "hello")
    with pytest.raises(DataError, match=f"own_filters:{function}: TypeError: returned a record whose {message}"):
        workspace.run(filter=filters(function, "rewrite"), record_keys=("language",), max_error_rate=0.5)


@pytest.mark.parametrize("workers", [1, 2])
def test_filter_that_ends_its_process_is_a_filter_that_failed(workspace, filters, workers):
    for name in "ab":
        workspace.add_texts(f"{name}.jsonl", "hello")
    with pytest.raises(DataError, match="2 records: 2 a filter failed"):
        workspace.run(filter=filters("ends"), workers=workers)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_thousand_reasons_of_filters_are_counted_one_by_one_and_the_rest_together(
    workspace, filters, workers
):
    for name, scores in {"a": range(700), "b": range(100, 1700)}.items():
        workspace.add_texts(f"{name}.jsonl", *map(str, scores), "hello", " ")
    workspace.run(filter=filters("score"), workers=workers)
    reasons = [f"own_filters:score: score {number}".ljust(219, "!") for number in range(999)]
    expected = {reason: 1 + (100 <= number < 700) for number, reason in enumerate(reasons)}
    assert workspace.corpus().manifest.dropped == {**expected, "empty text": 2, "other reasons of filters": 701}


def test_finished_chunks_of_another_version_of_a_filter_are_not_resumed(workspace, filters):
    workspace.add_texts("a.jsonl", "hello", "world")
    (workspace.inputs / "b.jsonl").write_text("broken\n" * 9)
    with pytest.raises(DataError):
        workspace.run(filter=filters("rewrite"), max_error_rate=0.1)
    file = workspace.folder / "own_filters.py"
    file.write_text(file.read_text().replace("xyz", "xy"))
    (workspace.inputs / "b.jsonl").write_text("")
    with pytest.raises(ConfigError, match="filters"):
        workspace.run(filter=filters("rewrite"), resume=True)
    workspace.run(filter=filters("rewrite"), overwrite=True)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["own_filters.py"], "use FILE.py:FUNCTION"),
        (["nowhere.py:f"], "FileNotFoundError"),
        (["own_filters.py:nothing"], "has no attribute 'nothing'"),
        (["ending.py:main"], "ending.py:main: SystemExit: 0; use FILE.py:FUNCTION of a file that can be imported"),
        (["own_filters.py:rewrite"] * 2, r"two filters have the label own_filters:rewrite"),
    ],
)
@pytest.mark.usefixtures("filters")
def test_filters_that_cannot_be_used_are_refused_by_the_plan(workspace, monkeypatch, names, message):
    monkeypatch.chdir(workspace.folder)
    workspace.add_texts("a.jsonl", "hello")
    (workspace.folder / "ending.py").write_text("import sys\ndef main(*_): pass\nsys.exit(0)\n")
    with pytest.raises(ConfigError, match=message):
        plan_preprocessing(workspace.settings(filter=tuple(names)))


def test_command_and_dry_run_apply_filters(workspace, filters):
    write_lines(workspace)
    first, second = filters("no_masks", "rewrite")
    flags = ("--filter", first, "--filter", second, "--record-key", "language", "--max-error-rate", "0.5")
    command = arguments_of(workspace.folder, *flags)
    code, output = run_forked("preprocess", *command, "--dry-run")
    assert code == 0 and "text  world hello" in output
    code, output = run_forked("preprocess", *command)
    assert code == 0 and "1 own_filters:no_masks: a mask" in output and "1 a filter failed" in output
