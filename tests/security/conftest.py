"""Small valid inputs, a checkpoint that training wrote, and a mark that shows whether something ran."""

from pathlib import Path

import pytest
from good_inputs import TRAINING
from hostile import Canary
from processes import run_command
from readers import write_small_corpus
from tests_tiny import TinyCorpus


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Return a folder with the corpus `small` and its tokenizer."""
    write_small_corpus(tmp_path / "corpus")
    return tmp_path / "corpus"


@pytest.fixture(scope="session")
def trained(tiny_corpus: TinyCorpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A save folder with the checkpoint of iteration 1."""
    save = tmp_path_factory.mktemp("trained") / "save"
    words = [*TRAINING.split(), "--data-path", tiny_corpus.prefix, "--tokenizer-model", tiny_corpus.tokenizer]
    result = run_command("megatron_neobert.pretrain", *words, "--train-iters", "1", "--save", save)
    assert result.code == 0, result.output
    return save


@pytest.fixture
def canary(tmp_path: Path) -> Canary:
    """A harmless object that creates a file when something unpickles it."""
    return Canary(tmp_path / "canary_ran")
