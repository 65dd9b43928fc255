"""`neobert train-embedder` as a user calls it, in this process."""

from functools import partial
from pathlib import Path

import datasets
import pytest
from commands import call
from unit.evaluation.contrastive_inputs import make_pairs, write_datasets, write_encoder, write_jsonl, write_yaml

from megatron_neobert.evaluation.ledger import read_record


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("contrastive")
    write_encoder(folder / "bert")
    write_datasets(folder / "data")
    write_yaml(folder / "run.yaml", steps=1000)
    return folder


@pytest.fixture(autouse=True)
def own_cache(inputs, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", inputs / "cache")


def start(inputs, output, *flags):
    """Train for three steps; later flags replace these."""
    where = ("--data-dir", inputs / "data", "--output", output)
    return call("train-embedder", "--model", inputs / "bert", "--device", "cpu", "--steps", 3, *where, *flags)


@pytest.fixture
def train(inputs, tmp_path):
    return partial(start, inputs, tmp_path / "out")


def test_record_has_the_settings_and_the_rows_of_each_dataset(train, inputs, tmp_path):
    flags = ("--config", inputs / "run.yaml", "--limit", 20, "--gradient-cache", 8)
    assert train(*flags, "--batch-size", 16, "--seed", 5)[0] == 0
    record = read_record(tmp_path / "out" / "bert" / "contrastive.json")
    settings = record["settings"]
    expected = {"steps": 3, "batch_size": 16, "seed": 5, "gradient_cache": 8, "processes": 1}
    assert {name: settings[name] for name in expected} == expected
    assert settings["rows"] == {"LARGE": 20, "SMALL": 20, "HARD": 20}


def test_folder_of_pairs_is_enough(train, tmp_path):
    pairs = make_pairs(20, negatives=0, seed=0)
    write_jsonl(tmp_path / "pairs" / "FAQ.jsonl", pairs)
    write_jsonl(tmp_path / "pairs" / "validation.jsonl", make_pairs(5, negatives=0, seed=1))
    code, _, error = train("--data-dir", tmp_path / "pairs", "--batch-size", 8)
    assert code == 0, error
    settings = read_record(tmp_path / "out" / "bert" / "contrastive.json")["settings"]
    assert settings["datasets"] == {"FAQ": {"divisor": 1, "instruction": ""}}
    assert settings["rows"] == {"FAQ": 20} and settings["validation"]


def test_missing_datasets_are_named_before_anything_is_written(train, inputs, tmp_path):
    write_jsonl(tmp_path / "LARGE.jsonl", make_pairs(20, negatives=0, seed=0))
    code, _, error = train("--data-dir", tmp_path, "--config", inputs / "run.yaml")
    assert code == 66 and "has no pairs for HARD, SMALL: " in error
    assert not (tmp_path / "out").exists()
