import json
from collections import Counter
from dataclasses import asdict, replace
from itertools import groupby, islice, pairwise
from operator import itemgetter

import numpy as np
import pytest
import torch
from unit.data.corpus.memory_corpus import (
    BERT,
    IDS,
    PAPER,
    MemoryCorpus,
    contents,
    first_epoch,
    micro_batches,
    original_ids,
    ranks_of,
    stream_of,
    stream_over,
    whole,
)

from megatron_neobert.data.batches.batch import MicroBatch
from megatron_neobert.data.batches.packing import Documents, concatenate_documents
from megatron_neobert.data.batches.windows import Cursor, Source
from megatron_neobert.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("windows_of_40_documents")


def documents_of(batch: MicroBatch) -> list[tuple[tuple[int, ...], ...]]:
    """Return the original ids, the masked ids and the masks of each segment, without its [CLS] and [SEP]."""
    masked = torch.zeros_like(batch.tokens_t).index_fill_(0, batch.masked_positions_m, 1)
    columns = (original_ids(batch), batch.tokens_t.tolist(), masked.tolist())
    bounds = [bound for bound in batch.cu_seqlens_n.tolist() if bound <= batch.real_tokens]
    assert all((columns[0][start], columns[0][stop - 1]) == (IDS.cls, IDS.sep) for start, stop in pairwise(bounds))
    return [tuple(tuple(column[start + 1 : stop - 1]) for column in columns) for start, stop in pairwise(bounds)]


@pytest.fixture(params=["one corpus", "blend"])
def sources(request, corpus, corpora) -> tuple[Source, ...]:
    return (whole(corpus),) if request.param == "one corpus" else tuple(map(whole, corpora, (1, 2, 2)))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("masking", [PAPER, BERT])
def test_global_batches_do_not_depend_on_the_number_of_ranks(sources, ranks, masking):
    stream = stream_over(sources, **masking)
    streams = ranks_of(stream, ranks)
    steps = list(islice(stream.rank_batches(), 60))
    assert len({(step.cursor_after.epoch, step.cursor_after.window) for step in steps}) > 8
    for step, *steps_of_ranks in zip(steps, *(rank.rank_batches() for rank in streams), strict=False):
        assert {rank.cursor_after for rank in steps_of_ranks} == {step.cursor_after}
        merged = [steps_of_ranks[j % ranks].micro_batches[j // ranks] for j in range(4)]
        assert contents([replace(step, micro_batches=merged)]) == contents([step])


def test_micro_batch_size_does_not_change_the_documents_and_masks_of_a_global_batch(corpus):
    steps = [stream_of(corpus, micro_batch_size=size, **BERT).rank_batches() for size in (1, 2, 8)]
    for steps_of_sizes in islice(zip(*steps, strict=True), 30):
        size_1, size_2, size_8 = (
            Counter(d for b in step.micro_batches for d in documents_of(b)) for step in steps_of_sizes
        )
        assert size_1 == size_2 == size_8
        assert len({step.cursor_after for step in steps_of_sizes}) == 1


def test_resuming_from_any_step_gives_the_batches_of_an_uninterrupted_run(sources):
    stream = stream_over(sources)
    uninterrupted = list(islice(stream.rank_batches(), 40))
    expected = contents(uninterrupted)
    assert len({(step.cursor_after.epoch, step.cursor_after.window) for step in uninterrupted}) > 4
    for stopped_after in range(1, 38):
        record = json.loads(json.dumps(asdict(uninterrupted[stopped_after - 1].cursor_after)))
        resumed = replace(stream, cursor=Cursor(**record))
        assert contents(islice(resumed.rank_batches(), 3)) == expected[stopped_after : stopped_after + 3]


@pytest.mark.parametrize("long_documents", ["truncate", "chunk"])
def test_every_document_occurs_exactly_once_per_epoch(corpus, long_documents):
    epoch = first_epoch(corpus, long_documents=long_documents)
    actual = Counter(ids for batch in epoch for ids, *_ in documents_of(batch))
    starts = {"truncate": lambda length: [0], "chunk": lambda length: range(0, length, 62)}[long_documents]
    expected = Counter(
        tuple(corpus.document(number)[start : start + 62].tolist())
        for number, length in enumerate(corpus.lengths)
        for start in starts(length)
    )
    assert actual == expected


CONCATENATED = {"batch_layout": "concatenated", "long_documents": "chunk"}


@pytest.mark.parametrize("settings", [PAPER, BERT, CONCATENATED], ids=["paper", "bert", "concatenated"])
def test_a_batch_has_documents_then_padding_in_dummies_and_masks_no_special_token(corpus, settings):
    """For attention, a concatenated sequence is one document."""
    for batch in micro_batches(stream_of(corpus, micro_batch_size=4, **settings), 40):
        bounds = batch.cu_seqlens_n
        assert (batch.tokens_t.dtype, bounds.dtype) == (torch.int64, torch.int32)
        assert (batch.labels_m.dtype, batch.masked_positions_m.dtype) == (torch.int64, torch.int64)
        assert batch.tokens_t.shape == (4 * 64,)
        # Padding is a document too: blockwise FP8 attention is reported to crash on H100 with padding between
        # documents; see also tests/unit/model/test_transformer_engine_layers.py.
        assert (bounds[0], bounds[-1], batch.max_seqlen) == (0, 4 * 64, 64)
        assert 1 <= bounds.diff().min() <= bounds.diff().max() <= 64
        assert batch.real_tokens in bounds
        assert (batch.tokens_t[batch.real_tokens :] == IDS.pad).all()
        assert (batch.masked_positions_m < batch.real_tokens).all()
        assert not torch.isin(batch.labels_m, torch.tensor(IDS.special)).any()
        if settings is CONCATENATED:
            assert batch.real_tokens == bounds[4]  # after four packed sequences, only padding follows
            assert len(bounds) == 5 + (batch.real_tokens < 256)
        else:
            assert (batch.tokens_t[bounds[bounds < batch.real_tokens]] == IDS.cls).all()


@pytest.mark.parametrize("layout", ["packed", "concatenated"])
def test_clm_predicts_every_next_token_of_a_document_and_changes_no_token(corpus, layout):
    """In the concatenated layout, a whole packed sequence is one document for attention."""
    settings = {"batch_layout": layout, "micro_batch_size": 4, "long_documents": "chunk"}
    as_mlm, as_clm = (stream_of(corpus, objective=objective, **settings) for objective in ("mlm", "clm"))
    for masked, batch in zip(micro_batches(as_mlm, 10), micro_batches(as_clm, 10), strict=True):
        tokens = batch.tokens_t.tolist()
        assert tokens[: batch.real_tokens] == original_ids(masked)
        assert torch.equal(batch.cu_seqlens_n, masked.cu_seqlens_n)
        assert (masked.is_causal, batch.is_causal) == (False, True)
        documents = [(start, end) for start, end in pairwise(batch.cu_seqlens_n.tolist()) if end <= batch.real_tokens]
        pairs = [(place, tokens[place + 1]) for start, end in documents for place in range(start, end - 1)]
        assert list(zip(batch.masked_positions_m.tolist(), batch.labels_m.tolist(), strict=True)) == pairs


def test_a_corpus_of_one_short_document_fills_batches_with_one_document_per_packed_sequence():
    corpus = MemoryCorpus([5])
    step = next(stream_of(corpus).rank_batches())
    for batch in step.micro_batches:
        assert [ids for ids, *_ in documents_of(batch)] == [tuple(corpus.document(0).tolist())] * 2
        # Two documents of 7 tokens, and 128 - 14 tokens of padding in dummy documents of at most 64.
        assert batch.cu_seqlens_n.tolist() == [0, 7, 14, 78, 128]
        assert batch.real_tokens == 14
    assert step.real_tokens == 4 * 14
    assert step.cursor_after == Cursor(epoch=8)


def test_the_cursor_after_the_last_packed_sequence_of_a_window_is_the_start_of_the_next_window():
    corpus = MemoryCorpus([62] * 100)  # windows of 40, 40 and 20 packed sequences
    cursors = [step.cursor_after for step in islice(stream_of(corpus, global_batch_size=20).rank_batches(), 5)]
    assert cursors == [Cursor(0, 0, 20), Cursor(0, 1, 0), Cursor(0, 1, 20), Cursor(0, 2, 0), Cursor(1, 0, 0)]


@pytest.mark.parametrize("cursor", [Cursor(0, 4, 0), Cursor(0, 1, 500)])
def test_a_cursor_of_another_corpus_is_refused(corpus, cursor):
    message = f"at packed sequence {cursor.sequence} of window {cursor.window}, which these documents do not have"
    with pytest.raises(CheckpointError, match=message):
        next(replace(stream_of(corpus), cursor=cursor).rank_batches())


def test_this_ranks_documents_are_prefetched_four_steps_ahead_and_batches_do_not_change(corpus):
    corpus.is_remote = True
    _, stream = ranks_of(stream_of(corpus, document_block_size=10), 2)
    batches = list(islice(stream.global_batches(), 34))
    for number, (step, batch) in enumerate(zip(stream.rank_batches(), batches[:30], strict=False)):
        # The first step prefetches five global batches, later steps one. This rank has micro-batches 1 and 3.
        prefetched = batches[:5] if number == 0 else [batches[number + 4]]
        taken = [ahead.packed.take(first, first + 2) for ahead in prefetched for first in (2, 6)]
        expected = [packed.segments.documents_n for packed in taken]
        assert np.concatenate(corpus.prefetched).tolist() == np.concatenate(expected).tolist()
        assert contents([step]) == contents([batch.for_rank(stream.rank)])
        corpus.prefetched.clear()


@pytest.mark.parametrize("long_documents", ["truncate", "chunk"])
def test_a_concatenated_window_has_every_document_once_between_one_cls_and_one_sep(corpus, long_documents):
    numbers = np.random.default_rng(0).permutation(150)
    documents = Documents(numbers, corpus.lengths[numbers], epochs_n=np.full(150, 3))
    packed = concatenate_documents(documents, seq_length=64, long_documents=long_documents)
    segments = packed.segments
    stops_n = segments.starts_n + segments.lengths_n
    columns = (segments.documents_n, segments.starts_n, stops_n, segments.has_sep_n, segments.has_cls_n)
    rows = sorted(zip(*(column.tolist() for column in columns), strict=True))
    documents = [list(zip(*ranges, strict=True)) for _, ranges in groupby(rows, key=itemgetter(0))]
    assert [numbers[0] for numbers, *_ in documents] == list(range(150))
    for (number, *later), starts, stops, sep, cls in documents:
        length = min(62, corpus.lengths[number]) if long_documents == "truncate" else corpus.lengths[number]
        assert cls == (True, *[False] * len(later))
        assert sep == (*[False] * len(later), True)
        assert starts == (0, *stops[:-1]) and stops[-1] == length
    assert set(segments.epochs_n.tolist()) == {3}
    sizes = np.add.reduceat(segments.packed_lengths_n, packed.offsets[:-1])
    assert sorted(sizes.tolist())[1:] == [64] * (len(packed) - 1)
    assert len(packed) == -(-int(segments.packed_lengths_n.sum()) // 64)
