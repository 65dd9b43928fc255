"""The commands that fetch datasets and fine-tune contrastively, started as a user does but in this process."""

import json
import sys
from pathlib import Path

import datasets
import pytest
import yaml
from commands import import_tool
from unit.evaluation.contrastive_place import make_pairs, write_datasets, write_encoder, write_jsonl, write_yaml

from megatron_neobert.errors import ConfigError, MissingInputError, OutputError
from megatron_neobert.evaluation.records import read_record


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("contrastive")
    write_encoder(folder / "bert")
    write_datasets(folder / "data")
    write_yaml(folder / "run.yaml", steps=1000)
    return folder


@pytest.fixture
def command(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs a tool with these flags and those every start needs."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", place / "cache")
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):  # so that what the command sets goes with the test
        monkeypatch.setenv(name, "1")

    def run(tool: str, *flags: object, **changed: object) -> None:
        given = {"--config": place / "run.yaml", "--data-dir": place / "data"}
        if tool == "finetune_contrastive":
            given |= {"--model": place / "bert", "--output": tmp_path / "out", "--device": "cpu", "--steps": 3}
        given |= {f"--{name.replace('_', '-')}": value for name, value in changed.items()}
        words = [*(str(word) for pair in given.items() for word in pair), *map(str, flags)]
        monkeypatch.setattr(sys, "argv", [f"{tool}.py", *words])
        import_tool(tool).main()

    return run


def test_run_writes_the_folder_the_losses_and_a_record(command, tmp_path, capsys):
    flags = ("--limit-datasets", "HARD", "LARGE", "--limit", 20, "--gradient-cache", 8, "--instructions", "both")
    command("finetune_contrastive", *flags, batch_size=16, seed=5)
    said = capsys.readouterr().out
    record = read_record(tmp_path / "out" / "bert" / "contrastive.json")
    assert (record["kind"], record["model"]["name"]) == ("contrastive", "bert")
    settings, results = record["settings"], record["results"]
    expected = {"steps": 3, "batch_size": 16, "seed": 5, "gradient_cache": 8, "instructions": "both", "processes": 1}
    assert {name: settings[name] for name in expected} == expected
    assert settings["rows"] == {"LARGE": 20, "HARD": 20}
    assert list(results["datasets"]) == ["HARD", "LARGE"]
    assert "HARD: " in said and "of 4 pairs from 20" in said
    final = Path(results["folder"])
    assert final == tmp_path / "out" / "bert" / "bert-contrastive"
    assert json.loads((final / "config_sentence_transformers.json").read_text())["prompts"]["HARD"] == "other : "

    with pytest.raises(OutputError, match="bert-contrastive is there already"):
        command("finetune_contrastive")
    command("finetune_contrastive", "--resume")
    assert "is there already" in capsys.readouterr().out


def test_missing_datasets_are_named_before_anything_is_written(command, place, tmp_path):
    write_jsonl(tmp_path / "LARGE.jsonl", make_pairs(20, negatives=0, seed=0))
    with pytest.raises(MissingInputError, match=r"no data for HARD, SMALL: .*fetch_contrastive\.py"):
        command("finetune_contrastive", data_dir=tmp_path)
    assert not (tmp_path / "out").exists()


def test_missing_datasets_are_left_out_on_request(command, tmp_path, capsys):
    write_jsonl(tmp_path / "LARGE.jsonl", make_pairs(20, negatives=0, seed=0))
    command("finetune_contrastive", "--skip-missing", data_dir=tmp_path, batch_size=8)
    assert "without HARD, SMALL: no data" in capsys.readouterr().out
    assert list(read_record(tmp_path / "out" / "bert" / "contrastive.json")["results"]["datasets"]) == ["LARGE"]


def test_unknown_dataset_is_refused_with_those_there_are(command):
    with pytest.raises(ConfigError, match="--limit-datasets NONE: unknown; the file has LARGE, SMALL, HARD"):
        command("finetune_contrastive", "--limit-datasets", "LARGE", "NONE")


def test_flag_is_checked_like_the_file(command):
    with pytest.raises(ConfigError, match=r"learning_rate 0\.0 is not greater than 0"):
        command("finetune_contrastive", learning_rate=0)


def test_fetched_file_is_what_fine_tuning_reads(command, place, tmp_path, capsys):
    hub = tmp_path / "hub"  # a folder does for the hub
    hub.mkdir()
    rows = make_pairs(9, negatives=0, seed=3)
    write_jsonl(hub / "train.jsonl", [{"a": row["query"], "b": row["positive"]} for row in rows])
    source = {"hub": str(hub), "query": "a", "positive": "b", "divisor": 2, "instruction": "find :"}
    config = tmp_path / "run.yaml"
    own = {"LARGE": source, "SMALL": {"divisor": 2, "instruction": "similar :", "default": False}}
    config.write_text(yaml.safe_dump({"training": {}, "datasets": own}), encoding="utf-8")
    command("fetch_contrastive", config=config, data_dir=tmp_path / "data")
    assert datasets.Dataset.from_parquet(str(tmp_path / "data" / "LARGE.parquet")).to_list() == rows
    command("fetch_contrastive", config=config, data_dir=tmp_path / "data")
    assert "kept" in capsys.readouterr().out
    command("finetune_contrastive", config=config, data_dir=tmp_path / "data", batch_size=8)
    assert read_record(tmp_path / "out" / "bert" / "contrastive.json")["settings"]["rows"] == {"LARGE": 9}


def test_dataset_without_a_source_is_not_fetched(command, place):
    with pytest.raises(ConfigError, match="names no hub for LARGE, SMALL, HARD"):
        command("fetch_contrastive")
