"""MinHash: find pairs of documents that may be similar, and compute the similarity of a pair.

A document is the set of its n-grams of token ids. The similarity of documents A and B is the Jaccard index of their
sets, J = |A and B| / |A or B|. Under a random order of all n-grams, both documents have the same first n-gram with
probability J (Broder, 1997). The orders are divided into bands of `rows` orders each. Two documents that agree in all
orders of a band are a candidate pair, which happens with probability 1 - (1 - J^rows)^bands (Leskovec, Rajaraman and
Ullman, Mining of Massive Datasets, chapter 3). The orders use 32-bit hashes of n-grams. The Jaccard index of a
candidate pair is computed exactly. All functions run on one core and do no input or output.
"""

import hashlib
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.cli import option

# Base of the polynomial hash of an n-gram: 2^32 / golden ratio, a prime.
_BASE = np.uint32(0x9E3779B1)
# The finalizer of MurmurHash3, by Austin Appleby, public domain.
_MIX_32 = ((16, 0x85EBCA6B), (13, 0xC2B2AE35))
_MIX_64 = np.uint64(0xD6E8FEB86659FD93)


@dataclass(frozen=True)
class MinHashSettings:
    """Settings that decide which documents are near-duplicates. The first three defaults are datatrove's."""

    bands: int = option(14, "number of bands; documents with an equal band are compared", minimum=1)
    rows: int = option(8, "permutations per band", minimum=1)
    ngram: int = option(5, "tokens per n-gram", minimum=1)
    threshold: float = option(0.8, "smallest Jaccard index of near-duplicates", minimum=0.0)

    @property
    def keys_per_document(self) -> int:
        """Number of keys of a document: a hash of the whole document, and one per band unless the threshold is 1."""
        return 1 + (self.bands if self.threshold < 1 else 0)


def minima(ids: NDArray[np.integer], lengths: NDArray[np.int32], settings: MinHashSettings) -> NDArray[np.uint32]:
    """Return each document's smallest n-gram hash under each fixed permutation, shape [permutations, documents].

    `ids` are the concatenated token ids of the documents, and `lengths` the documents' token counts, at least 1.
    """
    permutations = settings.bands * settings.rows
    random = np.frombuffer(hashlib.shake_128(b"MinHash").digest(8 * permutations), "<u4").astype(np.uint32)
    factors, masks = random[:permutations] | np.uint32(1), random[permutations:]
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    hashes = hash_ngrams(ids, starts, lengths, settings.ngram)
    minima_pn = np.empty((permutations, len(lengths)), dtype=np.uint32)
    permuted = np.empty_like(hashes)
    for number in range(permutations):
        # Multiplying by an odd number and xor are bijections of 32-bit numbers, so this is a permutation.
        np.multiply(hashes, factors[number], out=permuted)
        np.bitwise_xor(permuted, masks[number], out=permuted)
        np.minimum.reduceat(permuted, starts, out=minima_pn[number])
    return minima_pn


def band_keys(minima_pn: NDArray[np.uint32], rows: int) -> NDArray[np.uint64]:
    """Return a 64-bit hash of each document's minima in each band of `rows` permutations, shape [bands, documents]."""
    keys = np.zeros((len(minima_pn) // rows, minima_pn.shape[1]), dtype=np.uint64)
    for number, minima_n in enumerate(minima_pn):
        key = keys[number // rows]
        key ^= minima_n
        key *= _MIX_64
        key ^= key >> np.uint64(32)
    return keys


def hash_documents(ids: NDArray[np.integer], lengths: NDArray[np.int32]) -> NDArray[np.uint64]:
    """Return a 64-bit hash of each document's token ids. `minima` has the same arguments."""
    bounds, content = [0, *(ids.itemsize * np.cumsum(lengths, dtype=np.int64)).tolist()], ids.tobytes()
    hashes = (hashlib.blake2b(content[begin:end], digest_size=8).digest() for begin, end in pairwise(bounds))
    return np.frombuffer(b"".join(hashes), "<u8").astype(np.uint64)


def shingles(ids: bytes, ngram: int) -> set[bytes]:
    """Return the n-grams of a document, given as 32-bit ids. A document of fewer than n tokens is a single n-gram."""
    size = 4 * ngram
    return {ids[begin : begin + size] for begin in range(0, max(4, len(ids) - size + 4), 4)}


def jaccard(first: set[bytes], second: set[bytes]) -> float:
    """Return the Jaccard index of two sets that are not empty."""
    common = len(first & second)
    return common / (len(first) + len(second) - common)


def hash_ngrams(
    ids: NDArray[np.integer], starts: NDArray[np.int64], lengths: NDArray[np.integer], ngram: int
) -> NDArray[np.uint32]:
    """Return for each token a 32-bit hash of the n-gram that begins there, shape [tokens].

    In a document of fewer than n tokens, the first token gets a hash of the whole document. No n-gram begins at the
    last n - 1 tokens of a document; they get the first token's hash, which does not change the document's minimum.
    """
    # Ids are shifted by one, so that 0 pads short documents.
    tokens = ids.astype(np.uint32) + np.uint32(1)
    hashes = tokens.copy()
    for offset in range(1, ngram):
        hashes *= _BASE
        hashes[:-offset] += tokens[offset:]
    short, offsets = np.flatnonzero(lengths < ngram), np.arange(ngram)
    is_inside = offsets < lengths[short, None]
    padded = np.where(is_inside, tokens[np.where(is_inside, starts[short, None] + offsets, 0)], np.uint32(0))
    hashes[starts[short]] = 0
    for offset in range(ngram):
        hashes[starts[short]] = hashes[starts[short]] * _BASE + padded[:, offset]
    for shift, factor in _MIX_32:
        hashes ^= hashes >> np.uint32(shift)
        hashes *= np.uint32(factor)
    hashes ^= hashes >> np.uint32(16)
    trailing, ends = np.minimum(lengths, ngram) - 1, starts + lengths
    for back in range(1, ngram):
        has_trailing = trailing >= back
        hashes[ends[has_trailing] - back] = hashes[starts[has_trailing]]
    return hashes
