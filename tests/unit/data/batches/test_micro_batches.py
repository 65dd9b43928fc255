"""Micro-batches: their share under context parallelism, padding to capacity, and content pinned to a release."""

import hashlib
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
from unit.data.corpus.memory_corpus import (
    BERT,
    IDS,
    PAPER,
    MemoryCorpus,
    bits_of,
    micro_batches,
    ranks_of,
    stream_of,
    stream_over,
)

from megatron_neobert.data.batches.batch import BatchStream, MicroBatch, RankPosition
from megatron_neobert.data.batches.windows import IGNORED_LABEL, Cursor, Source, document_capacity
from megatron_neobert.data.corpus.attributes import ChosenDocuments


@pytest.mark.parametrize("layout", ["packed", "concatenated"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_shares_of_context_parallel_ranks_make_up_the_micro_batch(corpus, layout, ranks):
    whole = stream_of(corpus, batch_layout=layout)
    streams = [
        replace(whole, rank=RankPosition(context_parallel_rank=rank, context_parallel_size=ranks))
        for rank in range(ranks)
    ]
    size = 2 * 64 // ranks
    for batch, *shares in zip(*(micro_batches(stream, 30) for stream in (whole, *streams)), strict=True):
        assert torch.cat([share.tokens_t for share in shares]).equal(batch.tokens_t)
        assert all(len(share.tokens_t) == size for share in shares)
        assert torch.cat([share.labels_m for share in shares]).equal(batch.labels_m)
        positions = [share.masked_positions_m + rank * size for rank, share in enumerate(shares)]
        assert torch.cat(positions).equal(batch.masked_positions_m)
        assert all(0 <= share.masked_positions_m.min() <= share.masked_positions_m.max() < size for share in shares)
        assert all(share.cu_seqlens_n.equal(batch.cu_seqlens_n) for share in shares)
        assert sum(share.real_tokens for share in shares) == batch.real_tokens


@pytest.mark.parametrize("layout", ["packed", "concatenated"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_batches_padded_to_capacity_have_the_same_shapes_and_padding_is_marked(corpus, layout, ranks):
    stream = replace(
        stream_of(corpus, micro_batch_size=4, batch_layout=layout), rank=RankPosition(context_parallel_size=ranks)
    )
    varying = list(micro_batches(stream, 60))
    fixed = list(micro_batches(replace(stream, pads_to_capacity=True), 60))

    def shapes(batches: list[MicroBatch]) -> set[tuple[int, ...]]:
        return {(len(batch.tokens_t), len(batch.labels_m), len(batch.cu_seqlens_n)) for batch in batches}

    assert len(shapes(varying)) > 1
    assert len(shapes(fixed)) == 1
    for batch, padded in zip(varying, fixed, strict=True):
        assert padded.tokens_t.equal(batch.tokens_t)
        assert len(padded.masked_positions_m) == len(padded.labels_m)
        for name, filler in (("labels_m", IGNORED_LABEL), ("masked_positions_m", 0), ("cu_seqlens_n", 4 * 64)):
            values, found = getattr(batch, name), getattr(padded, name)
            assert found.tolist() == values.tolist() + [filler] * (len(found) - len(values))
            assert found.dtype == values.dtype


def test_all_ranks_pad_a_step_to_the_same_number_of_documents(corpus):
    whole = stream_of(corpus, micro_batch_size=22, global_batch_size=88)
    steps = list(islice(replace(whole, pads_to_capacity=True).rank_batches(), 30))
    numbers = [{len(batch.cu_seqlens_n) - 1 for batch in step.micro_batches} for step in steps]
    documents = [
        len(batch.cu_seqlens_n) - 1 for step in islice(whole.rank_batches(), 30) for batch in step.micro_batches
    ]
    assert len({document_capacity(number) for number in documents}) > 1, "micro-batches alone need different numbers"
    assert all(len(of_step) == 1 for of_step in numbers)
    for stream in ranks_of(whole, 2):
        own = replace(stream, pads_to_capacity=True).rank_batches()
        for step, of_step in zip(own, numbers, strict=False):
            assert {len(batch.cu_seqlens_n) - 1 for batch in step.micro_batches} == of_step


def test_a_micro_batch_has_fewer_than_512_empty_documents_and_few_document_counts():
    """The largest micro-batch is 262,144 tokens of single sentences of 16 tokens."""
    capacities = {documents: document_capacity(documents) for documents in range(1, 262_144 // 16)}
    assert all(0 <= capacity - documents < 512 for documents, capacity in capacities.items())
    assert len({capacities[documents] for documents in range(80, 202)}) == 2  # web pages: 128 and 256


def arithmetic_corpus() -> MemoryCorpus:
    """9,000 documents of 1 to 311 tokens, made without a random generator, which may change between versions."""
    corpus = MemoryCorpus(1 + np.arange(9000) * 7919 % 311)
    ids = np.arange(len(corpus.ids)) * 2654435761 % 997 + 3
    corpus.ids = np.maximum(ids, 4).astype(np.uint16)
    return corpus


def digest(stream: BatchStream) -> tuple[Cursor, str]:
    """Return the last cursor and the hash of every seventh of 420 steps, about three epochs."""
    content = hashlib.sha256()
    for step in islice(stream.rank_batches(), 0, 420, 7):
        content.update(repr(tuple(vars(step.cursor_after).values())).encode())
        for batch in step.micro_batches:
            for tensor in (batch.tokens_t, batch.labels_m, batch.masked_positions_m, batch.cu_seqlens_n):
                content.update(tensor.numpy().tobytes())
            content.update(f"{batch.max_seqlen} {batch.real_tokens}".encode())
    return step.cursor_after, content.hexdigest()


@pytest.mark.parametrize(
    ("long_documents", "masking", "cursor", "expected"),
    [
        ("truncate", PAPER, (3, 1, 1990), "18f86efb84b76cdfdaccbc28fd41bb859afdb713d461d1d7fc6e7a57cfc689a8"),
        ("truncate", BERT, (3, 1, 1990), "9fce1b0e35933a22554e028d667c698ae751caab58d2a1a608053d6af6b31abb"),
        ("chunk", PAPER, (2, 0, 4551), "84011ef8f60c86a9beaf265305362b81a7049dd5acef27a11f8ee087fe41fd5c"),
        ("chunk", BERT, (2, 0, 4551), "9e1abc29e3535f21d8b9f3239022e2b575403db3de93eae0087e7ef218b98a46"),
    ],
)
def test_batches_of_one_corpus_are_those_of_the_first_release(long_documents, masking, cursor, expected):
    """The checkpoints of releases resume with them."""
    sizes = {"seq_length": 128, "micro_batch_size": 4, "global_batch_size": 64}
    chosen = ChosenDocuments(bits_of((np.arange(9000) >= 100) & (np.arange(9000) < 8900)))
    sources = (Source(arithmetic_corpus(), chosen),)
    _, stream = ranks_of(stream_over(sources, long_documents=long_documents, **sizes, **masking), 2)
    assert IDS.special == (0, 1, 2, 3, 4)
    assert digest(stream) == (Cursor(*cursor), expected)
