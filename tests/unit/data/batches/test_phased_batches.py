"""Batches of a run with phases: they depend only on settings, iteration and cursor, also where a phase begins."""

from dataclasses import replace
from itertools import chain, islice
from typing import Any

import pytest
from tests_tiny import tiny_settings
from unit.data.corpus.memory_corpus import contents

from megatron_neobert.config.schema import PhaseChange, Settings
from megatron_neobert.data.batches.batch import BatchStream, build_stream
from megatron_neobert.data.batches.corpora import open_phases
from megatron_neobert.data.batches.windows import Cursor

ITERATIONS = 12

pytestmark = pytest.mark.usefixtures("windows_of_40_documents")


def settings_of(corpus: Any, *phases: PhaseChange, **data: Any) -> Settings:
    sizes = {"micro_batch_size": 2, "global_batch_size": 4}
    return tiny_settings(corpus, data={"seq_length": 64, **data}, training={**sizes, "phases": phases})


def stream_of(settings: Settings) -> BatchStream:
    return build_stream(settings, open_phases(settings))


def blend(corpus: Any) -> tuple[str, ...]:
    """Return the --data-path of the corpus and its longer documents."""
    return ("1", corpus.prefix, "3", f"{corpus.prefix}:min=20")


def documents_of(stream: BatchStream, count: int) -> list[list[tuple[int, int]]]:
    """Return epoch and number of the documents of each iteration."""
    return [
        list(zip(batch.packed.segments.epochs_n.tolist(), batch.packed.segments.numbers_n.tolist(), strict=True))
        for batch in islice(stream.global_batches(), count)
    ]


def test_a_run_that_resumes_at_any_iteration_has_the_batches_of_an_uninterrupted_run(tiny_corpus):
    """Also between phases; iteration and cursor suffice."""
    phases = (
        PhaseChange(after_iters=2, mask_prob=0.1, mask_replacement="bert"),
        PhaseChange(after_iters=4, objective="clm", global_batch_size=8),
        PhaseChange(after_iters=6, seq_length=128, micro_batch_size=1),
        PhaseChange(after_iters=9, data_path=blend(tiny_corpus), mask_prob=0.05),
    )
    stream = stream_of(settings_of(tiny_corpus, *phases))
    whole = list(islice(stream.rank_batches(), ITERATIONS))
    sizes = [(len(step.micro_batches), len(step.micro_batches[0].tokens_t)) for step in whole]
    assert sizes == [(2, 128)] * 4 + [(4, 128)] * 2 + [(8, 128)] * 6
    expected = contents(whole)
    for done in range(1, ITERATIONS):
        resumed = replace(stream, iteration=done, cursor=whole[done - 1].cursor_after)
        assert contents(islice(resumed.rank_batches(), ITERATIONS - done)) == expected[done:], done
        assert contents([stream.global_batch(done + 1).for_rank(stream.rank)]) == [expected[done]]


def test_masking_rate_and_batch_sizes_do_not_change_the_order_of_the_documents(tiny_corpus):
    plain = stream_of(settings_of(tiny_corpus))
    changed = stream_of(
        settings_of(
            tiny_corpus,
            PhaseChange(after_iters=2, mask_prob=0.1),
            PhaseChange(after_iters=4, global_batch_size=8, micro_batch_size=1),
        )
    )
    # 12 iterations of 4 packed sequences, or 4 of 4 and 4 of 8.
    assert list(chain(*documents_of(plain, 12))) == list(chain(*documents_of(changed, 8)))


def test_after_a_change_of_seq_length_batches_begin_with_the_next_window(tiny_corpus):
    """The rest of the window is skipped, and no document is read twice."""
    stream = stream_of(settings_of(tiny_corpus, PhaseChange(after_iters=3, seq_length=128)))
    cursors = [batch.cursor_after for batch in islice(stream.global_batches(), 4)]
    assert cursors[2].sequence > 0
    assert cursors[3] == Cursor(0, cursors[2].window + 1, 4)
    documents = documents_of(stream, 6)
    assert set(chain(*documents[:3])) & set(chain(*documents[3:])) == set()


def test_changed_data_begin_at_their_start_with_the_next_seed(tiny_corpus):
    stream = stream_of(settings_of(tiny_corpus, PhaseChange(after_iters=3, data_path=blend(tiny_corpus))))
    same_seed = settings_of(tiny_corpus, data_path=blend(tiny_corpus))
    next_seed = stream_of(same_seed.with_section("training", seed=1))
    of_phase = contents(islice(stream.rank_batches(), 3, 6))
    assert of_phase == contents(islice(next_seed.rank_batches(), 3))
    assert of_phase != contents(islice(stream_of(same_seed).rank_batches(), 3)), "the comparison depends on the seed"
