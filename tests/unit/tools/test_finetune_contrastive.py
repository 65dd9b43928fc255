"""The commands that fetch datasets and fine-tune contrastively, started as a user does but in this process."""

import json
import shutil
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


def start(patch: pytest.MonkeyPatch, place: Path, tool: str, given: dict[str, object], *flags: object) -> None:
    """Runs a tool with these flags and those every start needs."""
    patch.setattr(datasets.config, "HF_DATASETS_CACHE", place / "cache")
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):  # so that what the command sets goes with the test
        patch.setenv(name, "1")
    needed: dict[str, object] = {"--config": place / "run.yaml", "--data-dir": place / "data"}
    if tool == "finetune_contrastive":
        needed |= {"--model": place / "bert", "--device": "cpu", "--steps": 3}
    words = [*(str(word) for pair in (needed | given).items() for word in pair), *map(str, flags)]
    patch.setattr(sys, "argv", [f"{tool}.py", *words])
    import_tool(tool).main()


@pytest.fixture
def command(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The same, with flags by their names."""

    def run(tool: str, *flags: object, **changed: object) -> None:
        given = {"--output": tmp_path / "out"} if tool == "finetune_contrastive" else {}
        given |= {f"--{name.replace('_', '-')}": value for name, value in changed.items()}
        start(monkeypatch, place, tool, given, *flags)

    return run


@pytest.fixture(scope="module")
def started(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run of three steps."""
    output = tmp_path_factory.mktemp("started")
    with pytest.MonkeyPatch.context() as patch:
        start(patch, place, "finetune_contrastive", {"--output": output})
    return output


@pytest.fixture
def killed(started: Path, tmp_path: Path) -> Path:
    """The same as if the process had been killed after the final folder and before the record."""
    output = tmp_path / "out"
    shutil.copytree(started, output)
    (output / "bert" / "contrastive.json").unlink()
    (output / "bert" / "contrastive_loss.png").unlink()
    return output


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


def test_missing_datasets_are_named_before_anything_is_written(command, tmp_path, monkeypatch):
    write_jsonl(tmp_path / "LARGE.jsonl", make_pairs(20, negatives=0, seed=0))
    with pytest.raises(MissingInputError, match=r"no data for HARD, SMALL: .*fetch_contrastive\.py") as error:
        command("finetune_contrastive", data_dir=tmp_path)
    words = str(error.value).split("python tools/")[1].split(". ")[0].split()
    monkeypatch.setattr(sys, "argv", words)
    arguments = import_tool("fetch_contrastive")._parse()  # the remedy is a command that this tool understands
    assert (arguments.data_dir, arguments.datasets) == (tmp_path, ["HARD", "SMALL"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("setting", "before", "after"),
    [("divisor", 4, 2), ("instruction", "other :", "search :")],
)
def test_another_divisor_or_instruction_is_refused(killed, command, place, tmp_path, setting, before, after):
    content = yaml.safe_load((place / "run.yaml").read_text(encoding="utf-8"))
    content["datasets"]["HARD"][setting] = after
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"\(datasets\.HARD\.{setting} was {before!r} and is now {after!r}\)"):
        command("finetune_contrastive", "--resume", config=tmp_path / "run.yaml")


def test_other_texts_of_the_same_number_are_refused(killed, command, tmp_path):
    write_datasets(tmp_path / "data")
    write_jsonl(tmp_path / "data" / "SMALL.jsonl", make_pairs(100, negatives=1, seed=123))
    with pytest.raises(ConfigError, match=r"\(texts\.SMALL was '\w+' and is now '\w+'\)"):
        command("finetune_contrastive", "--resume", data_dir=tmp_path / "data")


def test_run_that_was_killed_before_its_record_is_completed_by_resume(started, killed, command):
    with pytest.raises(OutputError, match="bert-contrastive is there already"):
        command("finetune_contrastive")
    command("finetune_contrastive", "--resume")
    before, after = (read_record(output / "bert" / "contrastive.json")["results"] for output in (started, killed))
    assert after["started_from"] == "checkpoint-3"
    assert [after[name] for name in ("last_loss_nats", "fingerprint")] == [
        before[name] for name in ("last_loss_nats", "fingerprint")
    ]
    assert (killed / "bert" / "contrastive_loss.png").is_file()


def test_missing_datasets_are_left_out_on_request(command, tmp_path, capsys):
    write_jsonl(tmp_path / "LARGE.jsonl", make_pairs(20, negatives=0, seed=0))
    command("finetune_contrastive", "--skip-missing", data_dir=tmp_path, batch_size=8)
    assert "without HARD, SMALL: no data" in capsys.readouterr().out
    assert list(read_record(tmp_path / "out" / "bert" / "contrastive.json")["results"]["datasets"]) == ["LARGE"]


def test_unknown_dataset_is_refused_with_those_there_are(command):
    with pytest.raises(ConfigError, match="--limit-datasets NONE: unknown; the file has LARGE, SMALL, HARD"):
        command("finetune_contrastive", "--limit-datasets", "LARGE", "NONE")


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


def test_a_source_that_fails_does_not_keep_the_others_from_coming(command, tmp_path, capsys):
    write_jsonl(tmp_path / "rows.jsonl", make_pairs(9, negatives=0, seed=3))
    (tmp_path / "hub").mkdir()
    (tmp_path / "rows.jsonl").rename(tmp_path / "hub" / "train.jsonl")
    (tmp_path / "empty").mkdir()
    source = {"query": "query", "positive": "positive", "divisor": 2, "instruction": "find :"}
    own = {key: {**source, "hub": str(tmp_path / hub)} for key, hub in (("LOST", "empty"), ("THERE", "hub"))}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"training": {}, "datasets": own}), encoding="utf-8")
    with pytest.raises(MissingInputError, match=r"1 of 2 datasets could not be fetched \(LOST\)"):
        command("fetch_contrastive", config=tmp_path / "run.yaml", data_dir=tmp_path / "data")
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["THERE.parquet"]
    assert "failed: LOST: " in capsys.readouterr().out


def test_dataset_without_a_source_is_not_fetched(command, place):
    with pytest.raises(ConfigError, match="names no hub for LARGE, SMALL, HARD"):
        command("fetch_contrastive")
