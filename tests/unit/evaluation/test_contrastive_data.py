"""Contrastive fine-tuning: its YAML file, pairs from local files and from folders in place of the Hub, batches."""

import dataclasses
import itertools
from pathlib import Path

import datasets
import numpy as np
import pytest
from scipy.stats import chisquare
from torch.utils.data import BatchSampler, ConcatDataset, RandomSampler
from unit.evaluation.contrastive_inputs import make_pairs, write_card, write_jsonl

from megatron_neobert.errors import ConfigError, DataError
from megatron_neobert.evaluation.embed_batches import PlannedBatchSampler, SamplingPlan, distinct_batches
from megatron_neobert.evaluation.embed_data import (
    DatasetSource,
    fetch_pairs,
    find_local,
    load_pairs,
    read_config,
    without_held_out,
)

PAIRS = make_pairs(7, negatives=2, seed=5)
RECIPE = Path(__file__).resolve().parents[3] / "megatron_neobert" / "configs" / "evaluation" / "contrastive.yaml"


@pytest.fixture(autouse=True)
def separate_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def test_recipe_has_the_papers_settings_and_datasets():
    config = read_config(RECIPE)
    training = config.training
    assert (training.steps, training.alpha, training.temperature) == (2000, 0.5, 0.07)
    assert len(config.datasets) == 22
    assert {key for key, source in config.datasets.items() if not source.default} == {"MEDMCQACLUST", "YAHOOCLUST"}
    assert all(source.hub for source in config.datasets.values() if source.default)
    assert len({source.instruction for source in config.datasets.values()}) == 22 - 2, "two pairs share an instruction"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("training: {temprature: 0.1}", "unknown field `temprature`.*training"),
        ("training: {instructions: corpus}", "'corpus'.*training.instructions"),
        ("datasets: {KEY: {divisor: 0, instruction: a}}", "divisor"),
        ("datasets: {KEY: {divisor: 1, instruction: a, hub: b, query: c}}", "hub b without query and positive"),
        (
            "datasets: {KEY: {divisor: 1, instruction: a, hub: b, retrieval: true, query: c}}",
            "retrieval: true has fixed columns",
        ),
        ("datasets: {validation: {divisor: 1, instruction: a}}", "validation is the name of the held-out pairs"),
        *((text, r"run\.yaml") for text in ("", "training: {}", "a: [", "training: {}\ndatasets: {}", "\x00")),
    ],
)
def test_unknown_or_invalid_setting_is_refused_by_name(tmp_path, text, message):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path / "run.yaml")


def test_number_that_yaml_reads_as_a_string_is_accepted(tmp_path):
    (tmp_path / "run.yaml").write_text("{training: {learning_rate: 1e-3}, datasets: {A: {divisor: 1, instruction: a}}}")
    assert read_config(tmp_path / "run.yaml").training.learning_rate == 1e-3


# --- local files


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


@pytest.mark.parametrize("early", [{"negatives": None}, {}, {"negatives": []}, {"meta": None}])
def test_json_lines_have_the_types_of_json_wherever_a_value_is_in_the_file(tmp_path, early):
    """The library's reader took the types of the first 10 MB, and read dates as times."""
    late = {"query": "2024-01-01", "positive": 1.0, "negatives": ["2024-01-02"], "meta": {"a": 1}}
    many = ({"query": f"q{number}", "positive": "p" * 11_000, **early} for number in range(1_000))
    write_jsonl(tmp_path / "KEY.jsonl", [*many, late])
    pairs = load_pairs(tmp_path / "KEY.jsonl")
    assert len(pairs) == 1_001
    assert pairs[-1] == {"query": "2024-01-01", "positive": "1", "negatives": ["2024-01-02"]}


def test_training_pairs_with_a_held_out_query_are_dropped_and_shared_documents_are_kept(capfd):
    held_out = make([("q1", "p1"), ("q2", "p2")])
    pairs = make([("q1", "p9"), ("p9", "q2"), ("q3", "p1"), ("q4", "p4")])
    assert without_held_out(pairs, held_out, "KEY")["query"] == ["q3", "q4"]
    assert "KEY: dropped 2 of 4 pairs with a held-out query" in capfd.readouterr().err
    with pytest.raises(DataError, match="KEY: every pair has a query of the file validation"):
        without_held_out(held_out, held_out, "KEY")


def make(pairs):
    return datasets.Dataset.from_list([{"query": query, "positive": text, "negatives": []} for query, text in pairs])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("KEY.jsonl", b'{"title": "a", "positive": "b"}', "has the columns title, positive, but no query"),
        ("KEY.jsonl", b'{"query": "a", "positive": "b", "negatives": "c"}', "negatives is 'c', not a list"),
        ("KEY.jsonl", b'{"query": "a", "positive": "b"}\n["a", "b"]', r"line 2: \['a', 'b'\] is not a JSON object"),
        ("KEY.jsonl", b'{"query": "a", "positive": "b"}\n{"query": "\xff"}', "line 2: cannot be read .*utf-8"),
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
        ({"title": "a", "body": "b", "wrong": []}, "KeyError: 'question'"),
        ({"question": ["a"], "answers": [{"text": "b"}], "wrong": []}, "no row has a query and a positive"),
        ({"question": "a", "answers": [{"text": "b"}]}, "KeyError: 'wrong'"),
        ({"question": "", "answers": [{"text": "b"}], "wrong": []}, "no row has a query and a positive"),
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


# --- batches: one dataset each, no text twice, datasets drawn by size^alpha


def make_repetitive(count: int, *, distinct: int, name: str = "") -> list[dict]:
    """Return pairs with `distinct` different queries; every positive is different."""
    return [{"query": f"{name}q{i % distinct}", "positive": f"{name}p{i}", "negatives": []} for i in range(count)]


def draw(plan: SamplingPlan) -> list[list[int]]:
    library_samplers = [BatchSampler(RandomSampler(pairs), 1, drop_last=True) for pairs in DATASETS]
    sampler = PlannedBatchSampler(ConcatDataset(DATASETS), library_samplers, plan=plan)
    batches = list(sampler)
    assert len(sampler) == len(batches) == plan.batches
    return batches


DATASETS = [
    make_repetitive(60, distinct=20, name="a"),
    make_repetitive(240, distinct=80, name="b"),
    make_repetitive(15, distinct=15),
]
PLAN = SamplingPlan(names=("a", "b", "c"), sizes=(60, 240, 15), batch_sizes=(8, 16, 5), alpha=0.5, batches=200, seed=3)


def test_batch_has_pairs_of_one_dataset_and_no_text_twice():
    pairs = list(itertools.chain(*DATASETS))
    dataset_indices = np.repeat(np.arange(3), PLAN.sizes)
    for batch in draw(PLAN):
        (index,) = set(dataset_indices[batch])
        assert len(batch) == PLAN.batch_sizes[index]
        texts = [text for pair in batch for text in {pairs[pair]["query"], pairs[pair]["positive"]}]
        assert len(texts) == len(set(texts))


@pytest.mark.parametrize("column", ["positive", "negatives"])
def test_text_in_another_column_counts_as_repeated(column):
    pairs = make_repetitive(4, distinct=4)
    pairs[1][column] = "q0" if column == "positive" else ["q0"]
    batches = list(itertools.islice(distinct_batches(pairs, 3, seed=(0,), name="pairs"), 40))
    assert not any({0, 1} <= set(batch) for batch in batches)


def test_datasets_are_drawn_in_proportion_to_the_root_of_their_size():
    sizes, roots = np.asarray([100, 400, 1600, 6400]), np.asarray([10, 20, 40, 80])
    plan = SamplingPlan(names=tuple("abcd"), sizes=tuple(sizes), batch_sizes=(2,) * 4, alpha=0.5, batches=3000, seed=0)
    counts = np.bincount(plan.draw_datasets(), minlength=4)
    assert chisquare(counts, plan.batches * roots / roots.sum()).pvalue > 0.05
    assert chisquare(counts, plan.batches * sizes / sizes.sum()).pvalue < 1e-9


def test_order_depends_on_the_seed():
    assert draw(PLAN) == draw(PLAN)
    assert draw(PLAN) != draw(dataclasses.replace(PLAN, seed=4))


def test_dataset_without_enough_distinct_texts_is_refused():
    pairs = make_repetitive(30, distinct=5)
    with pytest.raises(DataError, match=r"few: its 30 rows do not fill one batch of 6"):
        next(distinct_batches(pairs, 6, seed=(0,), name="few"))
    assert len(next(distinct_batches(pairs, 5, seed=(0,), name="few"))) == 5
