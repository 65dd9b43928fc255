"""Datasets of contrastive fine-tuning in every form they may lie in."""

import gzip
import json
from pathlib import Path

import datasets
import pytest
from unit.evaluation.contrastive_place import make_pairs, write_jsonl

from megatron_neobert.errors import DataError
from megatron_neobert.evaluation.data import digest_of
from megatron_neobert.evaluation.embed_data import DatasetSource, find_local, load_pairs

ROWS = make_pairs(7, negatives=2, seed=5)
SOURCE = DatasetSource(
    divisor=2, instruction="", query=("question",), positive=("answers.0.text",), negatives=("wrong.*",)
)
AS_PUBLISHED = [
    {"question": row["query"], "answers": [{"text": row["positive"]}, {"text": "more"}], "wrong": row["negatives"]}
    for row in ROWS
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def _write(form: str, folder: Path) -> Path:
    rows = ROWS if form == "plain" else AS_PUBLISHED
    table, target = datasets.Dataset.from_list(rows), folder / "KEY"
    if form == "parquet":
        table.to_parquet(f"{target}.parquet")
    elif form == "jsonl.gz":
        with gzip.open(f"{target}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    elif form == "saved":
        table.save_to_disk(str(target))
    elif form == "saved with splits":
        datasets.DatasetDict(test=table.select([0]), train=table).save_to_disk(str(target))
    elif form == "repository":
        target.mkdir()
        write_jsonl(target / "train.jsonl", rows)
    else:
        write_jsonl(folder / "KEY.jsonl", rows)
    return find_local(folder, ["KEY"], skip_missing=False)["KEY"]


@pytest.mark.parametrize("form", ["parquet", "jsonl", "jsonl.gz", "saved", "saved with splits", "repository", "plain"])
def test_every_form_gives_the_same_rows(form, tmp_path):
    assert load_pairs("KEY", SOURCE, _write(form, tmp_path)).to_list() == ROWS


def test_changed_file_is_read_again(tmp_path):
    path = _write("plain", tmp_path)
    assert len(load_pairs("KEY", SOURCE, path)) == 7
    write_jsonl(path, ROWS[:2])
    assert len(load_pairs("KEY", SOURCE, path)) == 2


def test_pairs_without_negatives_need_no_such_column(tmp_path):
    write_jsonl(tmp_path / "KEY.jsonl", [{"query": "a", "positive": "b"}])
    (row,) = load_pairs("KEY", SOURCE, tmp_path / "KEY.jsonl")
    assert row == {"query": "a", "positive": "b", "negatives": []}


def test_rows_without_a_pair_and_useless_negatives_are_left_out(tmp_path, capfd):
    good = {"query": " a ", "positive": "b", "negatives": ["c", "c", "", "b", "a", "d"]}
    bad = [{"query": "", "positive": "b", "negatives": []}, {"query": "a", "positive": None, "negatives": []}]
    write_jsonl(tmp_path / "KEY.jsonl", [good, *bad])
    (row,) = load_pairs("KEY", SOURCE, tmp_path / "KEY.jsonl")
    assert row == {"query": "a", "positive": "b", "negatives": ["c", "d"]}
    assert "KEY: 2 of 3 rows left out" in capfd.readouterr().err


def test_two_configs_of_a_repository_follow_each_other(tmp_path):
    folder = tmp_path / "KEY"
    for name, number in (("body", 1), ("title", 3), ("post", 2)):
        (folder / name).mkdir(parents=True)
        write_jsonl(folder / name / "train.jsonl", [{f"{name}1": f"{name} a{number}", f"{name}2": f"b{number}"}])
    listed = "".join(f"- config_name: {name}\n  data_dir: {name}\n" for name in ("body", "post", "title"))
    (folder / "README.md").write_text(f"---\nconfigs:\n{listed}---\n", encoding="utf-8")
    source = DatasetSource(
        divisor=2, instruction="", configs=("body", "post"), query=("body1", "post1"), positive=("body2", "post2")
    )
    assert [row["query"] for row in load_pairs("KEY", source, folder)] == ["body a1", "post a2"]


def test_rows_are_kept_above_the_score(tmp_path):
    scores = [3.9, 4, 4.1, 5]
    write_jsonl(tmp_path / "KEY.jsonl", [{"a": f"a{score}", "b": "b", "score": score} for score in scores])
    source = DatasetSource(divisor=2, instruction="", query=("a",), positive=("b",), score="score", above=4.0)
    pairs = load_pairs("KEY", source, tmp_path / "KEY.jsonl")
    assert [row["query"] for row in pairs] == ["a4.1", "a5"]


def test_judgements_are_joined_with_queries_and_corpus(tmp_path):
    folder = tmp_path / "KEY"
    tables = {
        "default/train": [("query-id", "corpus-id", "score"), ("q1", "d2", 1), ("q2", "d1", 0), ("q2", "d3", 1)],
        "queries/queries": [("_id", "text"), ("q1", "who"), ("q2", "what")],
        "corpus/corpus": [("_id", "title", "text"), ("d1", "x", "no"), ("d2", "y", "me"), ("d3", "z", "this")],
    }
    configs = ""
    for name, (columns, *rows) in tables.items():
        (folder / name).parent.mkdir(parents=True)
        write_jsonl(folder / f"{name}.jsonl", [dict(zip(columns, row, strict=True)) for row in rows])
        config, split = name.split("/")
        configs += f"- config_name: {config}\n  data_files:\n  - split: {split}\n    path: {name}.jsonl\n"
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n", encoding="utf-8")
    source = DatasetSource(divisor=2, instruction="", retrieval=True)
    pairs = load_pairs("KEY", source, folder)
    assert [(row["query"], row["positive"]) for row in pairs] == [("who", "me"), ("what", "this")]


def test_digest_changes_with_the_texts_and_not_with_their_place_or_time(tmp_path, monkeypatch):
    def digest(name: str, rows: list[dict]) -> str:
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / name / "cache")
        (tmp_path / name).mkdir()
        write_jsonl(tmp_path / name / "KEY.jsonl", rows)
        columns = ("query", "positive", "negatives")
        return digest_of(load_pairs("KEY", SOURCE, tmp_path / name / "KEY.jsonl"), columns)

    words = [{**row, "query": row["query"] + " ba"} if number == 3 else row for number, row in enumerate(ROWS)]
    fewer = [{**row, "negatives": []} for row in ROWS]
    assert digest("first", ROWS) == digest("again", ROWS)
    others = [digest("words", words), digest("order", ROWS[::-1]), digest("fewer", fewer)]
    assert len({digest("as before", ROWS), *others}) == 4


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
    write_jsonl(tmp_path / "KEY.jsonl", [row])
    with pytest.raises(DataError, match=said):
        load_pairs("KEY", SOURCE, tmp_path / "KEY.jsonl")


def test_damaged_file_is_refused_by_name(tmp_path):
    (tmp_path / "KEY.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"KEY: .*KEY\.parquet cannot be read"):
        load_pairs("KEY", SOURCE, tmp_path / "KEY.parquet")
