"""Exact duplicates: the same as a Python set finds, for any size of steps and buckets."""

from itertools import product

import numpy as np
import pytest

from megatron_neobert.data.corpus import exact_duplicates, shard_files
from megatron_neobert.data.corpus.exact_duplicates import find_exact_duplicates


def write_hashes(folder, hashes, files=3):
    """Write 16-byte hashes to several files."""
    paths = [folder / f"{number}.hashes" for number in range(files)]
    for path, indices in zip(paths, np.array_split(np.arange(len(hashes)), files), strict=True):
        path.write_bytes(b"".join(hashes[index] for index in indices))
    return paths


@pytest.mark.parametrize(("step", "bucket"), [(1 << 20, 1 << 24), (7, 5), (1, 1), (64, 64)])
@pytest.mark.parametrize("seed", range(3))
def test_duplicates_are_those_that_a_set_finds(tmp_path, monkeypatch, step, bucket, seed):
    """Many hashes agree in one half only."""
    monkeypatch.setattr(shard_files, "_ITEMS_PER_STEP", step)
    monkeypatch.setattr(exact_duplicates, "_BUCKET_DOCUMENTS", bucket)
    generator = np.random.default_rng(seed)
    halves = [generator.bytes(8) for _ in range(7)]
    distinct = [first + second for first, second in product(halves, halves)]
    hashes = [distinct[index] for index in generator.integers(0, 49, 100)]
    seen = set()
    expected = [hash_ in seen or seen.add(hash_) is not None for hash_ in hashes]
    assert 0 < sum(expected) < 100
    assert find_exact_duplicates(write_hashes(tmp_path, hashes), tmp_path).tolist() == expected
    assert {file.suffix for file in tmp_path.iterdir()} == {".hashes"}, "buckets are removed"
