"""What a rank holds of a micro-batch: its share under context parallelism, and lengths that do not change."""

import math
from itertools import islice

import numpy as np
import pytest
import torch
from unit.data.corpus.memory_corpus import MemoryCorpus, batch_settings, web_like_lengths

from megatron_neobert.data.batches.masking import MaskingScheme
from megatron_neobert.data.batches.rows import IGNORED_LABEL, fill_up, usual_documents, usual_masked
from megatron_neobert.data.batches.stream import BatchStream, PackedBatch, Source
from megatron_neobert.errors import ConfigError


@pytest.fixture(scope="module")
def corpus() -> MemoryCorpus:
    return MemoryCorpus(np.random.default_rng(5).integers(1, 121, 150))


def stream(corpus, *, rank=0, ranks=1, documents=None, **settings) -> BatchStream:
    sources = (Source(corpus, range(documents or len(corpus.lengths))),)
    return BatchStream(sources, batch_settings(**settings), context_parallel_rank=rank, context_parallel_size=ranks)


def micro_batches(stream: BatchStream, steps: int) -> list[PackedBatch]:
    return [batch for step in islice(stream.steps(), steps) for batch in step.micro_batches]


@pytest.mark.parametrize("layout", ["packed", "concatenated"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_shares_of_context_parallel_ranks_make_up_the_micro_batch(corpus, layout, ranks):
    whole = micro_batches(stream(corpus, batch_layout=layout), 30)
    shares = [micro_batches(stream(corpus, rank=r, ranks=ranks, batch_layout=layout), 30) for r in range(ranks)]
    size = 2 * 64 // ranks
    for batch, parts in zip(whole, zip(*shares, strict=True), strict=True):
        assert torch.cat([part.tokens_t for part in parts]).equal(batch.tokens_t)
        assert all(len(part.tokens_t) == size for part in parts)
        assert torch.cat([part.labels_m for part in parts]).equal(batch.labels_m)
        positions = [part.masked_positions_m + rank * size for rank, part in enumerate(parts)]
        assert torch.cat(positions).equal(batch.masked_positions_m)
        assert all(0 <= part.masked_positions_m.min() <= part.masked_positions_m.max() < size for part in parts)
        assert all(part.cu_seqlens_n.equal(batch.cu_seqlens_n) for part in parts)
        assert sum(part.real_tokens for part in parts) == batch.real_tokens


def test_slots_that_context_parallel_ranks_cannot_share_are_refused(corpus):
    with pytest.raises(ConfigError, match=r"--micro-batch-size 2 × --seq-length 64 = 128 tokens are not .*size 3"):
        stream(corpus, ranks=3)


@pytest.mark.parametrize("layout", ["packed", "concatenated"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_shapes_are_the_same_in_every_batch_and_what_fills_up_says_so(corpus, layout, ranks):
    settings = {"micro_batch_size": 4, "batch_layout": layout}
    varying = micro_batches(stream(corpus, ranks=ranks, **settings), 60)
    fixed = micro_batches(stream(corpus, ranks=ranks, fixed_shapes=True, **settings), 60)

    def shapes(batches: list[PackedBatch]) -> set[tuple[int, ...]]:
        return {(len(one.tokens_t), len(one.labels_m), len(one.cu_seqlens_n)) for one in batches}

    assert len(shapes(varying)) > 1
    assert len(shapes(fixed)) == 1
    for batch, filled in zip(varying, fixed, strict=True):
        masked, documents = len(batch.labels_m), len(batch.cu_seqlens_n)
        assert filled.tokens_t.equal(batch.tokens_t)
        assert filled.labels_m[:masked].equal(batch.labels_m)
        assert (filled.labels_m[masked:] == IGNORED_LABEL).all()
        assert filled.masked_positions_m[:masked].equal(batch.masked_positions_m)
        assert (filled.masked_positions_m[masked:] == 0).all()
        assert len(filled.masked_positions_m) == len(filled.labels_m)
        assert filled.cu_seqlens_n[:documents].equal(batch.cu_seqlens_n)
        assert (filled.cu_seqlens_n[documents:] == 4 * 64).all()
        assert filled.cu_seqlens_n.dtype == torch.int32


def test_exact_bounds_are_those_of_the_documents_and_their_longest_rounded_up():
    corpus = MemoryCorpus([60, 300, 20, 150])
    settings = {"seq_length": 512, "micro_batch_size": 1, "global_batch_size": 2}
    varying = micro_batches(stream(corpus, **settings), 20)
    exact = micro_batches(stream(corpus, fixed_shapes=True, exact_bounds=True, **settings), 20)
    for batch, one in zip(varying, exact, strict=True):
        assert one.cu_seqlens_n.equal(batch.cu_seqlens_n)
        longest = int(batch.cu_seqlens_n.diff().max())
        assert one.max_seqlen == math.ceil(longest / 128) * 128
    assert len({one.max_seqlen for one in exact}) > 1 and len({len(one.labels_m) for one in exact}) == 1


def test_more_documents_or_masks_than_usual_step_up_by_a_whole_multiple():
    values = np.arange(1, 131)
    assert [len(fill_up(values[:count], 64, 0)) for count in (0, 1, 64, 65, 128, 129)] == [64, 64, 64, 128, 128, 192]
    assert fill_up(values[:2], 4, -100).tolist() == [1, 2, -100, -100]


def test_room_for_masks_is_six_deviations_above_the_mean():
    """65,536 slots at 0.2: mean 13,107.2, deviation 102.4, sum 13,721.6, of which the next multiple of 128."""
    assert usual_masked(65_536, probability=0.2) == 13_824
    assert usual_masked(256, probability=1.0) == 256


@pytest.mark.parametrize("lengths", ["web", "sentences", "both"])
def test_room_for_documents_is_hardly_ever_exceeded_and_not_wasteful(lengths):
    """Of 300 micro-batches of 16 rows of 1,024 none exceeds it (gate 1 %), and it is below four times the mean."""
    generator = np.random.default_rng(0)
    sentences = np.maximum(1, generator.lognormal(np.log(13), 0.6, 40_000)).astype(np.int64)
    web = web_like_lengths(40_000)
    corpus = MemoryCorpus(
        {"web": web, "sentences": sentences, "both": np.where(generator.random(40_000) < 0.9, sentences, web)}[lengths]
    )
    settings = batch_settings(seq_length=1024, micro_batch_size=16, global_batch_size=16, masking=MaskingScheme())
    own = BatchStream((Source(corpus, range(40_000)),), settings)
    usual = usual_documents(own.sources, settings)
    documents = np.array([len(rows.segments) for rows, _ in islice(own.global_batches(), 300)])
    assert (documents > usual).mean() <= 0.01
    assert usual <= 4 * documents.mean() + 64
