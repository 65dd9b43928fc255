import re
from collections import Counter
from itertools import islice, pairwise

import numpy as np
import pytest
import torch
from unit.data.corpus.memory_corpus import IDS, MemoryCorpus, batch_settings

from megatron_neobert.data.batches.masking import MaskingScheme
from megatron_neobert.data.batches.stream import BatchStream, Cursor, PackedBatch, Source, StepBatches
from megatron_neobert.errors import CheckpointError, ConfigError, DataError

BERT = MaskingScheme(probability=0.15, mask_share=0.8, random_share=0.1, keep_share=0.1)


@pytest.fixture(autouse=True)
def windows_of_40_documents(monkeypatch):
    monkeypatch.setattr("megatron_neobert.data.batches.rows.WINDOW_DOCUMENTS", 40)


@pytest.fixture(scope="module")
def corpus() -> MemoryCorpus:
    """150 documents of 1 to 120 tokens: four windows an epoch, the last one smaller; half exceed a row of 64."""
    return MemoryCorpus(np.random.default_rng(5).integers(1, 121, 150))


def stream(corpus: MemoryCorpus, *, documents: range | None = None, cursor=Cursor(), rank=0, ranks=1, **settings):  # noqa: B008  frozen
    return BatchStream(
        (Source(corpus, range(len(corpus.lengths)) if documents is None else documents),),
        batch_settings(**settings),
        cursor=cursor,
        data_parallel_rank=rank,
        data_parallel_size=ranks,
    )


def first_steps(stream: BatchStream, count: int) -> list[StepBatches]:
    return list(islice(stream.steps(), count))


def as_bytes(batch: PackedBatch) -> tuple:
    return tuple(
        value.numpy().tobytes() if isinstance(value, torch.Tensor) else value for value in vars(batch).values()
    )


def documents_of(batch: PackedBatch) -> list[tuple[int, ...]]:
    """The original ids of each document of a batch, without its [CLS] and [SEP]."""
    original = batch.tokens_t.clone()
    original[batch.masked_positions_m] = batch.labels_m
    bounds = [bound for bound in batch.cu_seqlens_n.tolist() if bound <= batch.real_tokens]
    pieces = [original[start:stop].tolist() for start, stop in pairwise(bounds)]
    assert all(piece[0] == IDS.cls and piece[-1] == IDS.sep for piece in pieces)
    return [tuple(piece[1:-1]) for piece in pieces]


def one_epoch(stream: BatchStream) -> tuple[list[StepBatches], int]:
    """The steps that hold epoch 0, and the rows of the epoch. Steps of one row, so the epoch ends with a step."""
    steps = []
    for step in stream.steps():
        steps.append(step)
        if step.cursor_after.epoch:
            return steps, len(steps)
    raise AssertionError("the stream ended")


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("masking", [MaskingScheme(), BERT])
def test_global_batches_do_not_depend_on_the_number_of_ranks(corpus, ranks, masking):
    alone = first_steps(stream(corpus, masking=masking), 60)
    shared = [first_steps(stream(corpus, rank=rank, ranks=ranks, masking=masking), 60) for rank in range(ranks)]
    assert alone[-1].cursor_after.epoch >= 2
    for step, of_ranks in zip(alone, zip(*shared, strict=True), strict=True):
        assert {one.cursor_after for one in of_ranks} == {step.cursor_after}
        assert [as_bytes(step.micro_batches[j]) for j in range(4)] == [
            as_bytes(of_ranks[j % ranks].micro_batches[j // ranks]) for j in range(4)
        ]


def test_micro_batch_size_changes_neither_rows_nor_masks_of_a_global_batch(corpus):
    def documents_and_masks(step: StepBatches) -> Counter:
        found = Counter()
        for batch in step.micro_batches:
            is_masked = torch.zeros_like(batch.tokens_t)
            is_masked[batch.masked_positions_m] = 1
            bounds = [bound for bound in batch.cu_seqlens_n.tolist() if bound <= batch.real_tokens]
            for start, stop in pairwise(bounds):
                found[tuple(batch.tokens_t[start:stop].tolist() + is_masked[start:stop].tolist())] += 1
        return found

    steps = [first_steps(stream(corpus, micro_batch_size=size, masking=BERT), 30) for size in (1, 2, 8)]
    for by_one, by_two, by_eight in zip(*steps, strict=True):
        assert documents_and_masks(by_one) == documents_and_masks(by_two) == documents_and_masks(by_eight)
        assert by_one.cursor_after == by_two.cursor_after == by_eight.cursor_after


def test_resuming_from_any_step_gives_the_batches_of_an_uninterrupted_run(corpus):
    uninterrupted = first_steps(stream(corpus), 40)
    assert uninterrupted[-1].cursor_after.epoch >= 1
    for stopped_after in range(1, 37):
        cursor = uninterrupted[stopped_after - 1].cursor_after
        for resumed, expected in zip(
            first_steps(stream(corpus, cursor=cursor), 3), uninterrupted[stopped_after:], strict=False
        ):
            assert resumed.cursor_after == expected.cursor_after
            assert [as_bytes(batch) for batch in resumed.micro_batches] == [
                as_bytes(batch) for batch in expected.micro_batches
            ]


@pytest.mark.parametrize("long_documents", ["truncate", "chunk"])
def test_every_document_occurs_exactly_once_per_epoch(corpus, long_documents):
    epoch, _ = one_epoch(stream(corpus, micro_batch_size=1, global_batch_size=1, long_documents=long_documents))
    found = Counter(piece for step in epoch for batch in step.micro_batches for piece in documents_of(batch))
    starts = {"truncate": lambda length: [0], "chunk": lambda length: range(0, length, 62)}[long_documents]
    expected = Counter(
        tuple(corpus.document(number)[start : start + 62].tolist())
        for number, length in enumerate(corpus.lengths)
        for start in starts(length)
    )
    assert found == expected


def test_epochs_have_other_orders_and_other_masks(corpus):
    rows = one_epoch(stream(corpus, micro_batch_size=1, global_batch_size=1))[1]
    steps = first_steps(stream(corpus, micro_batch_size=1, global_batch_size=1), 2 * rows - 5)

    def masks(part: list[StepBatches]) -> dict[tuple[int, ...], list[int]]:
        found = {}
        for step in part:
            batch = step.micro_batches[0]
            is_masked = torch.zeros_like(batch.tokens_t).index_fill_(0, batch.masked_positions_m, 1)
            for piece, start in zip(documents_of(batch), batch.cu_seqlens_n.tolist(), strict=False):
                if len(piece) == 62:
                    found[piece] = is_masked[start + 1 : start + 63].tolist()
        return found

    first, second = masks(steps[:rows]), masks(steps[rows:])
    in_both = [piece for piece in second if piece in first]
    assert len(in_both) > 50
    assert list(first)[:50] != list(second)[:50]
    assert not any(first[piece] == second[piece] for piece in in_both)


@pytest.mark.parametrize("masking", [MaskingScheme(), BERT])
def test_a_packed_batch_keeps_its_promises(corpus, masking):
    specials = torch.tensor(IDS.special)
    for step in first_steps(stream(corpus, micro_batch_size=4, masking=masking), 30):
        for batch in step.micro_batches:
            bounds = batch.cu_seqlens_n
            assert (batch.tokens_t.dtype, bounds.dtype) == (torch.int64, torch.int32)
            assert (batch.labels_m.dtype, batch.masked_positions_m.dtype) == (torch.int64, torch.int64)
            assert batch.tokens_t.shape == (4 * 64,)
            # The unused tail is a document too, so that no kernel meets padding between documents, where blockwise
            # FP8 attention is reported to crash on H100; see also tests/unit/model/test_transformer_engine_layers.py.
            assert (bounds[0], bounds[-1], batch.max_seqlen) == (0, 4 * 64, 64)
            assert 1 <= bounds.diff().min() <= bounds.diff().max() <= 64
            assert batch.real_tokens in bounds
            assert (batch.tokens_t[batch.real_tokens :] == IDS.pad).all()
            assert (batch.masked_positions_m < batch.real_tokens).all()
            assert not torch.isin(batch.labels_m, specials).any()
            starts = bounds[bounds < batch.real_tokens]
            assert (batch.tokens_t[starts] == IDS.cls).all()
            assert not torch.isin(batch.masked_positions_m, starts).any()


def test_a_corpus_smaller_than_a_row_still_fills_batches_with_one_document_per_row():
    corpus = MemoryCorpus([5])
    step = first_steps(stream(corpus), 1)[0]
    for batch in step.micro_batches:
        assert documents_of(batch) == [tuple(corpus.document(0).tolist())] * 2
        # Two documents of 7 tokens, and 128 - 14 unused slots in dummy documents of at most 64.
        assert batch.cu_seqlens_n.tolist() == [0, 7, 14, 78, 128]
        assert batch.real_tokens == 14
    assert step.real_tokens == 4 * 14
    assert step.cursor_after == Cursor(epoch=8)


def test_the_cursor_behind_the_last_row_of_a_window_names_the_next_window():
    corpus = MemoryCorpus([62] * 100)  # 40, 40, 20 rows
    steps = first_steps(stream(corpus, global_batch_size=20), 5)
    assert [step.cursor_after for step in steps] == [
        Cursor(0, 0, 20),
        Cursor(0, 1, 0),
        Cursor(0, 1, 20),
        Cursor(0, 2, 0),
        Cursor(1, 0, 0),
    ]


def test_no_documents_are_refused(corpus):
    with pytest.raises(DataError, match="documents 150 to 150 of the corpus are none"):
        stream(corpus, documents=range(150, 150))


def test_a_global_batch_that_ranks_cannot_share_evenly_is_refused(corpus):
    message = re.escape("--global-batch-size 8 is not a multiple of --micro-batch-size 2 × 3 data-parallel ranks = 6")
    with pytest.raises(ConfigError, match=message):
        stream(corpus, ranks=3)


def test_a_cursor_of_another_corpus_is_refused(corpus):
    with pytest.raises(CheckpointError, match="at window 4 of an epoch, but 150 documents fill 4 windows"):
        stream(corpus, cursor=Cursor(0, 4, 0))
    with pytest.raises(CheckpointError, match=r"at row 500 of window 1, which has \d+ rows"):
        first_steps(stream(corpus, cursor=Cursor(0, 1, 500)), 1)
