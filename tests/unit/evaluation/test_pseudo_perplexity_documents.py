"""Which documents are measured, under which names, and where they are masked."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from unit.evaluation.pseudo_perplexity_models import make_texts, write_tokenizer

from megatron_neobert.evaluation.models import load_tokenizer
from megatron_neobert.evaluation.options import PerplexityOptions
from megatron_neobert.evaluation.pseudo_perplexity import draw_positions, select_documents

TEXTS = ["the cat sat", "a mat", "the cat sat on the mat . a cat", "cat"]  # of 3, 2, 9 and 1 tokens
ADDED = 2  # [CLS] and [SEP]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    (folder / "config.json").write_text('{"model_type": "bert"}')
    return load_tokenizer(folder)


def write_lines(path, texts):
    path.write_text("".join(json.dumps({"content": text}) + "\n" for text in texts))
    return str(path)


def select(path, tokenizer, max_length=40, **choice):
    given = {"min_length": 1, **choice}
    options = PerplexityOptions(model=(), output="out", data=(str(path),), **given)
    return select_documents(options, tokenizer, max_length)


def lengths(selection):
    return [len(document.ids_s) for document in selection[0]]


def test_tokens_that_the_tokenizer_adds_are_never_masked_but_written_ones_are(tokenizer, tmp_path):
    [document] = select(write_lines(tmp_path / "a.jsonl", ["cat [SEP] sat"]), tokenizer)[0]
    assert tokenizer.convert_ids_to_tokens(document.ids_s) == ["[CLS]", "cat", "[", "sep", "]", "sat", "[SEP]"]
    assert document.positions == (1, 2, 3, 4, 5)
    assert document.scorable == 5


def test_documents_are_the_same_in_any_format_order_and_number_of_files(tokenizer, tmp_path):
    def described(folder):
        found = select(folder, tokenizer, positions_per_doc=2)[0]
        return {(document.id, tuple(document.ids_s.tolist()), document.positions) for document in found}

    texts = make_texts(20, longest=12)
    for name in ("lines", "table", "texts"):
        (tmp_path / name).mkdir()
    write_lines(tmp_path / "lines" / "all.jsonl", texts)
    pq.write_table(pa.table({"content": texts[7:]}), tmp_path / "table" / "a.parquet")
    pq.write_table(pa.table({"content": texts[:7]}), tmp_path / "table" / "b.parquet")
    for number, text in enumerate(texts):
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    expected = described(tmp_path / "lines")
    assert len(expected) == len(texts)
    assert described(tmp_path / "table") == expected
    assert described(tmp_path / "texts") == expected


def test_truncated_document_counts_as_its_truncated_length(tokenizer, tmp_path):
    cut, whole = select(write_lines(tmp_path / "a.jsonl", TEXTS[2:]), tokenizer, max_length=6)[0]
    assert (len(cut.ids_s), cut.scorable, cut.positions, cut.truncated) == (6, 4, (1, 2, 3, 4), True)
    assert (len(whole.ids_s), whole.truncated) == (1 + ADDED, False)


def test_document_met_twice_is_measured_once(tokenizer, tmp_path):
    selection = select(write_lines(tmp_path / "a.jsonl", [*TEXTS, TEXTS[0]]), tokenizer)
    assert lengths(selection) == [3 + ADDED, 2 + ADDED, 9 + ADDED, 1 + ADDED]
    assert selection[1] == {"met before": 1}


def test_short_documents_are_left_out_and_counted_and_reading_ends_at_the_limit(tokenizer, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", TEXTS)
    selection = select(path, tokenizer, min_length=4)
    assert lengths(selection) == [5, 4, 11]
    assert selection[1] == {"shorter than --min-length": 1}
    assert lengths(select(path, tokenizer, limit=2)) == [5, 4]


def test_drawn_positions_depend_on_document_and_seed_alone():
    drawn = draw_positions("a document", range(1, 101), 10, seed=0)
    assert draw_positions("a document", range(1, 101), 10, seed=0) == drawn
    assert draw_positions("another", range(1, 101), 10, seed=0) != drawn
    assert draw_positions("a document", range(1, 101), 10, seed=1) != drawn
    assert list(drawn) == sorted(set(drawn))
    assert set(drawn) <= set(range(1, 101))
