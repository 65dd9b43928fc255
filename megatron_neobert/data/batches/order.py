"""Which document comes next: the shares of training and validation, and the order of an epoch.

The order is a permutation that is computed, not stored: any index of a billion documents costs the same few
operations and no memory, on every rank and in every worker alike (about 7 M indices per second on one core). A corpus
that the page cache cannot hold is shuffled in blocks of neighbouring documents, which a disk reads in one go.
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

_ROUNDS = 12  # at 8, the orders of six documents are visibly uneven; from 12 on they are not


def windows_of_epoch(documents: int, *, window_documents: int, block_size: int) -> int:
    """How many windows `documents_of_window` cuts an epoch into."""
    blocks = -(-documents // block_size)
    return -(-blocks // _blocks_per_window(window_documents, block_size))


def documents_of_window(
    window: int, *, documents: int, window_documents: int, block_size: int, seed: int, epoch: int, component: int = 0
) -> NDArray[np.int64]:
    """Indices in [0, documents) of a window's documents, in the order of an epoch.

    Args:
        window_documents: How many a window holds; fewer at the end of the epoch, or where the last block is incomplete.
        block_size: Neighbours that stay in one window. Above 1 the blocks are permuted, and the documents of a window
            among themselves. One block is the least that a window holds.
        component: Which part of a blend; each has an order of its own. At least 0, below 2^14.
    """
    item = component << COMPONENT_SHIFT
    blocks, per_window = -(-documents // block_size), _blocks_per_window(window_documents, block_size)
    places = np.arange(window * per_window, min((window + 1) * per_window, blocks))
    chosen = permute(places, size=blocks, seed=seed, epoch=epoch, item=item)
    if block_size == 1:
        return chosen
    members = (chosen[:, None] * block_size + np.arange(block_size)).reshape(-1)
    members = members[members < documents]
    within = permute(np.arange(len(members)), size=len(members), seed=seed, epoch=epoch, item=item + window + 1)
    return members[within]


def _blocks_per_window(window_documents: int, block_size: int) -> int:
    return max(1, window_documents // block_size)


def documents_between(
    first: int, stop: int, *, documents: int, window_documents: int, block_size: int, seed: int, component: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Documents [first, stop) of a component's order without an end, which is one epoch after another.

    An epoch comes in the order of `documents_of_window`, but for the documents behind the last whole block: they come
    last, shuffled among themselves. So every place of the order is found by a division.

    Args:
        window_documents: About stop - first, since whole windows are computed.

    Returns:
        Indices in [0, documents), and the epoch of each.
    """
    in_blocks = documents - documents % block_size
    window_documents = _blocks_per_window(window_documents, block_size) * block_size
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


def permute(indices: NDArray[np.int64], *, size: int, seed: int, epoch: int, item: int = 0) -> NDArray[np.int64]:
    """The documents that stand at `indices` in the order of an epoch.

    A Feistel network on pairs (x // width, x % width) of a grid that holds at least `size` cells. Images outside
    [0, size) go through the network again until they fall inside (cycle walking); the grid exceeds `size` by less than
    its height, so this concerns about one image in sqrt(size).

    Args:
        indices: Each in [0, size).
        size: Number of documents, below 2^62.
        item: Gives another order of the same seed and epoch; at least 0, below 2^62.

    Returns:
        Same shape; distinct indices give distinct documents in [0, size).

    Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains", method "generalised Feistel".
    """
    height = isqrt(size - 1) + 1
    width = -(-size // height)
    keys = draw_words(Stream.DOCUMENT_ORDER, seed=seed, epoch=epoch, item=item, index=np.arange(_ROUNDS)).view(
        np.uint64
    )
    images = _shuffle_grid(indices.astype(np.uint64), height=height, width=width, keys=keys[:, 0])
    outside = np.flatnonzero(images >= size)
    while len(outside):
        images[outside] = _shuffle_grid(images[outside], height=height, width=width, keys=keys[:, 0])
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
