"""Labelled texts for the probe: every form reads the same, and what is no such text is refused with a sentence."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from unit.data.small_corpus import write_vocabulary
from unit.tools.commands import LETTERS

from megatron_neobert.data.batches.labelled import read_labelled_texts
from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer
from megatron_neobert.errors import DataError, MissingInputError

RECORDS = [("a b", "x"), ("c", 7), ("d e f", "x")]


@pytest.fixture
def tokenizer(tmp_path):
    write_vocabulary(tmp_path / "vocab.txt", LETTERS)
    return load_tokenizer(tmp_path / "vocab.txt")


def write_lines(path, *lines):
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return str(path)


def test_texts_are_read_in_order_and_gathered_as_a_corpus_is(tmp_path, tokenizer):
    lines = [{"text": text, "label": label} for text, label in RECORDS]
    again = {"text": "a b", "label": 7}
    path = write_lines(tmp_path / "t.jsonl", *lines, {"text": " ", "label": 7}, again)
    texts = read_labelled_texts(path, tokenizer)
    assert (texts.lengths.tolist(), texts.labels_n.tolist()) == ([2, 1, 3], [0, 1, 0])
    last = texts.gather(np.array([2, 0]), np.array([1, 0]), np.array([2, 1]))
    assert tokenizer.decode(last).split() == ["e", "f", "a"]
    assert texts.description == (
        f"probe: 3 texts with 2 labels from {path}, the commonest on 66.7 %; left out, empty or there before: 1"
    )


def test_a_folder_of_parquet_gives_what_json_lines_give(tmp_path, tokenizer):
    (tmp_path / "folder").mkdir()
    for number, (text, label) in enumerate(RECORDS):
        pq.write_table(pa.table({"label": [str(label)], "text": [text]}), tmp_path / "folder" / f"{number}.parquet")
    lines = [{"text": text, "label": str(label)} for text, label in RECORDS]
    found = read_labelled_texts(str(tmp_path / "folder"), tokenizer)
    expected = read_labelled_texts(write_lines(tmp_path / "t.jsonl", *lines), tokenizer)
    for name in ("ids", "ends_n", "lengths", "labels_n"):
        assert np.array_equal(getattr(found, name), getattr(expected, name))


GOOD = {"text": "a", "label": 1}


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ((), "no text with a label in 0 records; a probe needs texts of two labels"),
        ((GOOD, {"text": "b", "label": 1}), "only the label 1 in 2 records; a probe needs texts of two labels"),
        ((GOOD, {"label": 2}), r"line 2: missing key \(no key 'text'; keys found: label\); every record has a text"),
        ((GOOD, {"text": "b"}), "line 2 has no label; every record has a text under 'text' and its label"),
        ((GOOD, {"text": "b", "label": 0.5}), "line 2 has the label 0.5; every record"),
        ((GOOD, {"text": "b", "label": True}), "line 2 has the label True; every record"),
        ((GOOD, {"text": 3, "label": 2}), r"line 2: text is not a string \(found int\); every record"),
        ((GOOD, "{"), "line 2: malformed JSON"),
    ],
)
def test_what_is_no_set_of_labelled_texts_is_refused_with_its_place(tmp_path, tokenizer, lines, sentence):
    path = write_lines(tmp_path / "t.jsonl", *lines)
    with pytest.raises(DataError, match=rf"^--probe-data-path {path}.*{sentence}"):
        read_labelled_texts(path, tokenizer)


def test_a_table_without_the_column_and_a_file_that_is_not_there_are_refused(tmp_path, tokenizer):
    pq.write_table(pa.table({"text": ["a", "b"], "sentiment": [0, 1]}), tmp_path / "t.parquet")
    with pytest.raises(
        DataError, match=r"^--probe-data-path .*has no column 'label'; its columns: text, sentiment; every record has"
    ):
        read_labelled_texts(str(tmp_path / "t.parquet"), tokenizer)
    with pytest.raises(MissingInputError, match=r"^--probe-data-path .*nowhere: no file matches"):
        read_labelled_texts(str(tmp_path / "nowhere"), tokenizer)
