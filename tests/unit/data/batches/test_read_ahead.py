"""Documents of a remote corpus are prefetched before they are read."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from unit.data.corpus.memory_corpus import contents, stream_of

from megatron_neobert.data.batches.stream import StepBatches


@pytest.mark.usefixtures("windows_of_40_documents")
def test_this_ranks_documents_are_prefetched_four_steps_ahead_and_batches_do_not_change(corpus):
    corpus.is_remote = True
    stream = replace(stream_of(corpus, document_block_size=10), data_parallel_rank=1, data_parallel_size=2)
    batches = list(islice(stream.global_batches(), 34))
    for number, (step, (packed, cursor)) in enumerate(zip(stream.steps(), batches[:30], strict=False)):
        # The first step prefetches five global batches, later steps one. This rank has micro-batches 1 and 3.
        prefetched = batches[:5] if number == 0 else [batches[number + 4]]
        expected = [ahead.take(first, first + 2).segments.documents_n for ahead, _ in prefetched for first in (2, 6)]
        assert np.concatenate(corpus.prefetched).tolist() == np.concatenate(expected).tolist()
        assert contents([step]) == contents([StepBatches(stream.build(packed), cursor)])
        corpus.prefetched.clear()
