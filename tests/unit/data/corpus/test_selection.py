"""Documents chosen by length: the same as a list of them, without the list."""

import numpy as np
import pytest
from unit.data.corpus.memory_corpus import MemoryCorpus

from megatron_neobert.data.corpus.selection import KeptDocuments


class Volumes:
    """Lengths in several arrays, as a corpus of several volumes has them."""

    def __init__(self, *volumes: np.ndarray) -> None:
        self.volumes = volumes

    def length_arrays(self) -> list[np.ndarray]:
        return list(self.volumes)


def lengths_of(documents: int, *, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 1000, documents).astype(np.int32)


def listed(lengths: np.ndarray, documents: range, minimum: int, maximum: int | None) -> list[int]:
    return [
        number for number in documents if lengths[number] >= minimum and (maximum is None or lengths[number] <= maximum)
    ]


@pytest.mark.parametrize("cuts", [[], [1000], [1, 257, 258, 1024], [256, 512, 5000]])
@pytest.mark.parametrize(
    "documents", [range(6000), range(300, 5900), range(256, 512), range(1000, 1001), range(77, 77)]
)
@pytest.mark.parametrize(
    ("minimum", "maximum"), [(1, None), (500, None), (990, None), (1, 20), (400, 450), (1000, None)]
)
def test_kept_documents_are_those_of_a_plain_search(cuts, documents, minimum, maximum):
    lengths = lengths_of(6000)
    kept = KeptDocuments(Volumes(*np.split(lengths, cuts)), documents, minimum=minimum, maximum=maximum)
    expected = listed(lengths, documents, minimum, maximum)
    assert len(kept) == len(expected)
    assert kept.numbers(np.arange(len(kept))).tolist() == expected


def test_a_block_all_of_whose_documents_are_kept_is_counted_in_full():
    """256 does not fit 8 bits."""
    kept = KeptDocuments(MemoryCorpus(np.full(1024, 9)), range(1024), minimum=9, maximum=9)
    assert kept.numbers(np.array([0, 255, 256, 1023])).tolist() == [0, 255, 256, 1023]
