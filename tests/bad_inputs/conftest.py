"""A small corpus with its tokenizer, made once and copied for tests that change it."""

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from unit.data.small_corpus import numbered_tokenizer, random_documents, write_corpus


class SmallCorpus(NamedTuple):
    """Four documents of 3, 1, 4 and 2 tokens below 100, as uint16."""

    folder: Path

    @property
    def prefix(self) -> Path:
        return self.folder / "small"

    @property
    def tokenizer(self) -> Path:
        return self.folder / "tokenizer"

    @property
    def flags(self) -> list[str]:
        return ["--data-path", str(self.prefix), "--tokenizer-model", str(self.tokenizer), "--split", "100"]


@pytest.fixture(scope="session")
def sound_corpus(tmp_path_factory: pytest.TempPathFactory) -> SmallCorpus:
    """Not to be changed."""
    corpus, tokenizer = SmallCorpus(tmp_path_factory.mktemp("sound")), numbered_tokenizer(100)
    write_corpus(corpus.prefix, random_documents([3, 1, 4, 2], 100), tokenizer)
    tokenizer.save_tokenizer_files(corpus.tokenizer, model_max_length=16)
    return corpus


@pytest.fixture
def corpus(sound_corpus: SmallCorpus, tmp_path: Path) -> SmallCorpus:
    """A copy to change."""
    return SmallCorpus(Path(shutil.copytree(sound_corpus.folder, tmp_path / "corpus")))
