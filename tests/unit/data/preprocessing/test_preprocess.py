"""Input files to a corpus: it has every document once and in order, and every record is counted."""

import hashlib
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from unit.data.preprocess_workspace import WORDS, add_mixed_inputs, cut_small, decoded
from unit.data.small_corpus import write_vocabulary

from megatron_neobert.data.corpus.reader import check_content
from megatron_neobert.data.preprocessing import run as run_module
from megatron_neobert.data.preprocessing.chunks import tokenize_chunk
from megatron_neobert.data.preprocessing.plan import plan_preprocessing
from megatron_neobert.data.preprocessing.run import preprocess
from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer
from megatron_neobert.errors import ConfigError, DataError


def test_corpus_has_the_same_bytes_for_any_number_of_workers_and_any_chunks(workspace, monkeypatch):
    add_mixed_inputs(workspace)
    for name, workers in {"1": None, "2": 2, "4": 4}.items():
        workspace.run(name, workers=workers)
    cut_small(monkeypatch, 2000)
    assert len(plan_preprocessing(workspace.settings("small chunks")).chunks) > 20
    workspace.run("small chunks")
    contents = workspace.contents("1")
    assert sorted(contents) == [f"content_document.{end}" for end in ("bin", "idx", "json", "rejects.jsonl")]
    assert min(map(len, contents.values())) > 100
    assert contents == workspace.contents("2") == workspace.contents("4") == workspace.contents("small chunks")
    check_content(workspace.corpus("1"))


# --- rejected and dropped records


def test_every_record_is_kept_rejected_or_dropped_and_rejects_are_listed(workspace):
    pq.write_table(pa.table({"content": ["hello", None, " "]}), workspace.inputs / "a.parquet")
    workspace.add_lines("b.jsonl", "broken", '{"content": 1}', "", '{"text": "x"}', '{"content": "\\u200b"}')
    with (workspace.inputs / "b.jsonl").open("ab") as stream:
        stream.write(b'\xff\n{"content": "world"}\n')
    report = workspace.run()
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
    assert (manifest.records, manifest.documents) == (9, 2) == (report.counts.records, report.counts.documents)
    assert decoded(workspace) == ["hello", "world"]


def test_line_numbers_of_rejects_count_from_the_beginning_of_the_file_in_every_chunk(workspace, monkeypatch):
    lines = ["broken" if number % 7 == 0 else '{"content": "hello"}' for number in range(1, 200)]
    workspace.add_lines("a.jsonl", *lines)
    cut_small(monkeypatch, 500)
    assert len(plan_preprocessing(workspace.settings()).chunks) > 5
    workspace.run()
    numbers = [json.loads(line)["line"] for line in workspace.settings().files.rejects.read_text().splitlines()]
    assert numbers == list(range(7, 200, 7))


@pytest.mark.parametrize(("good", "allowed"), [(998, False), (999, True)])
def test_run_ends_only_if_the_error_rate_exceeds_its_bound(workspace, good, allowed):
    """1 of 999 is above 0.001, 1 of 1,000 is not."""
    workspace.add_lines("a.jsonl", "broken", *['{"content": "hello"}'] * good)
    if allowed:
        assert workspace.run(max_error_rate=0.001).counts.records == 1000
    else:
        message = (
            r"1 of 999 records .*\(0\.10 %\).* --max-error-rate 0\.001 .*1 malformed JSON\); for example: .*a\.jsonl, "
        )
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


@pytest.mark.parametrize(("errors", "allowed"), [(10_000, 0.001), (1, 0.0)])
def test_run_with_too_many_errors_ends_before_all_input_files_are_read(workspace, monkeypatch, errors, allowed):
    workspace.add_lines("a.jsonl", *['{"text": "hello"}'] * errors)
    workspace.add_texts("b.jsonl", "hello")
    read = []
    monkeypatch.setattr(run_module, "tokenize_chunk", lambda job: read.append(job.input_name) or tokenize_chunk(job))
    message = rf"{errors:,} of {errors:,} records .*100.00 %.*a\.jsonl, line 1: .*no key 'content'; keys found: text"
    with pytest.raises(DataError, match=message):
        workspace.run(max_error_rate=allowed)
    assert read == [str(workspace.inputs / "a.jsonl")]
    assert not list((workspace.folder / "out").glob("*.bin"))


def test_corpus_without_a_document_is_refused_and_leaves_nothing(workspace):
    workspace.add_texts("a.jsonl", "", " ")
    (workspace.inputs / "b.jsonl").touch()
    with pytest.raises(DataError, match=r"no document in 2 input files \(2 records: 2 empty text\)"):
        workspace.run()
    assert list((workspace.folder / "out").iterdir()) == []


# --- inputs and outputs


def test_manifest_names_inputs_with_size_and_checksum_and_the_tokenizer(workspace):
    workspace.add_texts("b.jsonl", "hello")
    workspace.add_texts("a.jsonl", "world")
    workspace.run(text_key="content")
    manifest, tokenizer = workspace.corpus().manifest, load_tokenizer(workspace.vocab)
    assert list(manifest.inputs) == [str(workspace.inputs / name) for name in ("a.jsonl", "b.jsonl")]
    content = (workspace.inputs / "a.jsonl").read_bytes()
    record = manifest.inputs[str(workspace.inputs / "a.jsonl")]
    assert (record.bytes, record.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    workspace.run("remote", inputs=(f"file://{workspace.inputs / 'a.jsonl'}",))
    (remote,) = workspace.corpus("remote").manifest.inputs.values()
    assert (remote.bytes, remote.sha256) == (len(content), None), "a remote file is not read a second time"
    assert manifest.tokenizer_fingerprint == tokenizer.fingerprint
    assert (manifest.vocab_size, manifest.special_tokens) == (tokenizer.vocab_size, tokenizer.special_tokens)
    assert (manifest.documents, manifest.tokens, manifest.dtype, manifest.text_key) == (2, 2, "uint16", "content")


@pytest.mark.parametrize("changes", [{"shard_size": 1}, {"deduplicate": "exact", "split_validation": 0.4}], ids=str)
def test_manifest_counts_documents_and_tokens_of_each_input(workspace, changes):
    words = {"a.jsonl": "hello", "b.jsonl": "world", "c.jsonl": "zy", "d.jsonl": "hello"}
    for name, word in words.items():
        workspace.add_texts(name, *(" ".join([word] * (1 + number % 7)) for number in range(9)), "", "")
    workspace.run(**changes)
    for end in ("", "_validation") if "split_validation" in changes else ("",):
        documents = iter(decoded(workspace, end=end))
        for path, record in workspace.corpus(end=end).manifest.inputs.items():
            texts = [next(documents) for _ in range(record.documents)]
            assert {word for text in texts for word in text.split()} <= {words[Path(path).name]}
            assert record.tokens == sum(len(text.split()) for text in texts)
        assert next(documents, None) is None
    first, _, _, same = workspace.corpus().manifest.inputs.values()
    assert first.documents and bool(same.documents) == ("deduplicate" not in changes)


def test_output_of_an_earlier_run_is_refused_as_input(workspace):
    workspace.add_texts("a.jsonl", "hello")
    inside = {"output_prefix": str(workspace.inputs / "run")}
    with pytest.raises(ConfigError, match=r"--output-prefix .*run is below --input .*inputs, so a later run"):
        workspace.run(**inside)
    by_glob = {**inside, "inputs": (str(workspace.inputs / "*"),)}
    workspace.run(**by_glob)
    with pytest.raises(
        ConfigError, match=r"--input matches .*run_content_document\.bin, which belongs to --output-prefix"
    ):
        workspace.run(**by_glob, overwrite=True)


def test_tokenizer_that_changes_before_the_workers_start_is_refused(workspace):
    for name in ("a", "b"):
        workspace.add_texts(f"{name}.jsonl", "hello")
    plan = plan_preprocessing(workspace.settings(workers=2))
    write_vocabulary(workspace.vocab, [*WORDS, "more"])
    with pytest.raises(DataError, match="has changed since the run started"):
        preprocess(plan)


def test_input_file_that_changes_after_the_plan_is_refused(workspace):
    workspace.add_texts("a.jsonl", "hello")
    plan = plan_preprocessing(workspace.settings())
    workspace.add_texts("a.jsonl", "world")  # same size
    with pytest.raises(DataError, match=r"a\.jsonl has changed since the run started; .*--resume"):
        preprocess(plan)
    workspace.run()
    assert decoded(workspace) == ["world"]
