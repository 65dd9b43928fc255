"""Rows cut through documents, each row attended to as a whole."""

from collections import defaultdict

import numpy as np
import pytest
from unit.data.corpus.memory_corpus import IDS, MemoryCorpus, micro_batches, stream_of

from megatron_neobert.data.batches.packing import concatenate_rows

pytestmark = pytest.mark.usefixtures("windows_of_40_documents")

CONCATENATED = {"batch_layout": "concatenated", "long_documents": "chunk"}


@pytest.fixture(scope="module")
def corpus() -> MemoryCorpus:
    """150 documents, many longer than a row of 64, some of one token."""
    return MemoryCorpus(np.random.default_rng(5).integers(1, 300, 150) ** 2 // 300 + 1)


@pytest.mark.parametrize("long_documents", ["truncate", "chunk"])
def test_a_window_holds_every_document_whole_between_one_cls_and_one_sep(corpus, long_documents):
    numbers = np.random.default_rng(0).permutation(150)
    rows = concatenate_rows(
        numbers,
        corpus.lengths[numbers],
        np.full(150, 3),
        seq_length=64,
        long_documents=long_documents,
    )
    segments = rows.segments
    pieces = defaultdict(list)
    for number, start, length, cls, sep in zip(
        segments.documents_n.tolist(),
        segments.starts_n.tolist(),
        segments.lengths_n.tolist(),
        segments.has_cls_n.tolist(),
        segments.has_sep_n.tolist(),
        strict=True,
    ):
        pieces[number].append((start, start + length, cls, sep))
    assert set(pieces) == set(range(150))
    for number, parts in pieces.items():
        kept = min(62, corpus.lengths[number]) if long_documents == "truncate" else corpus.lengths[number]
        parts.sort(key=lambda part: (part[0], part[1], part[3]))
        assert [cls for _, _, cls, _ in parts] == [True] + [False] * (len(parts) - 1)
        assert [sep for _, _, _, sep in parts] == [False] * (len(parts) - 1) + [True]
        assert [part[0] for part in parts] == [0, *(part[1] for part in parts[:-1])]
        assert parts[-1][1] == kept
    assert set(segments.epochs_n.tolist()) == {3}
    tokens_per_row = np.add.reduceat(segments.slots_n, rows.row_offsets[:-1])
    assert sorted(tokens_per_row.tolist())[1:] == [64] * (len(rows) - 1)
    assert len(rows) == -(-int(segments.slots_n.sum()) // 64)


def test_a_document_is_one_row_for_attention_and_unused_slots_are_a_dummy(corpus):
    for batch in micro_batches(stream_of(corpus, micro_batch_size=4, **CONCATENATED), 40):
        bounds = batch.cu_seqlens_n.tolist()
        assert (bounds[0], bounds[-1], batch.max_seqlen) == (0, 4 * 64, 64)
        lengths = np.diff(bounds)
        assert 1 <= lengths.min() <= lengths.max() <= 64
        assert batch.real_tokens == bounds[4]  # four rows; what follows is unused
        assert (batch.tokens_t[batch.real_tokens :] == IDS.pad).all()
        assert len(bounds) == 5 + (batch.real_tokens < 256)
