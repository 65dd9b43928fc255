"""Small valid inputs, a checkpoint that training wrote, and a mark that shows whether something ran."""

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from good_inputs import TRAINING
from hostile import Canary
from processes import run_command
from tests_tiny import TinyCorpus
from unit.data.small_corpus import numbered_tokenizer, random_documents, write_corpus


class SmallCorpus(NamedTuple):
    """Four documents of 3, 1, 4 and 2 tokens below 100, as uint16."""

    folder: Path

    @property
    def prefix(self) -> Path:
        return self.folder / "small"

    @property
    def flags(self) -> list[str]:
        return ["--data-path", str(self.prefix), "--tokenizer-model", f"{self.folder}/tokenizer", "--split", "100"]


@pytest.fixture(scope="session")
def sound_corpus(tmp_path_factory: pytest.TempPathFactory) -> SmallCorpus:
    """A corpus and its tokenizer, not to be changed."""
    corpus, tokenizer = SmallCorpus(tmp_path_factory.mktemp("sound")), numbered_tokenizer(100)
    write_corpus(corpus.prefix, random_documents([3, 1, 4, 2], 100), tokenizer)
    tokenizer.save_tokenizer_files(corpus.folder / "tokenizer", model_max_length=16)
    return corpus


@pytest.fixture
def corpus(sound_corpus: SmallCorpus, tmp_path: Path) -> SmallCorpus:
    """A copy to change."""
    return SmallCorpus(Path(shutil.copytree(sound_corpus.folder, tmp_path / "corpus")))


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
