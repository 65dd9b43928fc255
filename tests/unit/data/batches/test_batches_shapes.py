"""What a rank holds of a micro-batch: its share under context parallelism, and lengths that do not change."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
from unit.data.corpus.memory_corpus import MemoryCorpus, micro_batches, stream_of, web_like_lengths

from megatron_neobert.data.batches.rows import IGNORED_LABEL, fill_up, usual_documents, usual_masked
from megatron_neobert.data.batches.stream import PackedBatch


@pytest.mark.parametrize("layout", ["packed", "concatenated"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_shares_of_context_parallel_ranks_make_up_the_micro_batch(corpus, layout, ranks):
    whole = stream_of(corpus, batch_layout=layout)
    streams = [replace(whole, context_parallel_rank=rank, context_parallel_size=ranks) for rank in range(ranks)]
    size = 2 * 64 // ranks
    for batch, *parts in zip(*(micro_batches(one, 30) for one in (whole, *streams)), strict=True):
        assert torch.cat([part.tokens_t for part in parts]).equal(batch.tokens_t)
        assert all(len(part.tokens_t) == size for part in parts)
        assert torch.cat([part.labels_m for part in parts]).equal(batch.labels_m)
        positions = [part.masked_positions_m + rank * size for rank, part in enumerate(parts)]
        assert torch.cat(positions).equal(batch.masked_positions_m)
        assert all(0 <= part.masked_positions_m.min() <= part.masked_positions_m.max() < size for part in parts)
        assert all(part.cu_seqlens_n.equal(batch.cu_seqlens_n) for part in parts)
        assert sum(part.real_tokens for part in parts) == batch.real_tokens


@pytest.mark.parametrize("layout", ["packed", "concatenated"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_shapes_are_the_same_in_every_batch_and_what_fills_up_says_so(corpus, layout, ranks):
    stream = replace(stream_of(corpus, micro_batch_size=4, batch_layout=layout), context_parallel_size=ranks)
    varying = list(micro_batches(stream, 60))
    fixed = list(micro_batches(replace(stream, settings=replace(stream.settings, fixed_shapes=True)), 60))

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
    own = stream_of(corpus, seq_length=1024, micro_batch_size=16, global_batch_size=16)
    usual = usual_documents(own.sources, own.settings)
    documents = np.array([len(rows.segments) for rows, _ in islice(own.global_batches(), 300)])
    assert (documents > usual).mean() <= 0.01
    assert usual <= 4 * documents.mean() + 64
