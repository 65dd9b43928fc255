"""Several sources in fixed proportions of rows, each through its own epochs."""

import json
from collections import Counter
from dataclasses import asdict, replace
from itertools import islice, pairwise

import numpy as np
import pytest
import torch
from memory_corpus import MemoryCorpus, batch_settings

from megatron_neobert.data.batches import BatchStream, Cursor, Source
from megatron_neobert.data.blend import BlendCursor, read_cursor, take_turns
from megatron_neobert.data.masking import MaskingScheme
from megatron_neobert.data.order import COMPONENT_SHIFT
from megatron_neobert.data.rows import pack_window
from megatron_neobert.data.selection import KeptDocuments
from megatron_neobert.errors import CheckpointError, DataError

WEIGHTS = (1, 2, 2)
NUMBER = (1 << COMPONENT_SHIFT) - 1  # the bits of a document's number inside its corpus


@pytest.fixture(autouse=True)
def windows_of_40_documents(monkeypatch):
    monkeypatch.setattr("megatron_neobert.data.rows.WINDOW_DOCUMENTS", 40)


@pytest.fixture(scope="module")
def corpora() -> tuple[MemoryCorpus, ...]:
    return tuple(MemoryCorpus(np.random.default_rng(n).integers(1, 121, 90 + 30 * n), seed=n) for n in range(3))


def blend(corpora, *, cursor=Cursor(), rank=0, ranks=1, weights=WEIGHTS, **settings) -> BatchStream:  # noqa: B008  frozen
    sources = tuple(
        Source(corpus, range(len(corpus.lengths)), weight) for corpus, weight in zip(corpora, weights, strict=True)
    )
    return BatchStream(
        sources, batch_settings(**settings), cursor=cursor, data_parallel_rank=rank, data_parallel_size=ranks
    )


def sources_of_rows(stream: BatchStream, batches: int) -> list[int]:
    """The source of each row; a row has documents of one source alone."""
    found = []
    for rows, _ in islice(stream.global_batches(), batches):
        for row in range(len(rows)):
            (source,) = set((rows.take(row, row + 1).segments.documents_n >> COMPONENT_SHIFT).tolist())
            found.append(source)
    return found


def contents(steps) -> list:
    return [
        (
            step.cursor_after,
            [
                value.numpy().tobytes() if isinstance(value, torch.Tensor) else value
                for batch in step.micro_batches
                for value in vars(batch).values()
            ],
        )
        for step in steps
    ]


# --- whose turn it is ---


@pytest.mark.parametrize("weights", [(1,), (1, 1), (1, 2, 2), (3, 7), (1, 999), (5, 3, 2, 90), (333, 667), (17,) * 9])
def test_rows_are_exact_after_every_period_and_never_a_row_ahead_between(weights):
    period = sum(weights)
    turns, rows = take_turns(weights, (0,) * len(weights), 3 * period)
    assert rows == (0,) * len(weights)
    given = np.cumsum(turns[:, None] == np.arange(len(weights)), axis=0)
    shares = np.outer(np.arange(1, 3 * period + 1), weights) / period
    assert (given - shares).max() < 1
    assert (given[period - 1 :: period] == np.outer([1, 2, 3], weights)).all()


def test_turns_taken_in_pieces_are_the_turns_taken_at_once():
    weights = (333, 667, 5)
    whole, _ = take_turns(weights, (0, 0, 0), 3000)
    rows, pieces = (0, 0, 0), []
    while sum(map(len, pieces)) < 3000:
        piece, rows = take_turns(weights, rows, 250)
        assert max(rows) < sum(weights)
        pieces.append(piece)
    assert np.concatenate(pieces).tolist() == whole.tolist()


def test_random_turns_would_not_be_exact():
    """Negative control of the gate above: draws with the right probabilities run ahead by more than a row."""
    turns = np.random.default_rng(0).choice(3, 3000, p=[0.2, 0.4, 0.4])
    given = np.cumsum(turns[:, None] == np.arange(3), axis=0)
    assert (given - np.outer(np.arange(1, 3001), [0.2, 0.4, 0.4])).max() > 1


# --- rows and batches ---


def test_every_global_batch_holds_the_shares_exactly_where_they_are_whole(corpora):
    found = sources_of_rows(blend(corpora, global_batch_size=10), 60)
    for first in range(0, 600, 10):
        assert Counter(found[first : first + 10]) == {0: 2, 1: 4, 2: 4}


def test_rows_of_one_source_are_those_that_it_gives_alone_but_for_its_number(corpora):
    """Packing depends on lengths alone, which the number of the component leaves as they are; its order differs."""
    alone = blend(corpora[:1], weights=(1,), global_batch_size=10)
    blended = blend(corpora, global_batch_size=50)
    expected = next(alone.global_batches())[0].segments
    found = next(blended.global_batches())[0].segments
    own = found[(found.documents_n >> COMPONENT_SHIFT) == 0]
    for name, values in vars(own).items():
        assert np.array_equal(values, vars(expected)[name]), name


def test_every_source_walks_its_own_epochs_and_each_holds_every_document_once(corpora):
    stream = blend(corpora, global_batch_size=5, micro_batch_size=1)
    seen: list[Counter] = [Counter(), Counter(), Counter()]
    batches = list(islice(stream.global_batches(), 120))
    cursor = batches[-1][1]
    for rows, _ in batches:
        segments = rows.segments
        for number, epoch in zip(segments.documents_n.tolist(), segments.epochs_n.tolist(), strict=True):
            seen[number >> COMPONENT_SHIFT][epoch, number & NUMBER] += 1
    assert len({source.epoch for source in cursor.sources}) > 1
    for corpus, documents, source in zip(corpora, seen, cursor.sources, strict=True):
        assert source.epoch >= 1
        for epoch in range(source.epoch):
            assert {number for own, number in documents if own == epoch} == set(range(len(corpus.lengths)))
        assert set(documents.values()) == {1}


def test_text_of_every_document_comes_from_its_own_corpus(corpora):
    texts = [
        {tuple(corpus.document(number)[:62].tolist()) for number in range(len(corpus.lengths))} for corpus in corpora
    ]
    stream = blend(corpora, micro_batch_size=1, global_batch_size=1)
    turns = sources_of_rows(stream, 40)
    for turn, step in zip(turns, stream.steps(), strict=False):
        (batch,) = step.micro_batches
        original = batch.tokens_t.clone()
        original[batch.masked_positions_m] = batch.labels_m
        bounds = [bound for bound in batch.cu_seqlens_n.tolist() if bound <= batch.real_tokens]
        for start, stop in pairwise(bounds):
            assert tuple(original[start + 1 : stop - 1].tolist()) in texts[turn]


def masks_of_whole_documents(stream: BatchStream, batches: int) -> dict[tuple[int, int], set[tuple[int, ...]]]:
    """(component, document) -> which of its tokens are masked in epoch 0, for documents that fill a row."""
    found: dict[tuple[int, int], set[tuple[int, ...]]] = {}
    for (rows, _), step in islice(zip(stream.global_batches(), stream.steps(), strict=False), batches):
        segments = rows.segments
        (batch,) = step.micro_batches
        masked = set(batch.masked_positions_m.tolist())
        for at, start in zip(range(len(segments)), batch.cu_seqlens_n.tolist(), strict=False):
            if segments.lengths_n[at] == 62 and segments.epochs_n[at] == 0:
                number = int(segments.documents_n[at])
                key = number >> COMPONENT_SHIFT, number & NUMBER
                found.setdefault(key, set()).add(tuple(i for i in range(62) if start + 1 + i in masked))
    return found


def test_a_document_of_two_components_is_masked_differently_in_each(corpora):
    corpus = corpora[2]
    found = masks_of_whole_documents(
        blend((corpus, corpus), weights=(1, 1), micro_batch_size=8, global_batch_size=8), 30
    )
    twice = [number for component, number in found if component == 0 and (1, number) in found]
    assert len(twice) > 40
    assert not any(found[0, number] & found[1, number] for number in twice)


def test_components_have_orders_of_their_own(corpora):
    """Two windows of 40 out of 150 documents share 40 * 40 / 150 = 11 on average."""
    source = Source(corpora[2], range(150))
    first, second = (
        set(
            (
                pack_window(source, batch_settings(), epoch=0, window=0, component=part).segments.documents_n & NUMBER
            ).tolist()
        )
        for part in (0, 1)
    )
    assert len(first) == len(second) == 40
    assert len(first & second) < 25


def test_batches_of_a_blend_do_not_depend_on_the_number_of_ranks(corpora):
    alone = list(islice(blend(corpora).steps(), 40))
    shared = [list(islice(blend(corpora, rank=rank, ranks=2).steps(), 40)) for rank in range(2)]
    for step, of_ranks in zip(alone, zip(*shared, strict=True), strict=True):
        assert {one.cursor_after for one in of_ranks} == {step.cursor_after}
        merged = [of_ranks[j % 2].micro_batches[j // 2] for j in range(4)]
        assert contents([step]) == contents([replace(step, micro_batches=merged)])


def test_a_blend_resumed_at_any_step_gives_the_batches_of_an_uninterrupted_run(corpora):
    uninterrupted = list(islice(blend(corpora).steps(), 60))
    assert min(source.epoch for source in uninterrupted[-1].cursor_after.sources) >= 1
    for stopped_after in range(1, 57, 5):
        record = json.loads(json.dumps(asdict(uninterrupted[stopped_after - 1].cursor_after)))
        resumed = blend(corpora, cursor=read_cursor(record))
        assert contents(islice(resumed.steps(), 3)) == contents(uninterrupted[stopped_after : stopped_after + 3])


def test_a_blend_of_one_part_of_a_corpus_by_length_has_only_such_documents(corpora):
    corpus = corpora[2]
    kept = KeptDocuments(corpus, range(20, 150), minimum=40, maximum=80)
    everything = Source(corpus, range(20, 150), 1)
    stream = BatchStream((everything, Source(corpus, kept, 3)), batch_settings(global_batch_size=8))
    numbers = np.concatenate([rows.segments.documents_n for rows, _ in islice(stream.global_batches(), 30)])
    filtered = numbers[numbers >> COMPONENT_SHIFT == 1] & NUMBER
    assert set(filtered.tolist()) == {n for n in range(20, 150) if 40 <= corpus.lengths[n] <= 80}
    assert not set(numbers[numbers >> COMPONENT_SHIFT == 0].tolist()) <= set(filtered.tolist())


# --- cursors ---


def test_the_record_of_a_cursor_of_one_source_is_the_one_of_earlier_versions(corpora):
    step = next(blend(corpora[:1], weights=(1,)).steps())
    assert asdict(step.cursor_after) == {"epoch": 0, "window": 0, "row": 8}
    assert read_cursor({"epoch": 0, "window": 0, "row": 8}) == step.cursor_after


def test_a_cursor_of_another_number_of_corpora_is_refused(corpora):
    three = next(blend(corpora).steps()).cursor_after
    with pytest.raises(CheckpointError, match="in a blend of 3 corpora, but --data-path names 2"):
        blend(corpora[:2], weights=(1, 1), cursor=three)
    with pytest.raises(CheckpointError, match="in a blend of 1 corpora, but --data-path names 3"):
        blend(corpora, cursor=Cursor(0, 0, 8))
    outside = BlendCursor((Cursor(), Cursor(), Cursor(0, 99, 0)), (0, 0, 0))
    with pytest.raises(CheckpointError, match="at window 99 of an epoch, but 150 documents fill 4 windows"):
        blend(corpora, cursor=outside)


def test_a_source_without_documents_is_refused(corpora):
    kept = KeptDocuments(corpora[0], range(90), minimum=500, maximum=None)
    with pytest.raises(DataError, match="are none; batches need at least one document"):
        BatchStream((Source(corpora[0], range(90)), Source(corpora[0], kept)), batch_settings())


def test_masking_of_random_replacements_differs_between_components_too(corpora):
    bert = MaskingScheme(probability=1.0, mask_share=0.0, random_share=1.0)
    corpus = MemoryCorpus([62] * 8)
    stream = blend((corpus, corpus), weights=(1, 1), masking=bert, micro_batch_size=16, global_batch_size=16)
    rows, _ = next(stream.global_batches())
    (batch,) = next(stream.steps()).micro_batches
    seen = batch.tokens_t.reshape(16, 64)[:, 1:-1]
    numbers = rows.segments.documents_n & NUMBER
    for number in range(8):
        one, other = np.flatnonzero(numbers == number)
        assert (seen[one] == seen[other]).float().mean() < 0.2  # equal by chance in 1 of 995
