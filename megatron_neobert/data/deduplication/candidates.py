"""Choose which pairs of documents are compared, among the pairs with an equal key in one band.

n documents with one key have n^2 / 2 pairs, so each document is compared with the first and with the previous document
that have its key. That is enough for copies of one text. In a family of documents of one template, which share most of
their n-grams, a document's copy may be any other document. It is found by the rare n-grams that only the copies share.
All choices depend on the documents with the same key alone.
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.data.deduplication.minhash import hash_ngrams

# Tokens of documents that are searched together, with up to 200 bytes of memory each.
BLOCK_TOKENS = 1 << 20
# A document is compared with the _COMPARISONS documents with which it shares the most of its _RARE_NGRAMS rarest
# n-grams, among the _HOLDERS documents before and after it that have an n-gram. In a hard case, 1,000 documents of a
# template with six slots of 20 texts each, this found 98 % of the copies, 32 n-grams 97 %, and all pairs 100 %.
_RARE_NGRAMS = 64
_HOLDERS = 8
_COMPARISONS = 4
# N-grams of a larger share of the documents are the template.
_TEMPLATE_SHARE = 0.9
_SMALL_FAMILY = 8


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
