"""Fixtures: a small corpus, a trained checkpoint, and a canary that shows whether code of a file has run."""

from pathlib import Path

import pytest
from good_inputs import TRAINING
from hostile import Canary
from processes import run_command
from readers import write_small_corpus
from tests_tiny import TinyCorpus


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Write the corpus `small` and its tokenizer into a folder."""
    write_small_corpus(tmp_path / "corpus")
    return tmp_path / "corpus"


@pytest.fixture(scope="session")
def trained(tiny_corpus: TinyCorpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train one iteration, and return the save folder."""
    save = tmp_path_factory.mktemp("trained") / "save"
    data = ("--data-path", tiny_corpus.prefix, "--tokenizer-model", tiny_corpus.tokenizer)
    ended = run_command("megatron_neobert.pretrain", *TRAINING.split(), *data, "--train-iters", "1", "--save", save)
    assert ended.code == 0, ended.output
    return save


@pytest.fixture
def canary(tmp_path: Path) -> Canary:
    """Return a harmless object that creates a folder when something unpickles it."""
    return Canary(tmp_path / "canary_ran")
