"""Statistics of document lengths: exact, and the same however the lengths arrive."""

import numpy as np
import pytest

from megatron_neobert.data.corpus.format import CUTS, PERCENTS, LengthCounts


def counted(*chunks):
    counts = LengthCounts()
    for chunk in chunks:
        counts.add(np.asarray(chunk, dtype=np.int32))
    return counts


def test_statistics_of_four_documents_by_hand():
    found = counted([1000, 2000, 3000, 2000]).statistics()
    assert (found.mean, found.shortest, found.longest) == (2000.0, 1000, 3000)
    # The smallest length that 5 % (1 of 4), 25 % (1), 50 % (2), 75 % (3), 95 % and 99 % (all 4) do not exceed.
    assert found.percentiles == {"5": 1000, "25": 1000, "50": 2000, "75": 2000, "95": 3000, "99": 3000}
    assert found.documents_above == {"1024": 0.75, "2048": 0.25}
    # Behind 1,024: 976 + 1976 + 976 of 8000. Behind 2,048: 952.
    assert found.tokens_above == {"1024": 0.491, "2048": 0.119}


@pytest.mark.parametrize("seed", range(3))
def test_statistics_equal_those_of_the_sorted_lengths(seed):
    lengths = np.random.default_rng(seed).lognormal(6, 1.2, 5001).astype(np.int32) + 1
    ranked, found = np.sort(lengths).astype(np.int64), counted(lengths).statistics()
    for percent in PERCENTS:
        assert found.percentiles[str(percent)] == ranked[int(np.ceil(percent * 5001 / 100)) - 1]
    for cut in CUTS:
        assert found.documents_above[str(cut)] == pytest.approx(np.mean(ranked > cut), abs=1e-6)
        behind = sum(length - cut for length in ranked.tolist() if length > cut)
        assert found.tokens_above[str(cut)] == pytest.approx(behind / ranked.sum(), abs=1e-6)
    assert found.mean == pytest.approx(ranked.mean(), abs=0.01)


def test_statistics_do_not_depend_on_the_chunks_they_are_counted_in():
    lengths = np.random.default_rng(0).integers(1, 3000, 1000)
    assert counted(lengths).statistics() == counted(*np.array_split(lengths, 7), lengths[:0]).statistics()
    assert counted(lengths).statistics() != counted(lengths[:-1]).statistics()
