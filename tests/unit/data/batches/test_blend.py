"""Several sources in fixed proportions of documents, packed together, each through its own epochs."""

import hashlib
from collections import defaultdict
from itertools import islice

import numpy as np
import pytest
from unit.data.corpus.memory_corpus import batch_settings

from megatron_neobert.data.batches.order import COMPONENT_SHIFT, documents_between
from megatron_neobert.data.batches.rows import documents_in_window
from megatron_neobert.data.batches.stream import BatchStream, Source

WEIGHTS = (1, 2, 2)
NUMBER = (1 << COMPONENT_SHIFT) - 1  # the bits of a document's number inside its corpus

pytestmark = pytest.mark.usefixtures("windows_of_40_documents")


def blend(corpora, *, weights=WEIGHTS, **settings) -> BatchStream:
    sources = tuple(
        Source(corpus, range(len(corpus.lengths)), weight) for corpus, weight in zip(corpora, weights, strict=True)
    )
    return BatchStream(sources, batch_settings(**settings))


def documents_of(sources: tuple[Source, ...], windows: range, **settings) -> tuple[np.ndarray, np.ndarray]:
    """Component and number of the documents of these windows, in their order."""
    tagged = np.concatenate(
        [documents_in_window(sources, batch_settings(**settings), epoch=0, window=window)[0] for window in windows]
    )
    return tagged >> COMPONENT_SHIFT, tagged & NUMBER


# --- shares ---


@pytest.mark.parametrize("weights", [(1, 1), (1, 2, 2), (3, 7), (1, 999), (5, 3, 2, 30), (333, 667), (17,) * 9])
def test_any_run_of_windows_is_within_one_document_of_the_shares(corpora, weights):
    """And exact where a window can be: where the weights as whole numbers sum to no more than its documents."""
    sources = blend([corpora[0]] * len(weights), weights=weights).sources
    period = sum(weights)
    size = 40 // period * period or 40
    given = np.array(
        [np.bincount(documents_of(sources, range(k, k + 1))[0], minlength=len(weights)) for k in range(60)]
    )
    if period <= 40:
        assert (given * period == np.array(weights) * size).all()
    up_to = np.concatenate([np.zeros((1, len(weights)), dtype=np.int64), np.cumsum(given, axis=0)])
    for first in range(60):
        windows = np.arange(1, 61 - first)[:, None]
        assert np.abs(up_to[first + 1 :] - up_to[first] - windows * size * np.array(weights) / period).max() < 1


# --- one order per source, independent of the others ---


@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_every_source_passes_through_its_own_epochs_and_each_holds_every_document_once(corpora, block_size):
    stream = blend(corpora, global_batch_size=5, micro_batch_size=1, document_block_size=block_size)
    seen: list[dict[int, list[int]]] = [defaultdict(list) for _ in corpora]
    for rows, _ in islice(stream.global_batches(), 200):
        for number, epoch in zip(rows.segments.documents_n.tolist(), rows.segments.epochs_n.tolist(), strict=True):
            seen[number >> COMPONENT_SHIFT][epoch].append(number & NUMBER)
    assert [max(epochs) for epochs in seen] == [2, 4, 3]  # 90, 120 and 150 documents at 1 : 2 : 2
    for corpus, epochs in zip(corpora, seen, strict=True):
        for epoch in range(max(epochs) - 1):  # rows of the last window may still be unread
            assert sorted(epochs[epoch]) == list(range(len(corpus.lengths)))
        assert epochs[0] != epochs[1]


def test_the_order_without_an_end_is_the_same_however_it_is_asked_for():
    order = {"documents": 150, "window_documents": 20, "block_size": 8, "seed": 1, "component": 3}
    whole = documents_between(0, 500, **order)
    for first, stop in ((0, 1), (143, 152), (17, 460), (299, 300), (300, 300)):
        for values, expected in zip(documents_between(first, stop, **order), whole, strict=True):
            assert np.array_equal(values, expected[first:stop])


@pytest.mark.parametrize(
    ("block_size", "expected"),
    [(1, "0248e945d748388a"), (16, "6313c69bf09bb38c")],
)
def test_the_documents_of_a_window_are_those_that_earlier_runs_resumed_with(corpora, block_size, expected):
    """Pinned, by the number of the window alone: a change here would make every checkpoint continue elsewhere."""
    settings = batch_settings(document_block_size=block_size)
    content = hashlib.sha256()
    for window in (0, 1, 987_654):
        numbers, epochs, _ = documents_in_window(blend(corpora).sources, settings, epoch=0, window=window)
        content.update(numbers.tobytes() + epochs.tobytes())
    assert content.hexdigest()[:16] == expected
