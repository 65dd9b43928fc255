"""Shards to corpus: every document arrives once and in order, and every record is accounted for."""

import hashlib
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from unit.data.preprocess_place import WORDS, add_mixed_shards, cut_small, decoded
from unit.data.small_corpus import write_vocabulary

from megatron_neobert.data.corpus.reader import check_content
from megatron_neobert.data.preprocessing import run as run_module
from megatron_neobert.data.preprocessing.chunks import tokenize_chunk
from megatron_neobert.data.preprocessing.plan import plan_preprocessing
from megatron_neobert.data.preprocessing.run import preprocess
from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer
from megatron_neobert.errors import ConfigError, DataError
from megatron_neobert.runtime.jobs import read_finished, run_jobs


def test_corpus_is_byte_identical_for_any_number_of_workers_and_any_chunks(place, monkeypatch):
    add_mixed_shards(place)
    for name, workers in {"1": None, "2": 2, "4": 4}.items():
        place.run(name, workers=workers)
    cut_small(monkeypatch, 2000)
    assert len(plan_preprocessing(place.settings("parts")).chunks) > 20
    place.run("parts")
    found = {name: place.contents(name) for name in ("1", "2", "4", "parts")}
    assert sorted(found["1"]) == [f"content_document.{end}" for end in ("bin", "idx", "json", "rejects.jsonl")]
    assert min(map(len, found["1"].values())) > 100
    assert found["1"] == found["2"] == found["4"] == found["parts"]
    check_content(place.corpus("1"))


# --- what is left out


def test_every_record_is_kept_rejected_or_dropped_and_rejects_are_listed_with_what_they_were(place):
    pq.write_table(pa.table({"content": ["hello", None, " "]}), place.shards / "a.parquet")
    place.add_lines("b.jsonl", "broken", '{"content": 1}', "", '{"text": "x"}', '{"content": "\\u200b"}')
    with (place.shards / "b.jsonl").open("ab") as stream:
        stream.write(b'\xff\n{"content": "world"}\n')
    report = place.run()
    expected = [
        ("a.parquet", "row", 1, "null text", {"raw": ""}),
        ("b.jsonl", "line", 1, "malformed JSON", {"raw": "broken"}),
        ("b.jsonl", "line", 2, "text is not a string", {"raw": '{"content": 1}'}),
        ("b.jsonl", "line", 4, "missing key", {"raw": '{"text": "x"}'}),
        ("b.jsonl", "line", 6, "malformed JSON", {"raw_base64": "/w=="}),
    ]
    found = [json.loads(line) for line in place.settings().files.rejects.read_text(encoding="utf-8").splitlines()]
    assert [line.pop("detail") != "" for line in found] == [True] * len(expected)
    assert found == [
        {"file": str(place.shards / file), unit: number, "reason": reason, **raw}
        for file, unit, number, reason, raw in expected
    ]
    manifest = place.corpus().manifest
    assert manifest.rejected == {"malformed JSON": 2, "missing key": 1, "null text": 1, "text is not a string": 1}
    assert manifest.dropped == {"empty text": 1, "no tokens": 1}
    assert (manifest.records, manifest.documents) == (9, 2) == (report.counts.records, report.counts.documents)
    assert decoded(place) == ["hello", "world"]


def test_line_numbers_of_rejects_count_from_the_beginning_of_the_shard_in_every_chunk(place, monkeypatch):
    lines = ["broken" if number % 7 == 0 else '{"content": "hello"}' for number in range(1, 200)]
    place.add_lines("a.jsonl", *lines)
    cut_small(monkeypatch, 500)
    assert len(plan_preprocessing(place.settings()).chunks) > 5
    place.run()
    found = [json.loads(line)["line"] for line in place.settings().files.rejects.read_text().splitlines()]
    assert found == list(range(7, 200, 7))


@pytest.mark.parametrize(("good", "allowed"), [(998, False), (999, True)])
def test_error_rate_ends_the_run_only_above_its_bound(place, good, allowed):
    """1 of 999 is above 0.001, 1 of 1,000 is not."""
    place.add_lines("a.jsonl", "broken", *['{"content": "hello"}'] * good)
    if allowed:
        assert place.run(max_error_rate=0.001).counts.records == 1000
    else:
        message = (
            r"1 of 999 records .*\(0\.10 %\).* --max-error-rate 0\.001 .*1 malformed JSON\); for example: .*a\.jsonl, "
        )
        with pytest.raises(DataError, match=message + "line 1: malformed JSON"):
            place.run(max_error_rate=0.001)
        assert not list((place.folder / "out").glob("*.bin"))


@pytest.mark.parametrize("bad_shard", ["a.jsonl", "z.jsonl"])
@pytest.mark.parametrize("workers", [1, 2])
def test_errors_that_the_whole_input_may_have_are_allowed_wherever_they_stand(place, bad_shard, workers):
    """15 of 20,015 are below 0.001; of the first half they would be above."""
    place.add_lines("m.jsonl", *['{"content": "hello"}'] * 10_000)
    place.add_lines(bad_shard, *["broken"] * 15, *['{"content": "hello"}'] * 10_000)
    place.run(max_error_rate=0.001, workers=workers)
    assert place.corpus().manifest.rejected == {"malformed JSON": 15}


@pytest.mark.parametrize(("errors", "allowed"), [(10_000, 0.001), (1, 0.0)])
def test_hopeless_run_is_ended_before_all_shards_are_read(place, monkeypatch, errors, allowed):
    place.add_lines("a.jsonl", *['{"text": "hello"}'] * errors)
    place.add_texts("b.jsonl", "hello")
    read = []
    monkeypatch.setattr(run_module, "tokenize_chunk", lambda job: read.append(job.input_name) or tokenize_chunk(job))
    message = rf"{errors:,} of {errors:,} records .*100.00 %.*a\.jsonl, line 1: .*no key 'content'; keys found: text"
    with pytest.raises(DataError, match=message):
        place.run(max_error_rate=allowed)
    assert read == [str(place.shards / "a.jsonl")]
    assert not list((place.folder / "out").glob("*.bin"))


def test_corpus_without_a_document_is_refused_and_leaves_nothing(place):
    place.add_texts("a.jsonl", "", " ")
    (place.shards / "b.jsonl").touch()
    with pytest.raises(DataError, match=r"no document in 2 shards \(2 records: 2 empty text\)"):
        place.run()
    assert list((place.folder / "out").iterdir()) == []


# --- inputs and outputs


def test_manifest_names_inputs_with_size_and_checksum_and_the_tokenizer(place):
    place.add_texts("b.jsonl", "hello")
    place.add_texts("a.jsonl", "world")
    place.run(text_key="content")
    manifest, tokenizer = place.corpus().manifest, load_tokenizer(place.vocab)
    assert list(manifest.inputs) == [str(place.shards / name) for name in ("a.jsonl", "b.jsonl")]
    content = (place.shards / "a.jsonl").read_bytes()
    record = manifest.inputs[str(place.shards / "a.jsonl")]
    assert (record.bytes, record.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert manifest.tokenizer_fingerprint == tokenizer.fingerprint
    assert (manifest.vocab_size, manifest.special_tokens) == (tokenizer.vocab_size, tokenizer.special_tokens)
    assert (manifest.documents, manifest.tokens, manifest.dtype, manifest.text_key) == (2, 2, "uint16", "content")


@pytest.mark.parametrize("changes", [{"shard_size": 1}, {"deduplicate": "exact", "split_validation": 0.4}], ids=str)
def test_manifest_counts_what_each_input_has_in_the_corpus(place, changes):
    words = {"a.jsonl": "hello", "b.jsonl": "world", "c.jsonl": "zy", "d.jsonl": "hello"}
    for name, word in words.items():
        place.add_texts(name, *(" ".join([word] * (1 + number % 7)) for number in range(9)), "", "")
    place.run(**changes)
    for end in ("", "_validation") if "split_validation" in changes else ("",):
        documents = iter(decoded(place, end=end))
        for path, record in place.corpus(end=end).manifest.inputs.items():
            own = [next(documents) for _ in range(record.documents)]
            assert {word for text in own for word in text.split()} <= {words[Path(path).name]}
            assert record.tokens == sum(len(text.split()) for text in own)
        assert next(documents, None) is None
    first, _, _, same = place.corpus().manifest.inputs.values()
    assert first.documents and bool(same.documents) == ("deduplicate" not in changes)


def test_output_of_an_earlier_run_is_no_input(place):
    place.add_texts("a.jsonl", "hello")
    inside = {"output_prefix": str(place.shards / "run")}
    with pytest.raises(ConfigError, match=r"--output-prefix .*run lies below --input .*shards, where a later run"):
        place.run(**inside)
    by_glob = {**inside, "inputs": (str(place.shards / "*"),)}
    place.run(**by_glob)
    with pytest.raises(
        ConfigError, match=r"--input matches .*run_content_document\.bin, which belongs to --output-prefix"
    ):
        place.run(**by_glob, overwrite=True)


def test_tokenizer_that_changes_before_the_workers_start_is_refused(place):
    for name in ("a", "b"):
        place.add_texts(f"{name}.jsonl", "hello")
    plan = plan_preprocessing(place.settings(workers=2))
    write_vocabulary(place.vocab, [*WORDS, "more"])
    with pytest.raises(DataError, match="has changed since the run started"):
        preprocess(plan)


def test_shard_that_changes_while_it_is_read_is_refused(place):
    place.add_texts("a.jsonl", "hello")
    plan = plan_preprocessing(place.settings())
    place.add_texts("a.jsonl", "world")  # of the same size
    with pytest.raises(DataError, match=r"a\.jsonl has changed since the run started; .*--resume"):
        preprocess(plan)
    place.run()
    assert decoded(place) == ["world"]


def test_chunk_that_two_processes_do_at_once_is_whole(place):
    place.add_texts("a.jsonl", *("hello world " * 200 for _ in range(2000)))
    plan = plan_preprocessing(place.settings(tokenizer_backend="reference"))
    (job,) = plan.jobs()
    plan.files.partial.mkdir(parents=True)
    (_, first), (_, second) = run_jobs(tokenize_chunk, [job, job], workers=2)
    assert first == second == read_finished(job)
    assert sorted(file.suffix for file in plan.files.partial.iterdir()) == [".done", ".ids", ".lengths", ".rejects"]
