"""Order of documents: the split into training, validation and test, and the permutation of each epoch.

The permutation is computed, not stored. Every index costs the same few operations and no memory, even for a billion
documents, and every rank and loader worker computes the same order (about 7 M indices per second on one core).

A corpus that is larger than the page cache is shuffled in blocks of neighbouring documents. A disk reads a block at
once, and the documents of a block are spread over the next windows.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.config.schema import DataConfig
from megatron_neobert.data.batches.philox import RandomStream, draw_words
from megatron_neobert.errors import ConfigError

# Position of a blend's component number in the number of a document, and in the item of a random draw. The bits below
# hold 2^48 documents or windows, the bits above 2^14 components.
COMPONENT_SHIFT = 48

# Number of windows that the documents of a block are spread over. With blocks of 256, each of 1,024 blocks gives 4 of a
# window's 4,096 documents. The page cache or cache folder must hold these windows: 0.25 GB for documents of 1 kB.
_SPREAD_WINDOWS = 64

# With 8 rounds, some orders of six documents are visibly more frequent than others; with 12, they are not.
_ROUNDS = 12

_PARTS = ("training", "validation", "test")  # of --split


@dataclass(frozen=True, kw_only=True)
class DocumentOrder:
    """Random document order of a corpus, or of one component of a blend.

    Each epoch has a different permutation of [0, documents), which is divided into windows.

    With a block size above 1, the blocks are permuted and divided into groups, one group per window. The documents of
    group g are permuted and dealt to windows g to g + _SPREAD_WINDOWS - 1, modulo the number of windows. A window
    therefore contains documents from _SPREAD_WINDOWS groups, and starts one new group.
    """

    documents: int
    window_documents: int  # documents per window; fewer in the last window and in windows of an incomplete group
    block_size: int  # neighbouring documents that are read together; a window has at least one block
    seed: int
    component: int = 0  # index in the blend, below 2^14; each component has another order

    @property
    def windows(self) -> int:
        """Number of windows in an epoch."""
        return -(-self._blocks // self._blocks_per_window)

    @property
    def _blocks(self) -> int:
        return -(-self.documents // self.block_size)

    @property
    def _blocks_per_window(self) -> int:
        return max(1, self.window_documents // self.block_size)

    def window(self, number: int, *, epoch: int) -> NDArray[np.int64]:
        """Return the documents in window `number` of an epoch, in random order, as indices in [0, documents)."""
        blocks, per_window, block_size = self._blocks, self._blocks_per_window, self.block_size
        item = self.component << COMPONENT_SHIFT
        spread = min(_SPREAD_WINDOWS, self.windows, block_size)
        groups = (number - np.arange(spread)) % self.windows
        block_indices = groups[:, None] * per_window + np.arange(per_window)
        flat_indices = np.minimum(block_indices, blocks - 1).reshape(-1)
        chosen = permute(flat_indices, size=blocks, seed=self.seed, epoch=epoch, item=item)
        if block_size == 1:
            return chosen[block_indices[0] < blocks]
        # Indices past the last block get the number `blocks`, which has no documents. After sorting, they are last in
        # their group, behind the incomplete block.
        chosen = np.where(block_indices < blocks, chosen.reshape(block_indices.shape), blocks)
        chosen.sort(axis=1)
        sizes = np.clip(self.documents - chosen * block_size, 0, block_size).sum(axis=1)
        begins, ends = (sizes * share // spread for share in (np.arange(spread), np.arange(1, spread + 1)))
        dealt = ends - begins
        group_of = np.repeat(np.arange(spread), dealt)
        index_in_share = np.arange(dealt.sum()) - np.repeat(np.cumsum(dealt) - dealt, dealt)
        position = index_in_share + begins[group_of]
        # All groups have the same size, except the incomplete one.
        for size in np.unique(sizes).tolist():
            of_size = sizes[group_of] == size
            items = item + groups[group_of[of_size]] + 1
            position[of_size] = permute(position[of_size], size=size, seed=self.seed, epoch=epoch, item=items)
        indices = chosen[group_of, position // block_size] * block_size + position % block_size
        # The groups take turns.
        return indices[np.lexsort((group_of, index_in_share))]

    def between(self, first: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the documents at positions [first, stop) of the endless order, which is one epoch after another.

        In each epoch, the full windows come first, in the order of `window`. The remaining documents follow, shuffled
        among themselves. Whole windows are computed, so `window_documents` should be about stop - first.

        Returns:
            Document indices in [0, documents), and the epoch of each, from 0. Both have shape [stop - first].
        """
        window_documents = self._blocks_per_window * self.block_size
        whole = self.documents if self.block_size == 1 else self.documents - self.documents % window_documents
        in_windows = replace(self, documents=whole)
        indices, epochs = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        while first < stop:
            epoch, position = divmod(first, self.documents)
            if position < whole:
                number, skipped = divmod(position, window_documents)
                ordered = in_windows.window(number, epoch=epoch)
            else:
                skipped, size = position - whole, self.documents - whole
                # A number above the items of all windows.
                item = (self.component << COMPONENT_SHIFT) + whole + 1
                ordered = whole + permute(np.arange(size), size=size, seed=self.seed, epoch=epoch, item=item)
            ordered = ordered[skipped : skipped + stop - first]
            indices.append(ordered)
            epochs.append(np.full(len(ordered), epoch))
            first += len(ordered)
        return np.concatenate(indices), np.concatenate(epochs)


def permute(
    indices: NDArray[np.int64], *, size: int, seed: int, epoch: int, item: int | NDArray[np.int64] = 0
) -> NDArray[np.int64]:
    """Look up positions in a random order of [0, size), and return the document at each position.

    Args:
        indices: Positions in [0, size).
        size: Number of documents, from 1 to below 2^62.
        item: In [0, 2^62), a single value or one per index. Seed, epoch and item determine the order.

    Returns:
        int64 array of the same shape as `indices`. In one order, distinct positions give distinct documents.
    """
    # A Feistel network permutes a grid of at least `size` cells. About one result in sqrt(size) is outside [0, size)
    # and goes through the network again until it is inside (cycle walking).
    # Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains", method "generalised Feistel".
    height = isqrt(size - 1) + 1
    width = -(-size // height)
    items, item_of = np.unique(item, return_inverse=True)
    rounds = np.tile(np.arange(_ROUNDS), len(items))
    words = draw_words(
        RandomStream.DOCUMENT_ORDER, seed=seed, epoch=epoch, item=np.repeat(items, _ROUNDS), index=rounds
    )
    # Shape [rounds, 1] with one item, [rounds, indices] with an item per index.
    keys = words.view(np.uint64)[:, 0].reshape(-1, _ROUNDS).T[:, item_of.reshape(-1)]
    images = _shuffle_grid(indices.astype(np.uint64), height=height, width=width, keys=keys)
    outside = np.flatnonzero(images >= size)
    while len(outside):
        outside_keys = keys[:, outside] if keys.shape[1] > 1 else keys
        images[outside] = _shuffle_grid(images[outside], height=height, width=width, keys=outside_keys)
        outside = outside[images[outside] >= size]
    return images.astype(np.int64)


def _shuffle_grid(
    cells: NDArray[np.uint64], *, height: int, width: int, keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """Permute a grid with the cells [0, height * width), and return the new number of each cell in `cells`.

    Each pair of keys shifts the row of a cell by a hash of its column, then the column by a hash of the row. `keys` has
    shape [rounds, 1] or [rounds, cells].
    """
    y, x = np.divmod(cells, np.uint64(width))
    for row_key, column_key in zip(keys[0::2], keys[1::2], strict=True):
        y = (y + _hash_below(height, x + row_key)) % np.uint64(height)
        x = (x + _hash_below(width, y + column_key)) % np.uint64(width)
    return y * np.uint64(width) + x


def _hash_below(limit: int, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a hash in [0, limit) of each 64-bit value. `limit` must be at most 2^31."""
    # SplitMix64's finaliser (Steele et al. 2014), scaled to the limit.
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((values >> np.uint64(32)) * np.uint64(limit)) >> np.uint64(32)


@dataclass(frozen=True)
class SplitPart:
    """The documents of one part of --split, in ascending order. Each part is spread evenly over the corpus.

    Held-out documents (validation and test) are taken from the corpus at equal distances, and test documents from the
    held-out documents in the same way. Numbers are computed when needed, not stored, exactly up to 10^12 documents.
    """

    sizes: tuple[int, ...]  # documents for training, validation and test
    part: int  # index in `sizes`

    def __len__(self) -> int:
        return self.sizes[self.part]

    def numbers(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the document number in the corpus for each index in this part. Indices are in [0, len(self))."""
        # Documents of this part and of all later ones, from which the later parts are taken.
        remaining = [sum(self.sizes[part:]) for part in range(len(self.sizes))]
        numbers = _scale_odd(indices, remaining[self.part], 2 * len(self), less=1)
        for part in reversed(range(self.part)):
            numbers = _scale_odd(numbers, remaining[part], 2 * remaining[part + 1])
        return numbers


def _scale_odd(indices: NDArray[np.int64], factor: int, divisor: int, *, less: int = 0) -> NDArray[np.int64]:
    """Return ((2 i + 1) factor - less) / divisor for each index i, rounded down.

    With m = divisor / 2 and n = factor, the results are m numbers at equal distances in [0, n), the first after half a
    distance. With `less` 1, the results are the m numbers that remain after removing n - m numbers at equal distances.
    """
    # The product may have more than 63 bits, so it is divided in two steps.
    high, low = np.divmod(2 * indices + 1, 1 << 20)
    quotients, remainders = np.divmod(high * factor, divisor)
    return (quotients << 20) + ((remainders << 20) + low * factor - less) // divisor


def split_documents(documents: int, split: str) -> list[SplitPart]:
    """Divide a corpus's documents into training, validation and test parts, with the same part sizes as Megatron.

    `split` has one to three weights with any sum, such as `99,1` or `969,30,1`. There is one part per weight; weight 0
    gives an empty part. Each document is in one part. Cumulative sizes are rounded to the nearest document, halves to
    even. Raise ConfigError if the weights are malformed, or a part with a weight above 0 would be empty.
    """
    # Source: megatron-core 0.16.1 datasets/blended_megatron_dataset_config.py (cumulative weights) and
    # blended_megatron_dataset_builder.py (rounding).
    try:
        weights = [float(weight) for weight in split.split(",")]
    except ValueError:
        weights = []
    total = sum(weights)
    if not 1 <= len(weights) <= 3 or not 0 < total < float("inf") or min(weights) < 0:
        raise ConfigError(
            f"--split {split} is not one to three comma-separated weights of at least 0, one of them above 0. "
            "Write for example --split 99,1 for training and validation."
        )
    ends = [0.0]
    for weight in weights:
        ends.append(ends[-1] + weight / total)
    bounds = [round(end * documents) for end in ends]
    sizes = tuple(stop - start for start, stop in pairwise(bounds))
    for number, (weight, size) in enumerate(zip(weights, sizes, strict=True), start=1):
        if weight > 0 and not size:
            raise ConfigError(
                f"--split {split}{' (the default)' if split == DataConfig.split else ''} of {documents:,} documents "
                f"leaves part {number} ({_PARTS[number - 1]}, weight {weight:g}) empty. Use --split 1 to train on all "
                "documents, or more documents: neobert preprocess --text-separator cuts a text file into many."
            )
    return [SplitPart(sizes, part) for part in range(len(sizes))]
