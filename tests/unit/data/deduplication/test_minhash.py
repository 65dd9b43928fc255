"""MinHash signatures of documents, and the exact Jaccard index of two documents."""

import numpy as np
import pytest

from megatron_neobert.data.deduplication.minhash import MinHashSettings, band_keys, jaccard, minima, shingles


def jaccard_of(*documents, ngram=5):
    return jaccard(*(shingles(np.asarray(document, dtype="<u4").tobytes(), ngram) for document in documents))


@pytest.mark.parametrize(
    ("first", "second", "ngram", "expected"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 5], 2, 2 / 4),
        # Repeated n-grams count once.
        ([1, 2, 1, 2, 1, 2], [1, 2, 1], 2, 1),
        # N-grams begin at tokens, not at bytes.
        ([1, 256, 65536], [256, 65536, 1], 1, 1),
        ([1, 0, 0], [0, 1, 0], 2, 1 / 3),
        # A document that is shorter than an n-gram is one n-gram.
        ([1, 2, 3], [1, 2, 3], 5, 1),
        ([1, 2, 3], [1, 2, 3, 4], 5, 0),
        ([1, 2, 3, 4, 5], [1, 2, 3, 4, 6], 5, 0),
    ],
)
def test_jaccard_index_is_that_of_the_sets_of_ngrams(first, second, ngram, expected):
    assert jaccard_of(first, second, ngram=ngram) == jaccard_of(second, first, ngram=ngram) == expected


@pytest.mark.parametrize("kind", ["random", "running numbers", "few words"])
def test_share_of_equal_minima_has_the_mean_and_the_spread_of_a_jaccard_index(kind):
    """Errors in standard deviations sqrt(J (1 - J) / 112): measured mean -0.05 to 0.12, spread 1.00 to 1.01."""
    generator, errors = np.random.default_rng(0), []
    for _ in range(400):
        document = {
            "random": lambda: generator.integers(0, 30_000, 300),
            "running numbers": lambda: generator.integers(0, 20_000) + np.arange(300),
            "few words": lambda: generator.integers(0, 12, 300),
        }[kind]()
        changed = document.copy()
        changed[generator.integers(0, 300, generator.integers(1, 12))] = generator.integers(0, 30_000)
        true = jaccard_of(document, changed)
        ids, lengths = np.concatenate([document, changed]), np.array([300, 300], dtype=np.int32)
        first, second = minima(ids.astype(np.uint16), lengths, MinHashSettings()).T
        errors.append(((first == second).mean() - true) / np.sqrt(true * (1 - true) / 112))
    # Four standard deviations of a mean of 400.
    assert abs(np.mean(errors)) < 0.2
    assert 0.85 < np.std(errors) < 1.15


def test_keys_of_a_band_are_equal_with_the_probability_that_all_its_rows_are_equal():
    """For 2,000 pairs with J = 0.8: 0.8^8 = 0.168 in each band, 1 - (1 - 0.8^8)^14 = 0.924 in one band at least."""
    generator = np.random.default_rng(0)
    first, random = generator.integers(0, 2**32, (2, 112, 2000), dtype=np.uint32)
    second = np.where(generator.random(first.shape) < 0.8, first, random)
    is_equal = band_keys(first, 8) == band_keys(second, 8)
    assert is_equal.shape == (14, 2000)
    assert is_equal.mean() == pytest.approx(0.8**8, abs=0.01)
    assert is_equal.any(axis=0).mean() == pytest.approx(1 - (1 - 0.8**8) ** 14, abs=0.02)
    assert len(np.unique(band_keys(first, 8))) == 14 * 2000
