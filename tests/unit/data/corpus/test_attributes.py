"""Columns of attributes, and documents chosen by attributes and drop lists, as a plain search finds them."""

import datetime
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import largest_file
from unit.data.corpus.memory_corpus import bits_of
from unit.data.small_corpus import (
    cut,
    damage,
    documents_in,
    random_documents,
    replaced,
    write_attributes,
    write_corpus,
)

from megatron_neobert.commands.validate import ValidateOptions, validate
from megatron_neobert.data.corpus.attribute_columns import (
    attribute_name,
    check_record_keys,
    join_columns,
    pack_columns,
)
from megatron_neobert.data.corpus.attributes import ChosenDocuments, choose_documents
from megatron_neobert.data.corpus.drop_list import read_drop_list, write_drop_list
from megatron_neobert.data.corpus.reader import Corpus
from megatron_neobert.errors import ConfigError, DataError


@pytest.mark.parametrize("documents", [1, 256, 257, 6000])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_chosen_documents_are_those_that_a_plain_search_finds(documents, share):
    is_chosen = np.random.default_rng(0).random(documents) < share
    chosen = ChosenDocuments(bits_of(is_chosen))
    expected = np.flatnonzero(is_chosen).tolist()
    for copy in (chosen, pickle.loads(pickle.dumps(chosen))):
        assert len(copy) == len(expected)
        assert copy.numbers(np.arange(len(copy))).tolist() == expected


# --- columns


def join(folder, *chunks):
    paths = [folder / f"{number}.attributes" for number in range(len(chunks))]
    for path, columns in zip(paths, chunks, strict=True):
        path.write_bytes(pack_columns(columns))
    join_columns(folder / "joined.parquet", paths)
    return pq.read_table(folder / "joined.parquet")


@pytest.mark.parametrize(
    ("first", "second", "arrow_type", "expected"),
    [
        ([1, None], [2], pa.int64(), [1, None, 2]),
        ([1, 2.5], [None], pa.float64(), [1.0, 2.5, None]),
        # Integers never change: beyond 64 bits or beside fractions they become texts, beside whole floats they stay.
        ([2**63 + 1025], [1], pa.string(), [str(2**63 + 1025), "1"]),
        ([2**63 - 1, -(2**63)], [1], pa.int64(), [2**63 - 1, -(2**63), 1]),
        ([2**60 + 1, 2.0], [3], pa.int64(), [2**60 + 1, 2, 3]),
        ([2**60 + 1], [2.0, None], pa.int64(), [2**60 + 1, 2, None]),
        ([2.0, None], [-(2**63)], pa.int64(), [2, None, -(2**63)]),
        ([2**60 + 1], [2.5], pa.string(), [str(2**60 + 1), "2.5"]),
        ([2**60 + 1], [1e300], pa.string(), [str(2**60 + 1), "1e+300"]),
        ([2**53, 1], [2.5, float("inf")], pa.float64(), [2.0**53, 1.0, 2.5, float("inf")]),
        ([2**53 + 1, 2.5], [], pa.string(), [str(2**53 + 1), "2.5"]),
        ([np.float32(0.7), np.float16(0.1)], [], pa.float64(), [0.7, 0.1]),
        ([True, None], [np.bool_(False)], pa.bool_(), [True, None, False]),
        ([np.float32(0.5), np.float64(2), np.nan], [np.int64(3)], pa.float64(), [0.5, 2.0, None, 3.0]),
        (["a", None], ["b"], pa.string(), ["a", None, "b"]),
        ([None], [None], pa.null(), [None, None]),
        ([1, "a", True, 2.5], [None], pa.string(), ["1", "a", "true", "2.5", None]),
        ([1.0, "a"], [1.0, 1e300], pa.string(), ["1", "a", "1", "1e+300"]),
        ([True], [1], pa.string(), ["true", "1"]),
        ([[1], {"a": 1}, 3], [], pa.int64(), [None, None, 3]),
        ([datetime.date(2024, 1, 31), b"a\xff", "\ud800"], [], pa.string(), ["2024-01-31", "a\ufffd", "?"]),
        (["x" * 2000], [], pa.string(), ["x" * 1000]),
    ],
)
def test_record_key_has_one_type_in_all_chunks(tmp_path, first, second, arrow_type, expected):
    column = join(tmp_path, {"a.b-c": first}, {"a.b-c": second})["a_b_c"]
    assert (column.type, column.to_pylist()) == (arrow_type, expected)


@pytest.mark.parametrize("keys", [["2nd"], ["a.b", "a-b"], ["from", "from_"], [""]])
def test_record_keys_without_a_unique_attribute_name_are_refused(keys):
    names = {"length": "length_", "class": "class_", "meta.from": "meta_from", "WARC-Date": "WARC_Date", "_x": "_x"}
    assert not list(check_record_keys([*names]))
    assert {key: attribute_name(key) for key in names} == names
    assert next(check_record_keys(keys)).startswith(f"--record-key {keys[0]} would be the attribute")


# --- expressions

DOCUMENTS = 1500
INPUTS = ["x/dump-7-a"] * 400 + ["y/dump-7-b"] * 600 + ["y/dump-8[a]"] * 500
FRENCH = "fr 'x': y"
CYCLES = {
    "language": ("en", "de", None, FRENCH),
    "score": (1, 2.5, 3, None, 4.5),
    "is_spam": (True, False, None),
    "year": (2019, 2024),
    "nothing": (None,),
}
COLUMNS = {name: [values[n % len(values)] for n in range(DOCUMENTS)] for name, values in CYCLES.items()}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """A corpus of 1,500 documents with attributes, and a corpus of 3 documents.

    The numbers of documents in the shards of the first corpus are not multiples of 8.
    """
    folder = tmp_path_factory.mktemp("corpora")
    lengths = np.random.default_rng(0).integers(1, 1000, DOCUMENTS) // 50 + 1
    write_corpus(folder / "A", random_documents(lengths, 100), shard_bytes=9000, inputs=INPUTS)
    write_corpus(folder / "B", random_documents([3, 4, 5], 100))
    write_attributes(folder / "A", {name: pa.array(values) for name, values in COLUMNS.items()}, rows=177)
    return Corpus(folder / "A"), Corpus(folder / "B")


@pytest.mark.parametrize(
    ("expression", "holds"),
    [
        ("score>=3 and language=='en'", lambda d: d["score"] is not None and d["score"] >= 3 and d["language"] == "en"),
        ("not score>=3", lambda d: d["score"] is not None and d["score"] < 3),
        ("not (score>=3 or length>5)", lambda d: d["score"] is not None and d["score"] < 3 and d["length"] <= 5),
        ("score>=3 or length>5", lambda d: (d["score"] or 0) >= 3 or d["length"] > 5),
        ("language != 'en'", lambda d: d["language"] not in ("en", None)),
        ("language not in ['de', 'en']", lambda d: d["language"] == FRENCH),
        ("'fr \\'x\\': y' == language", lambda d: d["language"] == FRENCH),
        ("language >= 'en'", lambda d: d["language"] is not None and d["language"] >= "en"),
        ("not is_spam", lambda d: d["is_spam"] is False),
        ("nothing == 'x' or not nothing > 3 or nothing in [1]", lambda d: False),
        ("input=='y/dump*' and not input!='*-b'", lambda d: d["input"] == "y/dump-7-b"),
        ("score < 1152921504606846977 and score < 1e999", lambda d: d["score"] is not None),
        ("length < score", lambda d: d["score"] is not None and d["length"] < d["score"]),
    ],
)
def test_expression_chooses_the_documents_that_a_plain_search_finds(corpora, expression, holds):
    """A missing value satisfies neither a comparison nor its negation."""
    corpus = corpora[0]
    columns = {**COLUMNS, "length": corpus.lengths_of(np.arange(DOCUMENTS)).tolist(), "input": INPUTS}
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    expected = [number for number, row in enumerate(rows) if holds(row)]
    assert documents_in(choose_documents(corpus, [expression]), DOCUMENTS) == expected


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("scor>=3", "no attribute scor of numbers, texts, or true and false; its attributes are language (a text)"),
        ("score=='x'", "score is a number and 'x' is a text, which score == 'x' cannot compare"),
        ("score", "score is a number and True is true or false"),
    ],
)
def test_unknown_attributes_and_types_that_cannot_be_compared_are_refused(corpora, expression, message):
    with pytest.raises(ConfigError) as caught:
        choose_documents(corpora[0], [expression])
    assert message in caught.value.problems[0]


SCORES = range(1000)


def flip(at):
    def change(content):
        content[at] ^= 1

    return change


def bytes_as_text(*values: bytes) -> pa.Array:
    return pa.StringArray.from_buffers(len(values), *pa.array(values, pa.binary()).buffers()[1:])


@pytest.mark.parametrize(
    ("arrays", "names", "change", "message"),
    [
        ([SCORES[1:]], ["score"], bytes, "expected 1000 rows, found 999"),
        ([SCORES], ["score"], flip(1000), "expected sha256"),
        ([SCORES], ["score"], cut(-9), "expected [0-9]+ bytes as in"),
        ([SCORES, SCORES], ["score", "score"], bytes, "has the column 'score' more than once"),
        ([SCORES, SCORES, SCORES], ["other", "score", "other"], bytes, "has the column 'other' more than once"),
        ([bytes_as_text(*[b"a", b"\xff"] * 500)], ["score"], bytes, "UTF-?8"),
    ],
    ids=["rows", "page", "end", "column", "other column", "UTF-8"],
)
def test_attributes_that_are_damaged_or_of_another_corpus_are_refused(tmp_path, arrays, names, change, message):
    write_corpus(tmp_path / "C", random_documents([3] * 1000, 100))
    path = write_attributes(tmp_path / "C", pa.table(list(map(pa.array, arrays)), names=names))
    damage(path, change)
    for read in (
        lambda: choose_documents(Corpus(tmp_path / "C"), ["score=='a*'"]),
        lambda: choose_documents(Corpus(tmp_path / "C"), ["score=='a' and score!='b'"]),
        lambda: validate(ValidateOptions(prefix=str(tmp_path / "C"), full=True)),
    ):
        with pytest.raises(DataError, match=rf"C\.attributes\.parquet.*({message})"):
            read()


# --- drop lists


@pytest.fixture
def drop_list(corpora, tmp_path):
    """A drop list for both corpora, and the mask of the first corpus."""
    is_dropped = np.random.default_rng(0).random(DOCUMENTS) < 0.3
    write_drop_list(
        tmp_path / "list", corpora, np.append(is_dropped, [False, True, False]), {"threshold": 0.8}, folder=tmp_path
    )
    return tmp_path / "list", is_dropped


@pytest.mark.parametrize("conditions", [[], ["length>=5 # tokens", "length<=15"]])
def test_documents_of_drop_lists_are_not_chosen(corpora, drop_list, conditions, tmp_path):
    corpus, (path, is_dropped) = corpora[0], drop_list
    assert len(corpus.shards) > 2 and any(len(shard.lengths) % 8 for shard in corpus.shards[:-1])
    lengths = corpus.lengths_of(np.arange(DOCUMENTS))
    fits = (lengths >= 5) & (lengths <= 15) if conditions else np.ones(DOCUMENTS, dtype=np.bool_)
    chosen = choose_documents(corpus, conditions, [str(path)])
    assert documents_in(chosen, DOCUMENTS) == np.flatnonzero(fits & ~is_dropped).tolist()
    in_second_list = np.arange(DOCUMENTS) % 3 == 0
    write_drop_list(tmp_path / "second", [corpus], in_second_list, {}, folder=tmp_path)
    chosen = choose_documents(corpus, conditions, [str(path), str(tmp_path / "second")])
    assert documents_in(chosen, DOCUMENTS) == np.flatnonzero(fits & ~is_dropped & ~in_second_list).tolist()


def test_drop_list_that_cannot_be_written_leaves_the_earlier_one(corpora, drop_list):
    path, before = drop_list[0], drop_list[0].read_bytes()
    with largest_file(100), pytest.raises(OSError, match="File too large"):
        write_drop_list(path, corpora, np.ones(DOCUMENTS + 3, dtype=np.bool_), {}, folder=path.parent)
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


def test_same_tokens_with_other_document_boundaries_are_another_corpus(tmp_path):
    one = write_corpus(tmp_path / "A", [[5, 6, 7], [8, 9]])
    other = write_corpus(tmp_path / "B", [[5, 6], [7, 8, 9]])
    copy = write_corpus(tmp_path / "C", [[5, 6, 7], [8, 9]])
    assert one.shards[0].bin == other.shards[0].bin and one.documents_sha256 != other.documents_sha256
    assert one.documents_sha256 == copy.documents_sha256


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut(0), "is not a drop list: its first line is not JSON with the format"),
        (replaced(b"drop list 1", b"drop list 9"), r"is not a drop list.*'megatron_neobert drop list 9'"),
        (replaced(b'"documents": 1500', b'"documents": "aa"'), "is not a drop list"),
        (cut(-1), "expected [0-9,]+ bytes for 2 corpora, found [0-9,]+; it is damaged"),
        (flip(-5), "expected sha256 [0-9a-f]{64} of its bits; it is damaged"),
    ],
)
def test_damaged_drop_list_is_refused(corpora, drop_list, change, message):
    damage(drop_list[0], change)
    with pytest.raises(DataError, match=message):
        read_drop_list(drop_list[0], corpora[0])
