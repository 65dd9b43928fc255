"""MinHash: find pairs of documents that may be similar, and compute the similarity of a pair.

A document is the set of its n-grams of token ids. The similarity of documents A and B is the Jaccard index of their
sets, J = |A and B| / |A or B|. Under a random order of all n-grams, both documents have the same first n-gram with
probability J (Broder, 1997). The orders are divided into bands of `rows` orders each. Two documents that agree in all
orders of a band are a candidate pair, which happens with probability 1 - (1 - J^rows)^bands (Leskovec, Rajaraman and
Ullman, Mining of Massive Datasets, chapter 3). The orders use 32-bit hashes of n-grams. The Jaccard index of a
candidate pair is computed exactly. All functions run on one core and do no input or output.

n documents with an equal key in one band have n^2 / 2 pairs, so each document is compared with the first and with the
previous document that have its key. That is enough for copies of one text. In a family of documents of one template,
which share most of their n-grams, a document's copy may be any other document. It is found by the rare n-grams that
only the copies share. All choices depend on the documents with the same key alone.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.cli import option

_BASE = np.uint32(0x9E3779B1)  # base of the polynomial hash of an n-gram: 2^32 / golden ratio, a prime
# The finalizer of MurmurHash3, by Austin Appleby, public domain.
_MIX_32 = ((16, 0x85EBCA6B), (13, 0xC2B2AE35))
_MIX_64 = np.uint64(0xD6E8FEB86659FD93)

BLOCK_TOKENS = 1 << 20  # tokens of documents that are searched together, with up to 200 bytes of memory each
# A document is compared with the _COMPARISONS documents with which it shares the most of its _RARE_NGRAMS rarest
# n-grams, among the _HOLDERS documents before and after it that have an n-gram. In a hard case, 1,000 documents of a
# template with six slots of 20 texts each, this found 98 % of the copies, 32 n-grams 97 %, and all pairs 100 %.
_RARE_NGRAMS = 64
_HOLDERS = 8
_COMPARISONS = 4
# N-grams of a larger share of the documents are the template.
_TEMPLATE_SHARE = 0.9
_SMALL_FAMILY = 8


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


# --- the pairs that are compared


def pair_neighbours(keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Pair each repeated key in sorted `keys` with the key's first and, if different, previous occurrence.

    Return positions, shape (pairs, 2), the earlier position first.
    """
    repeats = np.flatnonzero(keys[1:] == keys[:-1]) + 1
    firsts = np.searchsorted(keys, keys[repeats])
    with_first = np.stack([firsts, repeats], axis=1)
    with_previous = np.stack([repeats - 1, repeats], axis=1)
    return np.concatenate([with_first, with_previous[firsts < repeats - 1]])


def find_families(keys: NDArray[np.uint64], is_joined: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the positions of all documents of families, in ascending order.

    A family is four or more documents with the same key, at least two of them not joined to an earlier document.
    """
    family_of = np.cumsum(_starts_run(keys)) - 1
    sizes, unjoined = np.bincount(family_of), np.bincount(family_of, ~is_joined)
    return np.flatnonzero(((sizes > 3) & (unjoined > 1))[family_of])


def divide_families(
    keys: NDArray[np.uint64], lengths: NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield blocks of documents to search together: each document's position in `keys`, and its family number.

    A family with more than BLOCK_TOKENS tokens is divided into families of documents with similar lengths. `keys` is
    sorted, and `lengths` are in tokens.
    """
    positions = np.lexsort((lengths, keys))
    tokens = np.cumsum(lengths[positions])
    starts_family = _starts_run(keys)
    begins = tokens - lengths[positions]
    block_of = (begins - np.maximum.accumulate(np.where(starts_family, begins, 0))) // BLOCK_TOKENS
    starts_family |= np.diff(block_of, prepend=0) > 0
    # Small families are searched together up to about BLOCK_TOKENS.
    starts = np.flatnonzero(starts_family)
    steps = starts[np.flatnonzero(np.diff(begins[starts] // BLOCK_TOKENS, prepend=-1))]
    numbers = np.cumsum(starts_family, dtype=np.int64)
    for begin, end in pairwise([*steps.tolist(), len(keys)]):
        yield positions[begin:end], numbers[begin:end]


def pair_by_rare_ngrams(
    ids: NDArray[np.integer],
    lengths: NDArray[np.int64],
    family_of: NDArray[np.int64],
    is_joined: NDArray[np.bool_],
    ngram: int,
) -> NDArray[np.int64]:
    """Pair documents of the same family that share rare n-grams. Return indices, [pairs, 2], lower index first.

    Each document that is not joined is paired with the few documents that share the most of its rarest n-grams.
    An n-gram in fewer documents has a larger weight.

    Args:
        ids: Concatenated token ids of the documents, which are sorted by family.
        lengths: Number of tokens of each document.
        family_of: Family number of each document.
        is_joined: True for documents that need no pair.
        ngram: Tokens per n-gram.
    """
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    documents = np.repeat(np.arange(len(lengths), dtype=np.uint64), lengths)
    entries = hash_ngrams(ids, starts, lengths, ngram).astype(np.uint64) << np.uint64(32) | documents
    entries.sort()
    entries = entries[_starts_run(entries)]
    hashes, documents = entries >> np.uint64(32), (entries & np.uint64(0xFFFFFFFF)).astype(np.int64)
    family = family_of[documents]
    ngram_of = np.cumsum(_starts_run(hashes) | _starts_run(family)) - 1
    holders = np.bincount(ngram_of)[ngram_of]
    largest = np.maximum(_SMALL_FAMILY, _TEMPLATE_SHARE * np.bincount(family_of))[family]
    is_rare = np.flatnonzero((holders > 1) & (holders <= largest))
    by_document = is_rare[np.lexsort((holders[is_rare], documents[is_rare]))]
    rank = np.arange(len(by_document)) - np.searchsorted(documents[by_document], documents[by_document])
    chosen = np.sort(by_document[rank < _RARE_NGRAMS])
    pairs, weights = [], []
    for distance in range(1, _HOLDERS + 1):
        first, second = chosen[:-distance], chosen[distance:]
        is_shared = ngram_of[first] == ngram_of[second]
        pairs.append(documents[first[is_shared]] << 32 | documents[second[is_shared]])
        weights.append(1 / holders[first[is_shared]])
    shared, pair_of = np.unique(np.concatenate(pairs), return_inverse=True)
    weight = np.bincount(pair_of, np.concatenate(weights))
    both = np.stack([shared >> 32, shared & 0xFFFFFFFF], axis=1)
    # Each pair is considered for both of its documents.
    owners, at = both.T.ravel(), np.tile(np.arange(len(both)), 2)
    owners, at = owners[~is_joined[owners]], at[~is_joined[owners]]
    order = np.lexsort((at, -weight[at], owners))
    owners, at = owners[order], at[order]
    rank = np.arange(len(owners)) - np.searchsorted(owners, owners)
    return both[np.unique(at[rank < _COMPARISONS])]


def _starts_run(values: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Return True for each value that differs from the value before it, and for the first."""
    return np.append(True, values[1:] != values[:-1])[: len(values)]
