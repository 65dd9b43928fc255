"""The concatenated layout: documents joined end to end and cut into packed sequences that attend as a whole."""

from collections import defaultdict

import numpy as np
import pytest
from unit.data.corpus.memory_corpus import IDS, MemoryCorpus, micro_batches, stream_of

from megatron_neobert.data.batches.packing import Documents, concatenate_documents

pytestmark = pytest.mark.usefixtures("windows_of_40_documents")

CONCATENATED = {"batch_layout": "concatenated", "long_documents": "chunk"}


@pytest.fixture(scope="module")
def corpus() -> MemoryCorpus:
    """150 documents, many longer than a packed sequence of 64, some of one token."""
    return MemoryCorpus(np.random.default_rng(5).integers(1, 300, 150) ** 2 // 300 + 1)


@pytest.mark.parametrize("long_documents", ["truncate", "chunk"])
def test_a_window_has_every_document_once_between_one_cls_and_one_sep(corpus, long_documents):
    numbers = np.random.default_rng(0).permutation(150)
    documents = Documents(numbers, corpus.lengths[numbers], epochs_n=np.full(150, 3))
    packed = concatenate_documents(documents, seq_length=64, long_documents=long_documents)
    segments = packed.segments
    by_document = defaultdict(list)
    columns = (segments.documents_n, segments.starts_n, segments.lengths_n, segments.has_cls_n, segments.has_sep_n)
    for number, start, length, cls, sep in zip(*(column.tolist() for column in columns), strict=True):
        by_document[number].append((start, start + length, cls, sep))
    assert set(by_document) == set(range(150))
    for number, ranges in by_document.items():
        length = min(62, corpus.lengths[number]) if long_documents == "truncate" else corpus.lengths[number]
        ranges.sort(key=lambda values: (values[0], values[1], values[3]))
        starts, stops, cls, sep = map(list, zip(*ranges, strict=True))
        assert cls == [True] + [False] * (len(ranges) - 1)
        assert sep == [False] * (len(ranges) - 1) + [True]
        assert starts == [0, *stops[:-1]] and stops[-1] == length
    assert set(segments.epochs_n.tolist()) == {3}
    sizes = np.add.reduceat(segments.packed_lengths_n, packed.offsets[:-1])
    assert sorted(sizes.tolist())[1:] == [64] * (len(packed) - 1)
    assert len(packed) == -(-int(segments.packed_lengths_n.sum()) // 64)


def test_each_packed_sequence_is_one_document_for_attention_and_padding_is_a_dummy(corpus):
    for batch in micro_batches(stream_of(corpus, micro_batch_size=4, **CONCATENATED), 40):
        bounds = batch.cu_seqlens_n.tolist()
        assert (bounds[0], bounds[-1], batch.max_seqlen) == (0, 4 * 64, 64)
        lengths = np.diff(bounds)
        assert 1 <= lengths.min() <= lengths.max() <= 64
        assert batch.real_tokens == bounds[4]  # after four packed sequences, only padding follows
        assert (batch.tokens_t[batch.real_tokens :] == IDS.pad).all()
        assert len(bounds) == 5 + (batch.real_tokens < 256)
