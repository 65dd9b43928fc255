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
from unit.data.preprocess_workspace import WORDS, Workspace, add_mixed_inputs, cut_small, decoded
from unit.data.small_corpus import write_vocabulary

from megatron_neobert.commands.sample_corpus import choose_documents
from megatron_neobert.data.corpus.reader import check_content
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
    assert decoded(workspace) == ["hello", "world"]


@pytest.mark.parametrize(("good", "allowed"), [(998, False), (999, True)])
def test_run_ends_only_if_the_error_rate_exceeds_its_bound(workspace, good, allowed):
    """1 of 999 is above 0.001, 1 of 1,000 is not."""
    workspace.add_lines("a.jsonl", "broken", *['{"content": "hello"}'] * good)
    if allowed:
        assert workspace.run(max_error_rate=0.001).records == 1000
    else:
        message = r"1 of 999 records .*\(0\.10 %\).* --max-error-rate 0\.001 .*1 malformed JSON\); .*a\.jsonl, "
        with pytest.raises(DataError, match=message + "line 1: malformed JSON"):
            workspace.run(max_error_rate=0.001)
        assert not list((workspace.folder / "out").glob("*.bin"))


@pytest.mark.parametrize("bad_file", ["a.jsonl", "z.jsonl"])
def test_error_rate_is_that_of_all_input_files_in_any_order(workspace, bad_file):
    """15 of 20,015 are below 0.001, 15 of the 10,015 records of the bad file are above."""
    workspace.add_lines("m.jsonl", *['{"content": "hello"}'] * 10_000)
    workspace.add_lines(bad_file, *["broken"] * 15, *['{"content": "hello"}'] * 10_000)
    workspace.run(max_error_rate=0.001)
    assert workspace.corpus().manifest.rejected == {"malformed JSON": 15}


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


@pytest.mark.parametrize("changes", [{"shard_size": 1}, {}], ids=str)
def test_manifest_counts_documents_and_tokens_of_each_input(workspace, changes):
    words = {"a.jsonl": "hello", "b.jsonl": "world", "c.jsonl": "zy", "d.jsonl": "hello"}
    for name, word in words.items():
        workspace.add_texts(name, *(" ".join([word] * (1 + number % 7)) for number in range(9)), "", "")
    workspace.run(**changes)
    documents = iter(decoded(workspace))
    for path, record in workspace.corpus().manifest.inputs.items():
        texts = [next(documents) for _ in range(record.documents)]
        assert {word for text in texts for word in text.split()} == {words[Path(path).name]}
        assert record.tokens == sum(len(text.split()) for text in texts)
    assert next(documents, None) is None
    texts = [" ".join([word] * (1 + number % 7)) for word in words.values() for number in range(9)]
    tokens = sum(len(text.split()) for text in texts)
    assert workspace.corpus().manifest.bytes_per_token == sum(map(len, texts)) / tokens


def change_input(workspace):
    workspace.add_texts("a.jsonl", "world")  # same size


def change_tokenizer(workspace):
    write_vocabulary(workspace.vocab, [*WORDS, "more"])


def change_filter(workspace):
    with (workspace.folder / "own.py").open("a") as file:
        file.write("\n")


@pytest.mark.parametrize(
    ("change", "name"),
    [(change_input, r"a\.jsonl"), (change_tokenizer, r"vocab\.txt"), (change_filter, r"own\.py")],
)
def test_file_that_changes_after_the_plan_ends_the_run(workspace, change, name):
    for file in ("a", "b"):
        workspace.add_texts(f"{file}.jsonl", "hello")
    (workspace.folder / "own.py").write_text("def keep(record):\n    return None\n")
    filters = (f"{workspace.folder / 'own.py'}:keep",)
    plan = plan_preprocessing(workspace.settings(workers=2, filter=filters))
    change(workspace)
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
