"""Input files to a corpus: it has every document once and in order, and every record is counted."""

import gzip
import hashlib
import json
import sysconfig
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from backports import zstd
from transformers import BertTokenizer
from unit.data.preprocess_workspace import Workspace, add_mixed_inputs, cut_small, decoded

from megatron_neobert.commands.sample_corpus import choose_documents
from megatron_neobert.data.corpus.reader import check_content
from megatron_neobert.data.preprocessing import run
from megatron_neobert.data.preprocessing.run import plan_preprocessing, preprocess
from megatron_neobert.errors import ConfigError, DataError


def test_corpus_has_the_same_bytes_for_any_number_of_workers_and_any_chunks(workspace, monkeypatch):
    add_mixed_inputs(workspace)
    for name, workers in {"1": None, "2": 2, "4": 4}.items():
        workspace.run(name, workers=workers, record_keys=("content",))
    cut_small(monkeypatch, 2000)
    assert len(plan_preprocessing(workspace.settings("small chunks")).chunks) > 20
    workspace.run("small chunks", record_keys=("content",))
    contents, ends = workspace.contents("1"), ("attributes.parquet", "bin", "idx", "json", "rejects.jsonl")
    assert sorted(contents) == [f"content_document.{end}" for end in ends]
    assert min(map(len, contents.values())) > 100
    assert contents == workspace.contents("2") == workspace.contents("4")
    small = workspace.contents("small chunks")
    # In rejects, lines of a chunk are counted from its beginning.
    del contents["content_document.rejects.jsonl"], small["content_document.rejects.jsonl"]
    assert contents == small
    check_content(workspace.corpus("1"))


def test_every_record_is_kept_rejected_or_dropped_and_rejects_are_listed(workspace):
    pq.write_table(pa.table({"content": ["hello", None, " "]}), workspace.inputs / "a.parquet")
    workspace.add_lines("b.jsonl", "broken", '{"content": 1}', "", '{"text": "x"}', '{"content": "\\u200b"}')
    with (workspace.inputs / "b.jsonl").open("ab") as stream:
        stream.write(b'\xff\n{"content": "world"}\n')
    counts = workspace.run()
    expected = [
        ("a.parquet", "row", 1, "null text", {"raw": ""}),
        ("b.jsonl", "line", 1, "malformed JSON", {"raw": "broken"}),
        ("b.jsonl", "line", 2, "text is not a string", {"raw": '{"content": 1}'}),
        ("b.jsonl", "line", 4, "missing key", {"raw": '{"text": "x"}'}),
        ("b.jsonl", "line", 6, "malformed JSON", {"raw_base64": "/w=="}),
    ]
    rejects = [json.loads(line) for line in workspace.settings().files.rejects.read_text(encoding="utf-8").splitlines()]
    assert all(entry.pop("detail") for entry in rejects)
    assert rejects == [
        {"file": str(workspace.inputs / file), unit: number, "reason": reason, **raw}
        for file, unit, number, reason, raw in expected
    ]
    manifest = workspace.corpus().manifest
    assert manifest.rejected == {"malformed JSON": 2, "missing key": 1, "null text": 1, "text is not a string": 1}
    assert manifest.dropped == {"empty text": 1, "no tokens": 1}
    assert (manifest.records, manifest.documents) == (9, 2) == (counts.records, counts.documents)
    assert [(record.documents, record.tokens) for record in manifest.inputs.values()] == [(1, 1), (1, 1)]
    assert manifest.bytes_per_token == len("helloworld") / 2
    assert decoded(workspace) == ["hello", "world"]


@pytest.mark.parametrize("bad_file", ["a.jsonl", "z.jsonl"])
@pytest.mark.parametrize(("good", "allowed"), [(998, False), (999, True)])
def test_run_ends_only_if_the_error_rate_of_all_input_files_exceeds_its_bound(
    workspace, monkeypatch, bad_file, good, allowed
):
    """1 of 999 is above 0.001, 1 of 1,000 is not, although it is 1 of 101 of its file."""
    monkeypatch.setattr(run, "_EARLY_END_RECORDS", 50)
    workspace.add_texts("m.jsonl", *["hello"] * (good - 100))
    workspace.add_lines(bad_file, "broken", *['{"content": "hello"}'] * 100)
    if allowed:
        assert workspace.run(max_error_rate=0.001).records == 1000
    else:
        message = r"1 of 999 records .*\(0\.10 %\).* --max-error-rate 0\.001 .*1 malformed JSON\); .*\.jsonl, "
        with pytest.raises(DataError, match=message + "line 1: malformed JSON"):
            workspace.run(max_error_rate=0.001)
        assert not list((workspace.folder / "out").glob("*.bin"))


def test_corpus_without_a_document_is_refused_and_leaves_nothing(workspace):
    workspace.add_texts("a.jsonl", "", " ")
    (workspace.inputs / "b.jsonl").touch()
    with pytest.raises(DataError, match=r"no document in 2 input files \(2 records: 2 empty text\)"):
        workspace.run()
    assert list((workspace.folder / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ray_address": "auto"}, "--ray-address auto has no effect without --executor ray"),
        ({"text_separator": ""}, "--text-separator is empty"),
        ({"max_error_rate": 1.5}, "--max-error-rate 1.5 is not a fraction of the records"),
        ({"record_keys": ("2nd",)}, "--record-key 2nd would be the attribute '2nd'"),
    ],
)
def test_invalid_settings_are_refused(workspace, settings, message):
    with pytest.raises(ConfigError, match=message):
        workspace.settings(**settings)


def test_manifest_has_the_sha256_of_all_bytes_of_local_inputs(workspace, monkeypatch):
    lines = b'{"content": "hello"}\n' * 100
    content = {
        "lines.jsonl": lines,
        "lines.jsonl.gz": gzip.compress(lines[:70]) + gzip.compress(lines[70:]) + b"\0" * 100,
        "lines.jsonl.zst": zstd.compress(lines),
        "no_records.jsonl": b"",
        "text.txt": b"\xef\xbb\xbfhello world\n",
    }
    for name, data in content.items():
        (workspace.inputs / name).write_bytes(data)
    table = workspace.inputs / "table.parquet"
    pq.write_table(pa.table({"content": ["hello"] * 5, "other": range(5)}), table)
    cut_small(monkeypatch, 1000)  # lines.jsonl has several chunks
    expected = {name: hashlib.sha256(data).hexdigest() for name, data in content.items()}
    workspace.run()
    local = {Path(path).name: record.sha256 for path, record in workspace.corpus().manifest.inputs.items()}
    assert local == {**expected, table.name: hashlib.sha256(table.read_bytes()).hexdigest()}
    workspace.run("remote", inputs=tuple(f"file://{workspace.inputs / name}" for name in ("text.txt", table.name)))
    remote = [record.sha256 for record in workspace.corpus("remote").manifest.inputs.values()]
    assert remote == [None, None], "a remote file is not read a second time"


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda folder: (folder / "inputs" / "a.jsonl").write_text('{"content": "world"}\n'), r"a\.jsonl"),  # same size
        (lambda folder: append(folder / "vocab.txt", "more\n"), r"vocab\.txt"),
        (lambda folder: append(folder / "own.py", "\n"), r"own\.py"),
    ],
)
def test_file_that_changes_after_the_plan_ends_the_run(workspace, change, name):
    for file in ("a", "b"):
        workspace.add_texts(f"{file}.jsonl", "hello")
    (workspace.folder / "own.py").write_text("def keep(record):\n    return None\n")
    filters = (f"{workspace.folder / 'own.py'}:keep",)
    plan = plan_preprocessing(workspace.settings(workers=2, filter=filters))
    change(workspace.folder)
    with pytest.raises(DataError, match=f"{name} has changed since the run started"):
        preprocess(plan)


def test_corpus_of_nanotoken_has_the_ids_of_transformers(bert_vocabulary, tmp_path):
    pytest.importorskip("nanotoken")
    workspace = Workspace(tmp_path)
    workspace.vocab = bert_vocabulary
    documents = choose_documents([Path(sysconfig.get_path("stdlib"))], budget_bytes=500_000)
    pq.write_table(pa.table({"content": [document.content for document in documents]}), workspace.inputs / "t.parquet")
    workspace.run(tokenizer_backend="fast")
    corpus, theirs = workspace.corpus(), BertTokenizer(str(bert_vocabulary))
    (name,) = corpus.manifest.tokenizer_backends
    assert name.startswith("nanotoken")
    expected = theirs([document.content for document in documents], add_special_tokens=False)["input_ids"]
    assert [corpus.document(number).tolist() for number in range(len(corpus))] == expected
    assert len(documents) > 200
