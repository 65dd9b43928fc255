"""Fixtures for tests of batches."""

import numpy as np
import pytest
from unit.data.corpus.memory_corpus import MemoryCorpus


@pytest.fixture
def windows_of_40_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_neobert.data.batches.windows.WINDOW_DOCUMENTS", 40)


@pytest.fixture
def corpus() -> MemoryCorpus:
    """150 documents of 1 to 120 tokens: four windows of at most 40. Half are longer than a packed sequence of 64."""
    return MemoryCorpus(np.random.default_rng(5).integers(1, 121, 150))


@pytest.fixture
def corpora() -> tuple[MemoryCorpus, ...]:
    """Three corpora of 90, 120 and 150 documents."""
    return tuple(MemoryCorpus(np.random.default_rng(n).integers(1, 121, 90 + 30 * n), seed=n) for n in range(3))
