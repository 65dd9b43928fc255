"""Standard errors, averages, and bands of pseudo-perplexity."""

import math
from itertools import combinations
from statistics import fmean, pvariance, variance

import pytest
from scipy import stats

from megatron_neobert.evaluation.pseudo_perplexity import DocumentResult, average_by_length, average_over_tokens


def result_of(losses, *, tokens=None, length=10):
    return DocumentResult(
        id="a",
        length=length,
        truncated=False,
        tokens=tokens or len(losses),
        positions=len(losses),
        nll_sum=sum(losses),
        nll_variance=variance(losses) if len(losses) > 1 else None,
    )


@pytest.mark.parametrize("drawn", [2, 3, 5])
def test_mean_squared_standard_error_is_the_variance_of_the_mean_over_all_draws(drawn):
    losses = [0.1, 0.4, 2.0, 3.5, 9.0, 0.7]
    results = [result_of(list(chosen), tokens=len(losses)) for chosen in combinations(losses, drawn)]
    assert fmean(r.standard_error**2 for r in results) == pytest.approx(pvariance(r.mean_nll for r in results))
    assert fmean(r.mean_nll for r in results) == pytest.approx(fmean(losses))


def test_documents_are_weighted_by_their_tokens_however_many_were_drawn():
    short, long = result_of([1.0, 3.0]), result_of([4.0, 6.0], tokens=100)
    average = average_over_tokens([short, long])
    mean = (2 * 2.0 + 100 * 5.0) / 102
    assert average["nats_per_token"] == pytest.approx(mean)
    assert average["pseudo_perplexity"] == pytest.approx(math.exp(mean))
    # All tokens of the short document were masked; of the long one 2 of 100, and their losses have variance 2.
    assert average["standard_error"] == pytest.approx(math.exp(mean) * 100 * math.sqrt(2 / 2 * (1 - 2 / 100)) / 102)
    assert average_over_tokens([short, result_of([4.0], tokens=100)])["standard_error"] is None


def test_bin_includes_the_length_at_its_end():
    results = [result_of([1.0], length=length) for length in (1, 128, 129, 256, 257, 9000)]
    bins = [(b["above"], b["up_to"], b["documents"], b["mean_length"]) for b in average_by_length(results)]
    assert bins == [(0, 128, 2, 64.5), (128, 256, 2, 192.5), (256, 512, 1, 257), (8192, 16384, 1, 9000)]


def test_band_is_students_interval_over_documents_and_missing_for_a_few():
    means = [1.0, 2.5, 1.5, 3.0, 2.2, 0.9]
    [few] = average_by_length([result_of([1.0]), result_of([2.0])])
    assert (few["documents"], few["low"], few["high"]) == (2, None, None)
    [point] = average_by_length([result_of([mean - 0.5, mean + 0.5]) for mean in means])
    low, high = stats.t.interval(0.95, len(means) - 1, loc=fmean(means), scale=stats.sem(means))
    assert (point["low"], point["high"]) == pytest.approx((math.exp(low), math.exp(high)))
    assert point["pseudo_perplexity"] == pytest.approx(math.exp(fmean(means)))
