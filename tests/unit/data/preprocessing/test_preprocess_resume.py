"""A resumed run gives the same bytes and repeats no finished chunk."""

import os

import pytest
from unit.data.preprocess_workspace import add_mixed_inputs

from megatron_neobert.data.preprocessing import run as run_module
from megatron_neobert.data.preprocessing.run import is_complete, plan_preprocessing, tokenize_chunk


class StoppedByTest(Exception):
    """Any reason for the end of a run."""


@pytest.fixture
def allow(monkeypatch):
    """Return a function that lets this number of chunks be tokenized, and ends the run at the next one."""

    def allow(chunks):
        remaining = iter(range(chunks))

        def tokenize(job):
            if next(remaining, None) is None:
                raise StoppedByTest
            return tokenize_chunk(job)

        monkeypatch.setattr(run_module, "tokenize_chunk", tokenize)

    return allow


@pytest.mark.parametrize("finished", range(7))
def test_resumed_run_tokenizes_the_other_chunks_and_gives_the_same_bytes(workspace, allow, finished):
    add_mixed_inputs(workspace)
    workspace.run("whole")
    allow(finished)
    with pytest.raises(StoppedByTest):
        workspace.run()
    assert (workspace.folder / "out" / "run_content_document.partial").exists() == (finished > 0)
    allow(7 - finished)
    workspace.run(resume=True)
    assert workspace.contents() == workspace.contents("whole")


def test_input_files_may_be_added_and_removed_before_a_run_is_resumed(workspace, allow):
    for name in ("b", "c", "d"):
        workspace.add_texts(f"{name}.jsonl", f"hello xyz {name}")
    allow(2)
    with pytest.raises(StoppedByTest):
        workspace.run()
    (workspace.inputs / "c.jsonl").unlink()
    workspace.add_texts("a.jsonl", "world")
    allow(2)  # a and d
    workspace.run(resume=True)
    allow(3)
    workspace.run("fresh")
    assert workspace.contents() == workspace.contents("fresh")


@pytest.mark.parametrize(
    ("changes", "changed_file"),
    [
        ({"inputs": ("b.jsonl", "a.jsonl")}, None),
        ({"inputs": ("a.jsonl", "b.jsonl", "c.jsonl")}, None),
        ({"shard_size": None}, None),
        ({"record_keys": ("from",)}, None),
        ({"max_document_bytes": 100}, None),
        ({}, "inputs/a.jsonl"),
        ({}, "out/run_content_document_00001.bin"),
    ],
)
def test_corpus_of_other_settings_or_files_is_not_complete(workspace, monkeypatch, changes, changed_file):
    monkeypatch.chdir(workspace.inputs)
    for name in "abc":
        workspace.add_texts(f"{name}.jsonl", *["hello world"] * 100)
    same = {"inputs": ("a.jsonl", "b.jsonl"), "shard_size": 1, "resume": True}
    workspace.run(**same)
    assert is_complete(plan_preprocessing(workspace.settings(**same)))
    if changed_file:
        file = workspace.folder / changed_file
        modified = file.stat().st_mtime_ns
        file.write_text('{"content": "hello"}\n')
        os.utime(file, ns=(modified, modified))
    assert not is_complete(plan_preprocessing(workspace.settings(**same | changes)))


def test_corpus_is_not_complete_if_an_input_file_is_newer(workspace):
    workspace.add_texts("a.jsonl", "hello")
    workspace.run()
    assert is_complete(plan_preprocessing(workspace.settings(resume=True)))
    (workspace.inputs / "a.jsonl").touch()
    assert not is_complete(plan_preprocessing(workspace.settings(resume=True)))


def test_interrupted_run_with_overwrite_is_not_complete(workspace, allow):
    add_mixed_inputs(workspace)
    workspace.run()
    allow(3)
    with pytest.raises(StoppedByTest):
        workspace.run(overwrite=True, max_document_bytes=1000)
    again = {"overwrite": True, "resume": True, "max_document_bytes": 1000}
    allow(4)
    assert not is_complete(plan_preprocessing(workspace.settings(**again)))
    workspace.run(**again)
    assert workspace.corpus().manifest.filters["max_document_bytes"] == 1000
