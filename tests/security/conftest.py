"""A checkpoint that training wrote, copies of it to spoil, and the flags of a tiny run."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from good_inputs import TRAINING
from hostile import Canary, Checkpoint
from processes import run_command


@pytest.fixture(scope="session")
def training(tiny_corpus: Any) -> list[str]:
    """The flags of a run of two iterations, without its folders."""
    return [*TRAINING.split(), "--data-path", tiny_corpus.prefix, "--tokenizer-model", tiny_corpus.tokenizer]


@pytest.fixture(scope="session")
def trained(training: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A save folder with the checkpoint of iteration 1."""
    save = tmp_path_factory.mktemp("trained") / "save"
    result = run_command("megatron_neobert.pretrain", *training, "--train-iters", "1", "--save", save)
    assert result.code == 0, result.output
    return save


@pytest.fixture
def checkpoint(trained: Path, tmp_path: Path) -> Checkpoint:
    shutil.copytree(trained, tmp_path / "save")
    return Checkpoint(tmp_path / "save" / "iter_0000001")


@pytest.fixture
def canary(tmp_path: Path) -> Canary:
    """A harmless object that creates a file when something unpickles it."""
    return Canary(tmp_path / "canary_ran")
