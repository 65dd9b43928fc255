"""Statistics of document lengths: exact, and the same however the lengths arrive."""

import numpy as np
import pytest

from megatron_neobert.data.corpus.format import CUTS, PERCENTS, LengthCounts


def counted(*chunks):
    counts = LengthCounts()
    for chunk in chunks:
        counts.add(np.asarray(chunk, dtype=np.int32))
    return counts


@pytest.mark.parametrize("chunks", [1, 7, 6000])
def test_statistics_equal_those_of_the_sorted_lengths_in_whatever_chunks_they_are_counted(chunks):
    lengths = np.random.default_rng(chunks).lognormal(6, 1.2, 5001).astype(np.int32) + 1
    ranked, found = np.sort(lengths).astype(np.int64), counted(*np.array_split(lengths, chunks)).statistics()
    assert (found.shortest, found.longest) == (ranked[0], ranked[-1])
    for percent in PERCENTS:
        assert found.percentiles[str(percent)] == ranked[int(np.ceil(percent * 5001 / 100)) - 1]
    for cut in CUTS:
        assert found.documents_above[str(cut)] == pytest.approx(np.mean(ranked > cut), abs=1e-6)
        behind = sum(length - cut for length in ranked.tolist() if length > cut)
        assert found.tokens_above[str(cut)] == pytest.approx(behind / ranked.sum(), abs=1e-6)
    assert found.mean == pytest.approx(ranked.mean(), abs=0.01)
