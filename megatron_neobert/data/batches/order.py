"""Order of documents: the division into training and validation, and the permutation of an epoch.

The order is a permutation that is computed, not stored: any index of a billion documents costs the same few
operations and no memory, on every rank and in every worker alike (about 7 M indices per second on one core). A corpus
that the page cache cannot hold is shuffled in blocks of neighbouring documents, which a disk reads in one go and which
are spread over the next windows.
"""

from itertools import pairwise
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.data.batches.philox import Stream, draw_words
from megatron_neobert.errors import ConfigError

# Of a blend's component number inside the item of a draw, and inside the number of a document: below it fit 2^48
# documents or windows, above it 2^14 components.
COMPONENT_SHIFT = 48

# A block's documents are spread over so many windows: with blocks of 256, each of 1,024 blocks gives 4 of a window's
# 4,096 documents. The page cache or cache folder has to hold these windows, 0.25 GB of documents of 1 kB.
_SPREAD_WINDOWS = 64

_ROUNDS = 12  # at 8, the orders of six documents are visibly uneven; from 12 on they are not


def windows_of_epoch(documents: int, *, window_documents: int, block_size: int) -> int:
    """Return the number of windows that `documents_of_window` cuts an epoch into."""
    blocks = -(-documents // block_size)
    return -(-blocks // _blocks_per_window(window_documents, block_size))


def documents_of_window(
    window: int, *, documents: int, window_documents: int, block_size: int, seed: int, epoch: int, component: int = 0
) -> NDArray[np.int64]:
    """Indices in [0, documents) of a window's documents, in the order of an epoch.

    With a block size above 1, the blocks are permuted and divided into groups, one group per window. The documents of
    group g are permuted and dealt to the windows g to g + _SPREAD_WINDOWS - 1, modulo the windows of an epoch. A window
    therefore has documents of _SPREAD_WINDOWS groups, and is the first to read one of them.

    Args:
        window_documents: How many a window holds; fewer at the end of the epoch, or where a group is incomplete.
        block_size: Neighbours that are read together. One block is the least that a window holds.
        component: Which part of a blend; each has an order of its own. At least 0, below 2^14.
    """
    item = component << COMPONENT_SHIFT
    blocks, per_window = -(-documents // block_size), _blocks_per_window(window_documents, block_size)
    windows = -(-blocks // per_window)
    spread = min(_SPREAD_WINDOWS, windows, block_size)
    groups = (window - np.arange(spread)) % windows
    places = groups[:, None] * per_window + np.arange(per_window)
    chosen = permute(np.minimum(places, blocks - 1).reshape(-1), size=blocks, seed=seed, epoch=epoch, item=item)
    if block_size == 1:
        return chosen[places[0] < blocks]
    chosen = np.where(places < blocks, chosen.reshape(places.shape), blocks)
    chosen.sort(axis=1)  # the incomplete block comes last in its group, and what is no block behind it
    sizes = np.clip(documents - chosen * block_size, 0, block_size).sum(axis=1)
    begins, ends = (sizes * part // spread for part in (np.arange(spread), np.arange(1, spread + 1)))
    dealt = ends - begins
    group_of = np.repeat(np.arange(spread), dealt)
    within = np.arange(dealt.sum()) - np.repeat(np.cumsum(dealt) - dealt, dealt)  # counted in each group's part
    position = within + begins[group_of]
    for size in np.unique(sizes).tolist():  # one, but for the group that is incomplete
        own = sizes[group_of] == size
        items = item + groups[group_of[own]] + 1
        position[own] = permute(position[own], size=size, seed=seed, epoch=epoch, item=items)
    found = chosen[group_of, position // block_size] * block_size + position % block_size
    return found[np.lexsort((group_of, within))]  # the groups take turns


def _blocks_per_window(window_documents: int, block_size: int) -> int:
    return max(1, window_documents // block_size)


def documents_between(
    first: int, stop: int, *, documents: int, window_documents: int, block_size: int, seed: int, component: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Documents [first, stop) of a component's order without an end, which is one epoch after another.

    An epoch comes in the order of `documents_of_window`, but for the documents behind the last whole window: they come
    last, shuffled among themselves. So every place of the order is found by a division.

    Args:
        window_documents: About stop - first, since whole windows are computed.

    Returns:
        Indices in [0, documents), and the epoch of each.
    """
    window_documents = _blocks_per_window(window_documents, block_size) * block_size
    in_blocks = documents if block_size == 1 else documents - documents % window_documents
    indices, epochs = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    while first < stop:
        epoch, place = divmod(first, documents)
        if place < in_blocks:
            window, skipped = divmod(place, window_documents)
            found = documents_of_window(
                window,
                documents=in_blocks,
                window_documents=window_documents,
                block_size=block_size,
                seed=seed,
                epoch=epoch,
                component=component,
            )
        else:
            skipped, size = place - in_blocks, documents - in_blocks
            item = (component << COMPONENT_SHIFT) + in_blocks + 1  # above those of all windows
            found = in_blocks + permute(np.arange(size), size=size, seed=seed, epoch=epoch, item=item)
        found = found[skipped : skipped + stop - first]
        indices.append(found)
        epochs.append(np.full(len(found), epoch))
        first += len(found)
    return np.concatenate(indices), np.concatenate(epochs)


def permute(
    indices: NDArray[np.int64], *, size: int, seed: int, epoch: int, item: int | NDArray[np.int64] = 0
) -> NDArray[np.int64]:
    """The documents that stand at `indices` in the order of an epoch.

    A Feistel network on pairs (x // width, x % width) of a grid that holds at least `size` cells. Images outside
    [0, size) go through the network again until they fall inside (cycle walking); the grid exceeds `size` by less than
    its height, so this concerns about one image in sqrt(size).

    Args:
        indices: Each in [0, size).
        size: Number of documents, below 2^62.
        item: Number of the order, so that one seed and epoch have several; at least 0, below 2^62. One for all indices,
            or one for each.

    Returns:
        Same shape; distinct indices give distinct documents in [0, size).

    Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains", method "generalised Feistel".
    """
    height = isqrt(size - 1) + 1
    width = -(-size // height)
    items, item_of = np.unique(item, return_inverse=True)
    rounds = np.tile(np.arange(_ROUNDS), len(items))
    words = draw_words(Stream.DOCUMENT_ORDER, seed=seed, epoch=epoch, item=np.repeat(items, _ROUNDS), index=rounds)
    # Shape [rounds, 1], or [rounds, indices] where each has an item.
    keys = words.view(np.uint64)[:, 0].reshape(-1, _ROUNDS).T[:, item_of.reshape(-1)]
    images = _shuffle_grid(indices.astype(np.uint64), height=height, width=width, keys=keys)
    outside = np.flatnonzero(images >= size)
    while len(outside):
        own = keys[:, outside] if keys.shape[1] > 1 else keys
        images[outside] = _shuffle_grid(images[outside], height=height, width=width, keys=own)
        outside = outside[images[outside] >= size]
    return images.astype(np.int64)


def _shuffle_grid(
    cells: NDArray[np.uint64], *, height: int, width: int, keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """A permutation of the cells [0, height * width): rounds shift the row by a hash of the column, then vice versa."""
    y, x = np.divmod(cells, np.uint64(width))
    for row_key, column_key in zip(keys[0::2], keys[1::2], strict=True):
        y = (y + _hash_below(height, x + row_key)) % np.uint64(height)
        x = (x + _hash_below(width, y + column_key)) % np.uint64(width)
    return y * np.uint64(width) + x


def _hash_below(limit: int, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A hash of each value in [0, limit), limit at most 2^31. Source: Steele et al. 2014, SplitMix64's finaliser."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((values >> np.uint64(32)) * np.uint64(limit)) >> np.uint64(32)


def split_ranges(documents: int, split: str) -> list[range]:
    """The contiguous ranges of documents for training, validation and test, as Megatron cuts them.

    Args:
        documents: Number of documents in the corpus.
        split: One to three weights of any sum, such as `99,1` or `969,30,1`; weight 0 asks for no documents.

    Returns:
        One range per weight; together all documents. Ends are rounded to the nearest document, halves to even.

    Raises:
        ConfigError: Malformed weights, or a part with a weight would be empty.

    Source: megatron-core 0.16.1 datasets/blended_megatron_dataset_config.py (cumulated weights) and
        blended_megatron_dataset_builder.py (rounding).
    """
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
    ranges = [range(start, stop) for start, stop in pairwise(bounds)]
    for part, (weight, members) in enumerate(zip(weights, ranges, strict=True), start=1):
        if weight > 0 and not members:
            raise ConfigError(
                f"--split {split} of {documents:,} documents leaves part {part} (weight {weight:g}) empty; "
                "every part with a weight needs a document. Raise the weight, set it to 0, or use a larger corpus."
            )
    return ranges
