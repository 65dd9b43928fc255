"""Pairs of contrastive fine-tuning, from local files and from folders in place of the Hub."""

import datasets
import pytest
from unit.evaluation.contrastive_inputs import make_pairs, write_card, write_jsonl

from megatron_neobert.errors import DataError
from megatron_neobert.evaluation.embed_data import DatasetSource, fetch_pairs, find_local, load_pairs

PAIRS = make_pairs(7, negatives=2, seed=5)


@pytest.fixture(autouse=True)
def separate_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def test_both_formats_give_the_same_pairs_and_a_changed_file_is_read_again(tmp_path):
    write_jsonl(tmp_path / "A.jsonl", PAIRS)
    datasets.Dataset.from_list(PAIRS).to_parquet(tmp_path / "B.parquet")
    paths = find_local(tmp_path, ["A", "B"])
    assert [load_pairs(path).to_list() for path in paths.values()] == [PAIRS, PAIRS]
    assert load_pairs(paths["A"], limit=3).to_list() == PAIRS[:3]
    write_jsonl(paths["A"], [{"query": "a", "positive": "b"}])
    assert load_pairs(paths["A"]).to_list() == [{"query": "a", "positive": "b", "negatives": []}]


def test_rows_without_a_pair_and_empty_or_repeated_negatives_are_dropped(tmp_path, capfd):
    good = {"query": " a ", "positive": "b", "negatives": ["c", "c", "", "b", "a", "d"]}
    bad = [{"query": "", "positive": "b", "negatives": []}, {"query": "a", "positive": None, "negatives": []}]
    write_jsonl(tmp_path / "KEY.jsonl", [good, *bad])
    assert load_pairs(tmp_path / "KEY.jsonl").to_list() == [{"query": "a", "positive": "b", "negatives": ["c", "d"]}]
    assert "KEY: dropped 2 of 3 rows" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("KEY.jsonl", b'{"title": "a", "positive": "b"}', "has the columns title, positive, but no query"),
        ("KEY.jsonl", b'{"query": "a", "positive": ""}', "no row with a query and a positive"),
        ("KEY.jsonl", b'{"query": "a", "positive": 1}', "cannot be read"),
        ("KEY.parquet", b"PAR1 and no more", r"KEY\.parquet cannot be read"),
    ],
)
def test_file_without_pairs_is_refused_by_name(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_pairs(tmp_path / name)


# --- downloads


def fetch(hub, **columns):
    defaults = {"query": "question", "positive": "answers.0.text", "negatives": "wrong.*"}
    source = DatasetSource(divisor=2, instruction="", hub=str(hub), **{**defaults, **columns})
    return fetch_pairs("KEY", source).to_list()


def test_columns_are_read_by_their_paths(tmp_path):
    rows = [
        {"question": pair["query"], "answers": [{"text": pair["positive"]}, {"text": "b"}], "wrong": pair["negatives"]}
        for pair in PAIRS
    ]
    write_jsonl(tmp_path / "train.jsonl", rows)
    assert fetch(tmp_path) == PAIRS


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"title": "a", "body": "b"}, "has the columns title, body, but neither question"),
        ({"question": "a", "answers": "b", "wrong": []}, "has no answers.0.text: there is no '0'"),
        ({"question": ["a"], "answers": [{"text": "b"}], "wrong": []}, "question holds a list .*question.0"),
        ({"question": "a", "answers": [{"text": "b"}]}, "has no wrong.*: there is no 'wrong'"),
        ({"question": "", "answers": [{"text": "b"}], "wrong": []}, "no row with a query and a positive"),
    ],
)
def test_column_that_is_missing_or_not_a_text_is_refused_by_name(row, message, tmp_path):
    write_jsonl(tmp_path / "train.jsonl", [row])
    with pytest.raises(DataError, match=message):
        fetch(tmp_path)


def test_only_rows_with_a_higher_score_are_used(tmp_path):
    rows = [{"a": f"a{score}", "b": "b", "score": score} for score in (3.9, 4, 4.1, 5)]
    write_jsonl(tmp_path / "train.jsonl", rows)
    pairs = fetch(tmp_path, query="a", positive="b", negatives=(), score="score", above=4.0)
    assert [pair["query"] for pair in pairs] == ["a4.1", "a5"]


def test_configs_of_a_dataset_are_concatenated(tmp_path):
    for name in ("body", "title", "post"):
        write_jsonl(tmp_path / f"{name}.jsonl", [{f"{name}1": f"{name} a", f"{name}2": "b"}])
    write_card(tmp_path, {name: {"train": name} for name in ("body", "title", "post")})
    columns = {"query": ("body1", "post1"), "positive": ("body2", "post2"), "negatives": ()}
    pairs = fetch(tmp_path, configs=("body", "post"), **columns)
    assert [pair["query"] for pair in pairs] == ["body a", "post a"]


def test_relevance_judgements_are_joined_with_queries_and_documents(tmp_path):
    tables = {
        "qrels": [("query-id", "corpus-id", "score"), ("q1", "d2", 1), ("q2", "d1", 0), ("q2", "d3", 1)],
        "queries": [("_id", "text"), ("q1", "who"), ("q2", "what")],
        "corpus": [("_id", "title", "text"), ("d1", "x", "no"), ("d2", "y", "me"), ("d3", "z", "this")],
    }
    for name, (columns, *rows) in tables.items():
        write_jsonl(tmp_path / f"{name}.jsonl", [dict(zip(columns, row, strict=True)) for row in rows])
    splits = {"default": {"train": "qrels"}, "corpus": {"corpus": "corpus"}, "queries": {"queries": "queries"}}
    write_card(tmp_path, splits)
    pairs = fetch(tmp_path, retrieval=True, query=(), positive=(), negatives=())
    assert [(pair["query"], pair["positive"]) for pair in pairs] == [("who", "me"), ("what", "this")]
