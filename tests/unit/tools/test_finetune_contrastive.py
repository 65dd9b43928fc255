"""`neobert fetch contrastive` and `neobert finetune` as a user calls them, in this process."""

from functools import partial
from pathlib import Path

import datasets
import pytest
import yaml
from commands import call
from unit.evaluation.contrastive_inputs import make_pairs, write_datasets, write_encoder, write_jsonl, write_yaml

from megatron_neobert.cli import build_parser
from megatron_neobert.evaluation.ledger import read_record
from megatron_neobert.evaluation.options import FetchContrastiveOptions

ROWS = make_pairs(9, negatives=0, seed=3)


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
    where = ("--config", inputs / "run.yaml", "--data-dir", inputs / "data", "--output", output)
    return call("finetune", "--model", inputs / "bert", "--device", "cpu", "--steps", 3, *where, *flags)


@pytest.fixture
def finetune(inputs, tmp_path):
    return partial(start, inputs, tmp_path / "out")


def test_record_has_the_settings_and_the_rows_of_each_dataset(finetune, tmp_path):
    flags = ("--limit", 20, "--gradient-cache", 8)
    assert finetune(*flags, "--batch-size", 16, "--seed", 5)[0] == 0
    record = read_record(tmp_path / "out" / "bert" / "contrastive.json")
    settings = record["settings"]
    expected = {"steps": 3, "batch_size": 16, "seed": 5, "gradient_cache": 8, "processes": 1}
    assert {name: settings[name] for name in expected} == expected
    assert settings["rows"] == {"LARGE": 20, "SMALL": 20, "HARD": 20}


def test_missing_datasets_are_named_before_anything_is_written(finetune, tmp_path):
    write_jsonl(tmp_path / "LARGE.jsonl", make_pairs(20, negatives=0, seed=0))
    code, _, error = finetune("--data-dir", tmp_path)
    assert code == 66 and "no data for HARD, SMALL: " in error
    assert not (tmp_path / "out").exists()
    remedy = error.split("neobert fetch ")[1].split(". ")[0].split()
    parser = build_parser(FetchContrastiveOptions, prog="fetch", description="")
    values, problems = parser.parse_all(remedy[1:])  # the remedy is a valid command
    assert (values["data_dir"], values["datasets"], problems) == (str(tmp_path), ["HARD", "SMALL"], [])


# --- fetching, from a folder instead of the Hub


def fetch(folder, **sources):
    """Write these sources into FOLDER/run.yaml and fetch them into FOLDER/data."""
    common = {"query": "query", "positive": "positive", "divisor": 2, "instruction": "find :"}
    content = {"training": {}, "datasets": {key: common | source for key, source in sources.items()}}
    (folder / "run.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    return call("fetch contrastive", "--config", folder / "run.yaml", "--data-dir", folder / "data")


@pytest.fixture
def hub(tmp_path):
    (tmp_path / "hub").mkdir()
    rows = [{"query": row["query"], "positive": row["positive"]} for row in ROWS]
    write_jsonl(tmp_path / "hub" / "train.jsonl", rows)
    return str(tmp_path / "hub")


def test_fetched_file_has_the_rows_of_the_source_and_is_read_by_fine_tuning(finetune, hub, tmp_path):
    sources = {"LARGE": {"hub": hub}, "SMALL": {"default": False}}
    assert fetch(tmp_path, **sources)[0] == 0
    assert datasets.Dataset.from_parquet(str(tmp_path / "data" / "LARGE.parquet")).to_list() == ROWS
    assert "kept" in fetch(tmp_path, **sources)[1]
    finetune("--config", tmp_path / "run.yaml", "--data-dir", tmp_path / "data", "--batch-size", 8)
    assert read_record(tmp_path / "out" / "bert" / "contrastive.json")["settings"]["rows"] == {"LARGE": 9}


def test_source_that_fails_is_named_and_the_others_are_fetched(hub, tmp_path):
    (tmp_path / "empty").mkdir()
    code, printed, error = fetch(tmp_path, LOST={"hub": str(tmp_path / "empty")}, THERE={"hub": hub})
    assert code == 66 and "1 of 2 could not be fetched (LOST)" in error
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["THERE.parquet"]
    assert "LOST: failed (" in printed
