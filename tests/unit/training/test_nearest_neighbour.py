"""The nearest other row by cosine, found block by block."""

import numpy as np
import torch

from megatron_neobert.training import probe


def test_accuracy_is_that_of_all_pairs_whatever_the_block(monkeypatch):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 100)
    rows = rng.normal(size=(100, 8)) + 0.7 * np.eye(8)[labels]
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    cosines = unit @ unit.T - 3 * np.eye(100)
    expected = (labels[cosines.argmax(1)] == labels).mean()
    assert 0.4 < expected < 0.9, "neither chance nor certainty"
    for block in (1000, 100, 7):
        monkeypatch.setattr(probe, "_COMPARED_AT_ONCE", block)
        for scale in (1.0, rng.uniform(0.1, 9, (100, 1))):  # lengths do not count
            found = probe.nearest_neighbour_accuracy(torch.from_numpy(rows * scale), torch.from_numpy(labels))
            assert found == expected


def test_of_equally_near_rows_the_first_counts():
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0]])
    assert probe.nearest_neighbour_accuracy(rows, torch.tensor([0, 0, 1, 0])) == 2 / 4  # of rows 1 and 3
