"""Contrastive fine-tuning: its YAML file, pairs from local files, batches."""

import itertools

import datasets
import numpy as np
import pytest
from commands import REPOSITORY
from json_files import write_jsonl
from scipy.stats import chisquare
from torch.utils.data import BatchSampler, ConcatDataset, RandomSampler
from unit.evaluation.embedding_inputs import RECIPE, make_pairs, read_config

from megatron_neobert.errors import ConfigError, DataError, MissingInputError
from megatron_neobert.evaluation.embed_data import (
    DatasetSettings,
    PlannedBatchSampler,
    distinct_batches,
    draw_datasets,
    find_pairs,
    load_pairs,
    without_held_out,
)

PAIRS = make_pairs(7, negatives=2, seed=5)


@pytest.fixture(autouse=True)
def separate_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def test_recipe_has_the_papers_settings_and_datasets():
    config = read_config(RECIPE)
    training = config.training
    assert (training.steps, training.alpha, training.temperature) == (2000, 0.5, 0.07)
    assert len(config.datasets) == 22 - 2, "the paper does not say how the pairs of two datasets were made"
    assert len({source.instruction for source in config.datasets.values()}) == 20 - 2, "two pairs share an instruction"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("training: {temprature: 0.1}", "unknown field `temprature`.*training"),
        ("training: {instructions: corpus}", "'corpus'.*training.instructions"),
        ("datasets: {KEY: {divisor: 0, instruction: a}}", "divisor"),
        ("datasets: {../KEY: {}}", "matching regex.*datasets"),
        ("datasets: {validation: {}}", "validation is the name of the held-out pairs"),
        *((text, r"run\.yaml") for text in ("", "a: [", "datasets: [KEY]", "\x00")),
    ],
)
def test_unknown_or_invalid_setting_is_refused_by_name(tmp_path, text, message):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path / "run.yaml")


def test_file_in_the_documentation_and_a_number_that_yaml_reads_as_a_string_are_valid(tmp_path):
    page = (REPOSITORY / "docs" / "evaluation.md").read_text()
    (tmp_path / "run.yaml").write_text(page.split("```yaml\n")[1].split("```")[0])
    config = read_config(tmp_path / "run.yaml")
    assert (config.training.steps, config.datasets["FAQ"].divisor) == (500, 2)
    (tmp_path / "run.yaml").write_text("training: {learning_rate: 1e-3}")
    assert read_config(tmp_path / "run.yaml").training.learning_rate == 1e-3


# --- local files


def test_files_of_the_folder_are_the_datasets_unless_the_yaml_file_names_some(tmp_path):
    for name in ("B.parquet", "A.jsonl", "B.jsonl", "validation.jsonl", "README.md"):
        (tmp_path / name).touch()
    paths = {key: path.name for key, path in find_pairs(tmp_path, []).items()}
    assert list(paths.items()) == [("A", "A.jsonl"), ("B", "B.parquet"), ("validation", "validation.jsonl")]
    assert list(find_pairs(tmp_path, ["B"])) == ["B", "validation"]
    assert DatasetSettings() == DatasetSettings(divisor=1, instruction="")
    with pytest.raises(MissingInputError, match=r"has no pairs for C, D: expected KEY\.parquet"):
        find_pairs(tmp_path, ["D", "A", "C"])
    (tmp_path / "my pairs.jsonl").touch()
    with pytest.raises(ConfigError, match=r"'my pairs\.jsonl' is no name of a dataset"):
        find_pairs(tmp_path, [])
    assert list(find_pairs(tmp_path, ["A"])) == ["A", "validation"]
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "validation.jsonl").touch()
    with pytest.raises(MissingInputError, match="has no pairs to train on"):
        find_pairs(tmp_path / "empty", [])


def test_both_formats_give_the_same_pairs_and_a_changed_file_is_read_again(tmp_path):
    write_jsonl(tmp_path / "A.jsonl", PAIRS)
    datasets.Dataset.from_list(PAIRS).to_parquet(tmp_path / "B.parquet")
    paths = find_pairs(tmp_path, ["A", "B"])
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
    held_out, pairs = (
        datasets.Dataset.from_list([{"query": query, "positive": text, "negatives": []} for query, text in texts])
        for texts in ([("q1", "p1"), ("q2", "p2")], [("q1", "p9"), ("p9", "q2"), ("q3", "p1"), ("q4", "p4")])
    )
    assert without_held_out(pairs, held_out, "KEY")["query"] == ["q3", "q4"]
    assert "KEY: dropped 2 of 4 pairs with a held-out query" in capfd.readouterr().err
    with pytest.raises(DataError, match="KEY: every pair has a query of the file validation"):
        without_held_out(held_out, held_out, "KEY")


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


# --- batches: one dataset each, no text twice, datasets drawn by size^alpha


def make_repetitive(count: int, *, distinct: int, name: str = "") -> list[dict]:
    """Return pairs with `distinct` different queries; every positive is different."""
    return [{"query": f"{name}q{i % distinct}", "positive": f"{name}p{i}", "negatives": []} for i in range(count)]


def draw(seed: int = 3) -> list[list[int]]:
    library_samplers = [BatchSampler(RandomSampler(pairs), 1, drop_last=True) for pairs in DATASETS]
    plan = {"batch_sizes": BATCH_SIZES, "alpha": 0.5, "batches": 200, "seed": seed}
    sampler = PlannedBatchSampler(ConcatDataset(DATASETS), library_samplers, **plan)
    batches = list(sampler)
    assert len(sampler) == len(batches) == 200
    return batches


DATASETS = [
    make_repetitive(60, distinct=20, name="a"),
    make_repetitive(240, distinct=80, name="b"),
    make_repetitive(15, distinct=15),
]
BATCH_SIZES = {"a": 8, "b": 16, "c": 5}


def test_batch_has_pairs_of_one_dataset_and_no_text_twice():
    pairs = list(itertools.chain(*DATASETS))
    keys = np.repeat(list(BATCH_SIZES), [len(dataset) for dataset in DATASETS])
    for batch in draw():
        (key,) = set(keys[batch])
        assert len(batch) == BATCH_SIZES[key]
        texts = [text for pair in batch for text in {pairs[pair]["query"], pairs[pair]["positive"]}]
        assert len(texts) == len(set(texts))


@pytest.mark.parametrize("column", ["positive", "negatives"])
def test_text_in_another_column_counts_as_repeated(column):
    pairs = make_repetitive(4, distinct=4)
    pairs[1][column] = "q0" if column == "positive" else ["q0"]
    batches = list(itertools.islice(distinct_batches(pairs, 3, seed=(0,), name="pairs"), 40))
    assert not any({0, 1} <= set(batch) for batch in batches)


def test_order_depends_on_the_seed_and_datasets_are_drawn_in_proportion_to_the_root_of_their_size():
    assert draw() == draw()
    assert draw() != draw(seed=4)
    sizes, roots = np.asarray([100, 400, 1600, 6400]), np.asarray([10, 20, 40, 80])
    counts = np.bincount(draw_datasets(sizes, alpha=0.5, batches=3000, seed=0), minlength=4)
    assert chisquare(counts, 3000 * roots / roots.sum()).pvalue > 0.05
    assert chisquare(counts, 3000 * sizes / sizes.sum()).pvalue < 1e-9


def test_dataset_without_enough_distinct_texts_is_refused():
    pairs = make_repetitive(30, distinct=5)
    with pytest.raises(DataError, match=r"few: its 30 rows do not fill one batch of 6"):
        next(distinct_batches(pairs, 6, seed=(0,), name="few"))
    assert len(next(distinct_batches(pairs, 5, seed=(0,), name="few"))) == 5
