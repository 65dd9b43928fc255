"""MinHash: find the pairs of documents that may be similar, and compute how similar a pair is.

A document is the set of its n-grams of token ids. The similarity of two documents is the Jaccard index of their sets,
J = |A and B| / |A or B|. Under a random order of all n-grams, both documents have the same first n-gram with
probability J (Broder, 1997). Orders are divided into bands of `rows` orders each. Two documents that agree in all
orders of a band are a candidate pair: a pair with index J becomes one with probability 1 - (1 - J^rows)^bands
(Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, chapter 3). The orders hash n-grams to 32 bits; the index
of a candidate pair is exact. These functions run on one core and do no input or output.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.cli import option

_BASE = np.uint32(0x9E3779B1)  # 2^32 / golden ratio, a prime: of the polynomial over an n-gram
_MIX_32 = ((16, 0x85EBCA6B), (13, 0xC2B2AE35))  # MurmurHash3's last step, by Austin Appleby, public domain
_MIX_64 = np.uint64(0xD6E8FEB86659FD93)


@dataclass(frozen=True)
class MinHashSettings:
    """Settings that decide which documents are near-duplicates; the defaults of the first three are datatrove's."""

    bands: int = option(14, "number of bands, of which one must agree", minimum=1)
    rows: int = option(8, "permutations of a band", minimum=1)
    ngram: int = option(5, "tokens of a shingle", minimum=1)
    threshold: float = option(0.8, "least Jaccard index of near-duplicates", minimum=0.0)

    @property
    def permutations(self) -> int:
        return self.bands * self.rows


def minima(ids: NDArray[np.integer], lengths: NDArray[np.int32], settings: MinHashSettings) -> NDArray[np.uint32]:
    """The smallest n-gram of each document under each random order, [permutations, documents].

    Args:
        ids: Token ids of the documents end to end.
        lengths: Tokens of each document, at least 1.
    """
    random = np.frombuffer(hashlib.shake_128(b"MinHash").digest(8 * settings.permutations), "<u4").astype(np.uint32)
    factors, masks = random[: settings.permutations] | np.uint32(1), random[settings.permutations :]
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    hashes = _hash_ngrams(ids, starts, lengths, settings.ngram)
    found = np.empty((settings.permutations, len(lengths)), dtype=np.uint32)
    ordered = np.empty_like(hashes)
    for number in range(settings.permutations):  # a bijection of 32 bits: multiplied by an odd number, xor
        np.multiply(hashes, factors[number], out=ordered)
        np.bitwise_xor(ordered, masks[number], out=ordered)
        np.minimum.reduceat(ordered, starts, out=found[number])
    return found


def band_keys(minima_pn: NDArray[np.uint32], rows: int) -> NDArray[np.uint64]:
    """One number for all rows of a band, [bands, documents]."""
    keys = np.zeros((len(minima_pn) // rows, minima_pn.shape[1]), dtype=np.uint64)
    for number, values in enumerate(minima_pn):
        key = keys[number // rows]
        key ^= values
        key *= _MIX_64
        key ^= key >> np.uint64(32)
    return keys


def shingles(ids: bytes, ngram: int) -> set[bytes]:
    """Return the n-grams of a document of 32-bit token ids. A document of fewer than n tokens is one n-gram."""
    step = 4 * ngram
    return {ids[begin : begin + step] for begin in range(0, max(4, len(ids) - step + 4), 4)}


def jaccard(one: set[bytes], other: set[bytes]) -> float:
    """Return the Jaccard index of two sets that are not empty."""
    both = len(one & other)
    return both / (len(one) + len(other) - both)


def _hash_ngrams(
    ids: NDArray[np.integer], starts: NDArray[np.int64], lengths: NDArray[np.int32], ngram: int
) -> NDArray[np.uint32]:
    """The n-gram that begins at each token, as 32 mixed bits; of a shorter document its whole.

    Where none begins, at a document's last tokens, its first one stands once more, which changes no minimum.
    """
    tokens = ids.astype(np.uint32) + np.uint32(1)  # so that 0 is none
    hashes = tokens.copy()
    for place in range(1, ngram):
        hashes *= _BASE
        hashes[:-place] += tokens[place:]
    short, places = np.flatnonzero(lengths < ngram), np.arange(ngram)
    inside = places < lengths[short, None]
    whole = np.where(inside, tokens[np.where(inside, starts[short, None] + places, 0)], np.uint32(0))
    hashes[starts[short]] = 0
    for place in range(ngram):
        hashes[starts[short]] = hashes[starts[short]] * _BASE + whole[:, place]
    for shift, factor in _MIX_32:
        hashes ^= hashes >> np.uint32(shift)
        hashes *= np.uint32(factor)
    hashes ^= hashes >> np.uint32(16)
    last = np.minimum(lengths, ngram) - 1  # tokens at the end where no n-gram begins
    ends = starts + lengths
    for back in range(1, ngram):
        some = last >= back
        hashes[ends[some] - back] = hashes[starts[some]]
    return hashes
