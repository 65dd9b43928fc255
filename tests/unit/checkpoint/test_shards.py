"""A range of a flattened tensor is split into few boxes, which hold its elements in order."""

import numpy as np
import pytest

from megatron_neobert.checkpoint.shards import split_range

SHAPES = [(), (7,), (1, 1), (3, 4), (5, 1), (1, 6), (4, 3, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_boxes_of_every_range_hold_its_elements_in_order(shape: tuple[int, ...]):
    elements = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    for start in range(elements.size + 1):
        for stop in range(start, elements.size + 1):
            boxes = [
                elements[tuple(slice(begin, begin + size) for begin, size in zip(offsets, box, strict=True))]
                for offsets, box in split_range(shape, start, stop)
            ]
            found = np.concatenate([np.array([], dtype=int), *(box.ravel() for box in boxes)])
            assert found.tolist() == list(range(start, stop)), (start, stop, boxes)
            assert all(box.size for box in boxes)
            assert len(boxes) <= max(1, 2 * len(shape) - 1), "a matrix has at most three boxes"
