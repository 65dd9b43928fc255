"""Rows of contrastive fine-tuning: files of one's own, and datasets of the Hub, for which a folder does here."""

import datasets
import pytest
from unit.evaluation.contrastive_place import make_pairs, write_jsonl

from megatron_neobert.errors import DataError
from megatron_neobert.evaluation.embed_data import DatasetSource, fetch_pairs, find_local, load_pairs

ROWS = make_pairs(7, negatives=2, seed=5)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def test_both_forms_give_the_same_rows_and_a_changed_file_is_read_again(tmp_path):
    write_jsonl(tmp_path / "A.jsonl", ROWS)
    datasets.Dataset.from_list(ROWS).to_parquet(tmp_path / "B.parquet")
    paths = find_local(tmp_path, ["A", "B"])
    assert [load_pairs(path).to_list() for path in paths.values()] == [ROWS, ROWS]
    assert load_pairs(paths["A"], limit=3).to_list() == ROWS[:3]
    write_jsonl(paths["A"], ROWS[:2])
    assert load_pairs(paths["A"]).to_list() == ROWS[:2]


def test_pairs_without_negatives_need_no_such_column(tmp_path):
    write_jsonl(tmp_path / "KEY.jsonl", [{"query": "a", "positive": "b"}])
    assert load_pairs(tmp_path / "KEY.jsonl").to_list() == [{"query": "a", "positive": "b", "negatives": []}]


def test_rows_without_a_pair_and_useless_negatives_are_left_out(tmp_path, capfd):
    good = {"query": " a ", "positive": "b", "negatives": ["c", "c", "", "b", "a", "d"]}
    bad = [{"query": "", "positive": "b", "negatives": []}, {"query": "a", "positive": None, "negatives": []}]
    write_jsonl(tmp_path / "KEY.jsonl", [good, *bad])
    assert load_pairs(tmp_path / "KEY.jsonl").to_list() == [{"query": "a", "positive": "b", "negatives": ["c", "d"]}]
    assert "KEY: 2 of 3 rows left out" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("KEY.jsonl", b'{"title": "a", "positive": "b"}', "has the columns title, positive, but no query"),
        ("KEY.jsonl", b'{"query": "a", "positive": ""}', "no row with a query and a positive"),
        ("KEY.jsonl", b'{"query": "a", "positive": 1}', "cannot be read"),
        ("KEY.parquet", b"PAR1 and no more", r"KEY\.parquet cannot be read"),
    ],
)
def test_file_without_pairs_is_refused_by_name(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said):
        load_pairs(tmp_path / name)


# --- fetching


def fetched(folder, **columns):
    given = {"query": "question", "positive": "answers.0.text", "negatives": "wrong.*"}
    source = DatasetSource(divisor=2, instruction="", hub=str(folder), **{**given, **columns})
    return fetch_pairs("KEY", source).to_list()


def test_columns_are_found_by_their_paths(tmp_path):
    rows = [
        {"question": row["query"], "answers": [{"text": row["positive"]}, {"text": "more"}], "wrong": row["negatives"]}
        for row in ROWS
    ]
    (tmp_path / "hub").mkdir()
    write_jsonl(tmp_path / "hub" / "train.jsonl", rows)
    assert fetched(tmp_path / "hub") == ROWS


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"title": "a", "body": "b"}, "has the columns title, body, but neither question"),
        ({"question": "a", "answers": "b", "wrong": []}, "has no answers.0.text: there is no '0'"),
        ({"question": ["a"], "answers": [{"text": "b"}], "wrong": []}, "question holds a list .*question.0"),
        ({"question": "a", "answers": [{"text": "b"}]}, "has no wrong.*: there is no 'wrong'"),
        ({"question": "", "answers": [{"text": "b"}], "wrong": []}, "no row with a query and a positive"),
    ],
)
def test_other_columns_are_refused_by_name(row, said, tmp_path):
    (tmp_path / "hub").mkdir()
    write_jsonl(tmp_path / "hub" / "train.jsonl", [row])
    with pytest.raises(DataError, match=said):
        fetched(tmp_path / "hub")


def test_rows_are_kept_above_the_score(tmp_path):
    (tmp_path / "hub").mkdir()
    rows = [{"a": f"a{score}", "b": "b", "score": score} for score in (3.9, 4, 4.1, 5)]
    write_jsonl(tmp_path / "hub" / "train.jsonl", rows)
    pairs = fetched(tmp_path / "hub", query="a", positive="b", negatives=(), score="score", above=4.0)
    assert [row["query"] for row in pairs] == ["a4.1", "a5"]


def test_two_configs_of_a_repository_follow_each_other(tmp_path):
    hub = tmp_path / "hub"
    for name, number in (("body", 1), ("title", 3), ("post", 2)):
        (hub / name).mkdir(parents=True)
        write_jsonl(hub / name / "train.jsonl", [{f"{name}1": f"{name} a{number}", f"{name}2": f"b{number}"}])
    listed = "".join(f"- config_name: {name}\n  data_dir: {name}\n" for name in ("body", "post", "title"))
    (hub / "README.md").write_text(f"---\nconfigs:\n{listed}---\n", encoding="utf-8")
    columns = {"query": ("body1", "post1"), "positive": ("body2", "post2"), "negatives": ()}
    found = fetched(hub, configs=("body", "post"), **columns)
    assert [row["query"] for row in found] == ["body a1", "post a2"]


def test_judgements_are_joined_with_queries_and_corpus(tmp_path):
    hub = tmp_path / "hub"
    tables = {
        "default/train": [("query-id", "corpus-id", "score"), ("q1", "d2", 1), ("q2", "d1", 0), ("q2", "d3", 1)],
        "queries/queries": [("_id", "text"), ("q1", "who"), ("q2", "what")],
        "corpus/corpus": [("_id", "title", "text"), ("d1", "x", "no"), ("d2", "y", "me"), ("d3", "z", "this")],
    }
    configs = ""
    for name, (columns, *rows) in tables.items():
        (hub / name).parent.mkdir(parents=True)
        write_jsonl(hub / f"{name}.jsonl", [dict(zip(columns, row, strict=True)) for row in rows])
        config, split = name.split("/")
        configs += f"- config_name: {config}\n  data_files:\n  - split: {split}\n    path: {name}.jsonl\n"
    (hub / "README.md").write_text(f"---\nconfigs:\n{configs}---\n", encoding="utf-8")
    pairs = fetched(hub, retrieval=True, query=(), positive=(), negatives=())
    assert [(row["query"], row["positive"]) for row in pairs] == [("who", "me"), ("what", "this")]
