"""Hostile YAML: a settings file and the record in a checkpoint create plain values only, and name no class to call."""

from pathlib import Path

import pytest
import yaml
from hostile import Canary, Checkpoint
from processes import run_command


def calling_yaml(canary: Canary, key: str = "seed") -> str:
    return f"training:\n  {key}: !!python/object/apply:os.mkdir [{canary.mark}]\n"


def test_settings_file_that_calls_a_function_is_refused(tmp_path: Path, canary: Canary):
    path = tmp_path / "run.yaml"
    path.write_text(calling_yaml(canary))
    result = run_command("megatron_neobert.pretrain", "--config", path, "--dry-run")
    assert result.refused(2), result.output
    assert "python/object/apply:os.mkdir" in result.output
    assert not canary.has_run
    yaml.unsafe_load(path.read_text())
    assert canary.has_run


@pytest.mark.parametrize("reader", ["training", "convert"])
def test_record_that_calls_a_function_is_refused(
    training: list[str], checkpoint: Checkpoint, tmp_path: Path, canary: Canary, reader: str
):
    checkpoint.replace("settings.yaml", calling_yaml(canary).encode())
    if reader == "training":
        result = run_command(
            "megatron_neobert.pretrain", *training, "--save", checkpoint.save, "--load", checkpoint.save
        )
    else:
        result = run_command(
            "checkpoint_conversion.convert", "megatron-to-hf", "--load", checkpoint.save, "--output", tmp_path / "hf"
        )
    assert result.refused(78), result.output
    assert not canary.has_run
