"""What a rank holds of a micro-batch: its share under context parallelism, and lengths that do not change."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from unit.data.corpus.memory_corpus import micro_batches, stream_of

from megatron_neobert.data.batches.rows import IGNORED_LABEL, fill_up
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
