import numpy as np
import pytest
from unit.data.corpus.memory_corpus import BERT, IDS, UNKNOWN, VOCABULARY

from megatron_neobert.data.batches.masking import MaskedTokens, mask_tokens
from megatron_neobert.data.batches.packing import Segments
from megatron_neobert.data.batches.philox import RandomStream, draw_words, philox4x32


def ordinary_tokens(count: int, *, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(UNKNOWN + 1, VOCABULARY, count)


def segments(*values: tuple[int, int, int, int]) -> Segments:
    """Return segments of (document, epoch, start, length)."""
    true_n = np.ones(len(values), dtype=np.bool_)
    return Segments(*np.array(values, dtype=np.int64).T, has_cls_n=true_n, has_sep_n=true_n)


def mask(tokens, segments, positions) -> MaskedTokens:
    return mask_tokens(tokens, segments, np.array(positions), **BERT, ids=IDS, seed=1)


def test_shares_of_selected_masked_random_and_unchanged_tokens_are_those_of_bert():
    """The counts are binomial. A random token equals the original with probability 1 / 995 and counts as unchanged."""
    n = 1_000_000
    masked = mask(ordinary_tokens(n), segments((3, 0, 0, n)), [0])
    selected = len(masked.labels_m)
    assert abs(selected - n * 0.15) < 4 * np.sqrt(n * 0.15 * 0.85)
    is_mask = masked.replacements_m == IDS.mask
    is_unchanged = masked.replacements_m == masked.labels_m
    is_random = ~is_mask & ~is_unchanged
    coincidence = 1 / (VOCABULARY - len(IDS.special))
    for share, members in (
        (0.8, is_mask),
        (0.1 * (1 - coincidence), is_random),
        (0.1 * (1 + coincidence), is_unchanged),
    ):
        assert abs(members.sum() - selected * share) < 4 * np.sqrt(selected * share * (1 - share)), share


@pytest.mark.parametrize("start", [0, 1, 8, 13, 123])
def test_masks_of_a_document_do_not_depend_on_how_it_is_cut_and_packed(start):
    tokens = ordinary_tokens(700)
    whole = mask(tokens, segments((17, 2, 0, 700)), [0])
    around = ordinary_tokens(900, seed=1)
    around[201:701] = tokens[start : start + 500]
    neighbours = segments((4, 2, 0, 150), (17, 2, start, 500), (5, 3, 0, 100))
    packed = mask(around, neighbours, [1, 201, 750])
    # Tokens 151 to 200 and 701 to 749 belong to no segment: a mask there fails the comparison.
    of_cut = (packed.positions_m > 150) & (packed.positions_m < 750)
    of_whole = (whole.positions_m >= start) & (whole.positions_m < start + 500)
    assert (packed.positions_m[of_cut] - 201 + start).tolist() == whole.positions_m[of_whole].tolist()
    assert packed.replacements_m[of_cut].tolist() == whole.replacements_m[of_whole].tolist()
    assert 0 < of_cut.sum() < len(of_cut)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0, 0, 0, 0], 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([2**32 - 1] * 4, 2**64 - 1, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            0x299F31D0_A4093822,
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(counter, key, expected):
    counters = np.array([[0, word, 7] for word in counter], dtype=np.uint64)  # tested: the second of three
    assert philox4x32(counters, key=key)[1].tolist() == expected


def test_draws_differ_in_every_argument():
    def draw(*, stream=RandomStream.SELECTION, seed=5, epoch=3, item=7, index=11):
        return draw_words(stream, seed=seed, epoch=epoch, item=item, index=np.array([index])).tobytes()

    draws = [draw(seed=seed) for seed in (5, 6, 5 + 2**32)]
    draws += [draw(epoch=epoch) for epoch in (4, 2**31)]
    draws += [draw(item=item) for item in (8, 7 + 2**32, 7 + 2**61)]
    draws += [draw(index=index) for index in (12, 11 + 2**31)]
    draws += [draw(stream=stream) for stream in RandomStream if stream != RandomStream.SELECTION]
    assert len(set(draws)) == len(draws) == 3 + 2 + 3 + 2 + 3
