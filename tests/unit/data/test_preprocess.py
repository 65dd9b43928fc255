"""Shards to corpus: every document arrives once and in order, every loss is counted, and failures leave nothing."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_corpus import write_vocabulary

from megatron_neobert.data import preprocess as preprocess_module
from megatron_neobert.data import text_shards
from megatron_neobert.data.corpus import Corpus, check_content
from megatron_neobert.data.part_tasks import Counts, tokenize_part
from megatron_neobert.data.preprocess import PreprocessReport, PreprocessSettings, plan_preprocessing, preprocess
from megatron_neobert.data.tokenizer import load_tokenizer
from megatron_neobert.errors import ConfigError, DataError, MissingInputError, OutputError

WORDS = ["hello", "world", "mask", "sep", "[", "]", "xy", "##z", "zy"]


class Place:
    """A folder with a tokenizer and shards, where runs go to `run` by default."""

    def __init__(self, folder):
        self.folder = folder
        self.vocab = write_vocabulary(folder / "vocab.txt", WORDS)
        self.shards = folder / "shards"
        self.shards.mkdir()

    def settings(self, **changes) -> PreprocessSettings:
        defaults = {
            "inputs": (str(self.shards),),
            "output_prefix": str(self.folder / "out" / "run"),
            "tokenizer_model": str(self.vocab),
            "max_error_rate": 1.0,
        }
        return PreprocessSettings(**{**defaults, **changes})

    def run(self, **changes) -> PreprocessReport:
        return preprocess(plan_preprocessing(self.settings(**changes)), on_progress=lambda counts: None)

    def corpus(self, name="run") -> Corpus:
        return Corpus(self.folder / "out" / f"{name}_content_document")

    def add_lines(self, name, *lines):
        (self.shards / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def add_texts(self, name, *texts):
        self.add_lines(name, *(json.dumps({"content": text}) for text in texts))


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def decoded(place, name="run"):
    tokenizer, corpus = load_tokenizer(place.vocab), place.corpus(name)
    return [tokenizer.decode(corpus.document(number)) for number in range(len(corpus))]


def random_text(generator, tokens):
    return " ".join(["hello", "world", "zy", "xyz"][choice] for choice in generator.integers(0, 4, tokens))


def add_mixed_shards(place):
    """Seven shards of three formats, dirty here and there."""
    generator = np.random.default_rng(0)
    for number in range(7):
        texts = [random_text(generator, tokens) for tokens in generator.integers(1, 60, 40)]
        lines = [json.dumps({"content": text}) for text in texts]
        if number % 3 == 0:
            pq.write_table(pa.table({"content": [*texts, None]}), place.shards / f"{number}.parquet", row_group_size=7)
        elif number % 3 == 1:
            place.add_lines(
                f"{number}.jsonl", *lines, "broken", '{"content": "\\ud800 hello"}', json.dumps({"content": " "})
            )
        else:
            (place.shards / f"{number}.jsonl.gz").write_bytes(gzip.compress("\n".join(["{}", *lines]).encode()))


def test_corpus_is_byte_identical_for_any_number_of_workers_and_any_parts(place, monkeypatch):
    add_mixed_shards(place)
    place.run(output_prefix=str(place.folder / "out" / "1"))
    for workers in (2, 3):
        place.run(output_prefix=str(place.folder / "out" / str(workers)), workers=workers)
    monkeypatch.setattr(
        preprocess_module, "split_into_parts", lambda shard: text_shards.split_into_parts(shard, part_bytes=1)
    )
    assert len(plan_preprocessing(place.settings()).parts) > 7  # parquet shards of 41 rows in groups of 7
    place.run(output_prefix=str(place.folder / "out" / "parts"))
    for end in ("bin", "idx", "json", "rejects.jsonl"):
        contents = {
            name: (place.folder / "out" / f"{name}_content_document.{end}").read_bytes()
            for name in ("1", "2", "3", "parts")
        }
        assert len(set(contents.values())) == 1, end
        assert len(contents["1"]) > 100
    check_content(place.corpus("1"))


def test_every_document_arrives_in_order_with_the_tokenizers_ids(place):
    place.add_texts("b.jsonl", "hello world", "xyz")
    place.add_texts("a.jsonl", "world [MASK] hello")
    report = place.run()
    assert decoded(place) == ["world [ mask ] hello", "hello world", "xyz"]
    assert (report.counts.documents, report.counts.tokens) == (3, 5 + 2 + 2)
    assert report.counts.utf8_bytes == sum(map(len, ["world [MASK] hello", "hello world", "xyz"]))


def test_megatron_reads_what_preprocessing_of_real_books_wrote(shared_data, tmp_path):
    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    place = Place(tmp_path)
    place.vocab = shared_data / "tokenizers/bert-base-uncased/vocab.txt"
    texts = []
    for shard in sorted((shared_data / "text/books").glob("*.parquet"))[:4]:
        rows = pq.read_table(shard).slice(0, 20)
        texts += rows["content"].to_pylist()
        pq.write_table(rows, place.shards / shard.name)
    for workers in (1, 2):
        place.run(output_prefix=str(tmp_path / "out" / str(workers)), workers=workers)
    one, two = (tmp_path / "out" / f"{workers}_content_document" for workers in (1, 2))
    for end in (".bin", ".idx", ".json"):
        assert one.with_name(one.name + end).read_bytes() == two.with_name(two.name + end).read_bytes()
    dataset, tokenizer = indexed_dataset.IndexedDataset(str(one)), load_tokenizer(place.vocab)
    assert len(dataset) == len(texts) == 80
    for number, text in enumerate(texts):
        assert dataset[number].tolist() == tokenizer.encode_batch([text]).ids.tolist()


def test_special_token_literals_in_the_text_leave_no_special_id_in_the_corpus(place):
    place.add_texts("a.jsonl", "hello [MASK] [SEP] [CLS] [PAD] world")
    place.run()
    stored = set(place.corpus().tokens.tolist())
    assert not stored & (set(place.corpus().manifest.special_ids) - {1})  # [UNK] stands for "cls" and "pad" here
    check_content(place.corpus())


# --- what is left out


def test_rejects_are_counted_by_reason_and_listed_with_their_positions(place):
    pq.write_table(pa.table({"content": ["hello", None, " "]}), place.shards / "a.parquet")
    place.add_lines(
        "b.jsonl", "broken", '{"content": 1}', '{"text": "x"}', '{"content": "\\u0000\\u200b"}', '{"content": "world"}'
    )
    report = place.run()
    expected = [
        ("a.parquet", "row 1", "null text"),
        ("a.parquet", "row 2", "empty text"),
        ("b.jsonl", "line 1", "malformed JSON"),
        ("b.jsonl", "line 2", "text is not a string"),
        ("b.jsonl", "line 3", "missing key"),
        ("b.jsonl", "line 4", "no tokens"),
    ]
    lines = [json.loads(line) for line in report.files.rejects.read_text(encoding="utf-8").splitlines()]
    found = [(line["file"], line["position"], line["reason"]) for line in lines]
    assert found == [(str(place.shards / file), position, reason) for file, position, reason in expected]
    assert place.corpus().manifest.rejected == dict.fromkeys(sorted(reason for *_, reason in expected), 1)
    assert decoded(place) == ["hello", "world"]


def test_clean_run_writes_no_rejects_and_removes_those_of_the_run_it_replaces(place):
    place.add_lines("a.jsonl", "broken", '{"content": "hello"}')
    assert place.run().files.rejects.exists()
    place.add_texts("a.jsonl", "hello")
    assert not place.run(overwrite=True).files.rejects.exists()


def test_repaired_and_unknown_tokens_are_counted_in_the_manifest(place):
    (place.shards / "a.jsonl").write_bytes(
        b'{"content": "hello \xff"}\n{"content": "hello \\ud800 unheard"}\n{"content": "zy"}'
    )
    place.run()
    manifest = place.corpus().manifest
    assert (manifest.repaired_documents, manifest.unknown_tokens, manifest.tokens) == (2, 1, 4)  # U+FFFD is no token


def test_word_of_a_million_characters_is_one_unknown_token(place):
    place.add_texts("a.jsonl", "hello " + "x" * 1_000_000)
    place.run()
    assert decoded(place) == ["hello [UNK]"]


def test_failing_on_errors_names_the_first_and_leaves_nothing(place):
    place.add_lines("a.jsonl", '{"content": "hello"}', '{"content": null}')
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: null text \(null\); .*--on-error skip"):
        place.run(on_error="fail")
    assert list((place.folder / "out").iterdir()) == []


def test_empty_texts_are_no_errors(place):
    place.add_texts("a.jsonl", "hello", "", "\u200b", " \n")
    report = place.run(on_error="fail", max_error_rate=0.0)
    assert (report.counts.documents, report.counts.rejected.total(), report.counts.errors) == (1, 3, 0)


@pytest.mark.parametrize(("good", "allowed"), [(998, False), (999, True)])
def test_error_rate_ends_the_run_only_above_its_bound(place, good, allowed):
    """1 of 999 is above 0.001, 1 of 1,000 is not."""
    place.add_lines("a.jsonl", "broken", *['{"content": "hello"}'] * good)
    if allowed:
        assert place.run(max_error_rate=0.001).counts.records == 1000
    else:
        message = (
            r"1 of 999 records .*\(0\.10%\).* --max-error-rate 0\.001 .*1 malformed JSON\); the first: .*a\.jsonl, "
        )
        with pytest.raises(DataError, match=message + "line 1: malformed JSON"):
            place.run(max_error_rate=0.001)
        assert list((place.folder / "out").iterdir()) == []


def test_hopeless_run_is_ended_before_all_shards_are_read(place, monkeypatch):
    place.add_lines("a.jsonl", *['{"text": "hello"}'] * 10_000)
    place.add_texts("b.jsonl", "hello")
    read = []
    monkeypatch.setattr(
        preprocess_module, "tokenize_part", lambda task, report: read.append(task.number) or tokenize_part(task, report)
    )
    with pytest.raises(DataError, match=r"10,000 of 10,000 records .*100.00%.*no key 'content'; keys found: text"):
        place.run(max_error_rate=0.001)
    assert read == [0]


def test_corpus_without_a_document_is_refused_and_leaves_nothing(place):
    place.add_texts("a.jsonl", "", " ")
    (place.shards / "b.jsonl").touch()
    with pytest.raises(DataError, match=r"no document in 2 shards \(2 empty text\)"):
        place.run()
    assert list((place.folder / "out").iterdir()) == []


def test_missing_column_is_found_before_anything_is_written(place):
    pq.write_table(pa.table({"content": ["hello"]}), place.shards / "a.parquet")
    with pytest.raises(DataError, match="no column 'text'; its text columns: content"):
        plan_preprocessing(place.settings(text_key="text"))


def test_damaged_shard_ends_the_run_whatever_the_error_settings(place):
    place.add_texts("a.jsonl", "hello")
    packed = gzip.compress(b'{"content": "hello"}\n' * 1000)
    (place.shards / "b.gz").write_bytes(packed[:-20])
    with pytest.raises(DataError, match=r"b\.gz: the gzip stream"):
        place.run()
    assert list((place.folder / "out").iterdir()) == []


# --- inputs and outputs


def test_manifest_names_inputs_with_size_and_checksum_and_the_tokenizer(place):
    import hashlib

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


def test_existing_corpus_is_kept_without_overwrite_and_found_before_reading(place):
    place.add_texts("a.jsonl", "hello")
    place.run()
    with pytest.raises(OutputError, match=r"exist already.*--overwrite"):
        plan_preprocessing(place.settings())
    place.add_texts("a.jsonl", "world")
    place.run(overwrite=True)
    assert decoded(place) == ["world"]


def test_output_of_an_earlier_run_is_no_input(place):
    place.add_texts("a.jsonl", "hello")
    inside = {"output_prefix": str(place.shards / "run")}
    place.run(**inside)
    with pytest.raises(
        ConfigError, match=r"--input matches .*run_content_document\.bin, which belongs to --output-prefix"
    ):
        place.run(**inside, overwrite=True)


def test_pattern_without_a_file_is_a_missing_input(place):
    with pytest.raises(MissingInputError, match=r"nowhere.*no file matches"):
        plan_preprocessing(place.settings(inputs=(str(place.folder / "nowhere" / "*"),)))


def test_tokenizer_that_changes_during_the_run_is_refused(place):
    place.add_texts("a.jsonl", "hello")
    plan = plan_preprocessing(place.settings())
    write_vocabulary(place.vocab, [*WORDS, "more"])
    with pytest.raises(DataError, match="has changed since the run started"):
        preprocess(plan, on_progress=lambda counts: None)


def test_progress_ends_at_the_counts_of_the_report(place):
    add_mixed_shards(place)
    seen = []
    plan = plan_preprocessing(place.settings(workers=2))
    report = preprocess(plan, on_progress=lambda counts: seen.append((counts.documents, counts.rejected.total())))
    assert seen == sorted(seen)
    assert seen[-1] == (report.counts.documents, report.counts.rejected.total()) == (7 * 40 + 2, 3 + 4 + 2)


def test_counts_add_up():
    first, second = Counts(1, 2, 3, 4, 5), Counts(10, 20, 30, 40, 50)
    first.rejected["empty text"], second.rejected["empty text"], second.rejected["missing key"] = 1, 2, 3
    first.add(second)
    assert first == Counts(11, 22, 33, 44, 55, first.rejected)
    assert (first.records, first.errors) == (11 + 3 + 3, 3)
