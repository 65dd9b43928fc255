"""Blends: several sources in fixed proportions of documents, packed together, with an epoch count per source."""

import hashlib
from collections import defaultdict
from itertools import islice

import numpy as np
import pytest
from unit.data.corpus.memory_corpus import stream_over, whole

from megatron_neobert.data.batches.batch import BatchStream
from megatron_neobert.data.batches.order import COMPONENT_SHIFT

WEIGHTS = (1, 2, 2)

pytestmark = pytest.mark.usefixtures("windows_of_40_documents")


def blend(corpora, *, weights=WEIGHTS, **settings) -> BatchStream:
    return stream_over(tuple(map(whole, corpora, weights)), **settings)


@pytest.mark.parametrize("weights", [(1, 1), (1, 2, 2), (3, 7), (1, 999), (5, 3, 2, 30), (333, 667), (17,) * 9])
def test_consecutive_windows_are_within_one_document_of_the_shares(corpora, weights):
    """Windows have exact shares if the sum of the weights is at most the window's 40 documents."""
    (phase,) = blend([corpora[0]] * len(weights), weights=weights).phases
    period = sum(weights)
    size = 40 // period * period or 40
    components = [phase.documents(epoch=0, window=window).numbers_n >> COMPONENT_SHIFT for window in range(60)]
    counts = np.array([np.bincount(of_window, minlength=len(weights)) for of_window in components])
    if period <= 40:
        assert (counts * period == np.array(weights) * size).all()
    up_to = np.concatenate([np.zeros((1, len(weights)), dtype=np.int64), np.cumsum(counts, axis=0)])
    for first in range(60):
        windows = np.arange(1, 61 - first)[:, None]
        assert np.abs(up_to[first + 1 :] - up_to[first] - windows * size * np.array(weights) / period).max() < 1


@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_every_epoch_of_a_source_has_each_of_its_documents_once(corpora, block_size):
    stream = blend(corpora, global_batch_size=5, micro_batch_size=1, document_block_size=block_size)
    seen: list[dict[int, list[int]]] = [defaultdict(list) for _ in corpora]
    for batch in islice(stream.global_batches(), 200):
        segments = batch.packed.segments
        columns = (segments.components_n, segments.epochs_n, segments.numbers_n)
        for component, epoch, number in zip(*(column.tolist() for column in columns), strict=True):
            seen[component][epoch].append(number)
    assert [max(epochs) for epochs in seen] == [2, 4, 3]  # 90, 120 and 150 documents at 1 : 2 : 2
    for corpus, epochs in zip(corpora, seen, strict=True):
        # Packed sequences of the last window may be unread.
        for epoch in range(max(epochs) - 1):
            assert sorted(epochs[epoch]) == list(range(len(corpus.lengths)))
        assert epochs[0] != epochs[1]


@pytest.mark.parametrize(("block_size", "expected"), [(1, "0248e945d748388a"), (16, "6313c69bf09bb38c")])
def test_the_documents_of_a_window_are_those_of_the_first_release(corpora, block_size, expected):
    """Pinned: with another order, no checkpoint would resume with the documents that it has not read."""
    (phase,) = blend(corpora, document_block_size=block_size).phases
    content = hashlib.sha256()
    for window in (0, 1, 987_654):
        documents = phase.documents(epoch=0, window=window)
        content.update(documents.numbers_n.tobytes() + documents.epochs_n.tobytes())
    assert content.hexdigest()[:16] == expected
