"""Duplicates among hashes: the same as a set finds, whatever the buckets and chunks."""

import numpy as np
import pytest

from megatron_neobert.data.corpus import exact_duplicates, volumes
from megatron_neobert.data.corpus.exact_duplicates import find_exact_duplicates


def write_hashes(folder, hashes, files=3):
    """16-byte hashes in several files."""
    paths = []
    for number, some in enumerate(np.array_split(np.arange(len(hashes)), files)):
        paths.append(folder / f"{number}.hashes")
        paths[-1].write_bytes(b"".join(hashes[index] for index in some))
    return paths


def expected_duplicates(hashes):
    seen = set()
    return [hash_ in seen or seen.add(hash_) is not None for hash_ in hashes]


@pytest.fixture(params=[(1 << 20, 1 << 24), (7, 5), (1, 1), (64, 64)], ids=str)
def sizes(request, monkeypatch):
    """Documents read at a time, and of a bucket."""
    chunk, bucket_documents = request.param
    monkeypatch.setattr(volumes, "_CHUNK", chunk)
    monkeypatch.setattr(exact_duplicates, "_BUCKET_DOCUMENTS", bucket_documents)


@pytest.mark.parametrize("seed", range(3))
def test_duplicates_are_those_that_a_set_finds(tmp_path, sizes, seed):
    generator = np.random.default_rng(seed)
    distinct = [generator.bytes(16) for _ in range(50)]
    hashes = [distinct[index] for index in generator.integers(0, 50, 100)]
    found = find_exact_duplicates(write_hashes(tmp_path, hashes), tmp_path)
    assert 0 < found.sum() < 100
    assert found.tolist() == expected_duplicates(hashes)
    assert {file.suffix for file in tmp_path.iterdir()} == {".hashes"}, "buckets are removed"


def test_hashes_that_agree_in_one_half_alone_are_different(tmp_path, sizes):
    halves = [b"a" * 8, b"b" * 8, b"c" * 8]
    hashes = [first + second for first in halves for second in halves]
    paths = write_hashes(tmp_path, hashes)
    assert not find_exact_duplicates(paths, tmp_path).any()
    paths.append(paths[1])  # negative control
    found = find_exact_duplicates(paths, tmp_path)
    assert found.tolist() == [False] * 9 + [True] * 3


def test_one_text_a_thousand_times_is_kept_once_and_swells_no_bucket(tmp_path, monkeypatch):
    monkeypatch.setattr(volumes, "_CHUNK", 100)
    monkeypatch.setattr(exact_duplicates, "_BUCKET_DOCUMENTS", 1000)
    loaded = []
    original = exact_duplicates.repeated
    monkeypatch.setattr(exact_duplicates, "repeated", lambda hashes: loaded.append(hashes.size) or original(hashes))
    paths = write_hashes(tmp_path, [b"0123456789abcdef"] * 1000, files=1)
    found = find_exact_duplicates(paths, tmp_path)
    assert found.tolist() == [False] + [True] * 999
    assert loaded == [100] * 10 + [10]  # ten chunks, and one bucket with one entry of each
