import numpy as np
import pytest

from megatron_neobert.data.batches.philox import Stream, draw_words, philox4x32


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
    def draw(*, stream=Stream.SELECTION, seed=5, epoch=3, item=7, index=11):
        return draw_words(stream, seed=seed, epoch=epoch, item=item, index=np.array([index])).tobytes()

    draws = [draw(seed=seed) for seed in (5, 6, 5 + 2**32)]
    draws += [draw(epoch=epoch) for epoch in (4, 2**31)]
    draws += [draw(item=item) for item in (8, 7 + 2**32, 7 + 2**61)]
    draws += [draw(index=index) for index in (12, 11 + 2**31)]
    draws += [draw(stream=stream) for stream in Stream if stream != Stream.SELECTION]
    assert len(set(draws)) == len(draws) == 3 + 2 + 3 + 2 + 3
