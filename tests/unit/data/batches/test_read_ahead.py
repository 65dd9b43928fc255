"""Documents of a remote corpus that are announced before they are read."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from unit.data.corpus.memory_corpus import contents, stream_of

from megatron_neobert.data.batches.stream import StepBatches


@pytest.mark.usefixtures("windows_of_40_documents")
def test_each_step_announces_what_this_rank_reads_in_the_next_and_changes_no_batch(corpus):
    corpus.is_remote = True
    own = replace(stream_of(corpus, document_block_size=10), data_parallel_rank=1, data_parallel_size=2)
    batches = list(islice(own.global_batches(), 34))
    for number, (step, (rows, cursor)) in enumerate(zip(own.steps(), batches[:30], strict=False), start=1):
        announced = [
            rows for rows, _ in batches[0 if number == 1 else number + 3 : number + 4]
        ]  # at first five at once
        ours = [rows.take(first, first + 2).segments.documents_n for rows in announced for first in (2, 6)]
        assert np.concatenate(corpus.prefetched).tolist() == np.concatenate(ours).tolist()
        assert contents([step]) == contents([StepBatches(own.build(rows), cursor)])
        corpus.prefetched.clear()
