"""Corpora behind URLs, including S3: the same batches as from a local disk, through a cache of bounded size."""

import os
import shutil
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from object_server import ObjectServer
from unit.data.corpus.memory_corpus import contents, stream_over
from unit.data.small_corpus import documents_in, random_documents, write_attributes, write_corpus

from megatron_neobert.data.batches.loader import build_loader
from megatron_neobert.data.batches.order import SplitPart
from megatron_neobert.data.batches.windows import Source
from megatron_neobert.data.corpus import object_storage
from megatron_neobert.data.corpus.attributes import add_attribute, choose_documents
from megatron_neobert.data.corpus.object_storage import ObjectStorage
from megatron_neobert.data.corpus.reader import Corpus, check_content
from megatron_neobert.errors import DataError, MissingInputError, StorageError
from megatron_neobert.runtime.own_files import claim_folder

pytest.importorskip("aiohttp")

DOCUMENTS = 600
BLOCK_BYTES = 4096


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """600 documents of 1 to 200 ids in four corpus shards."""
    folder = tmp_path_factory.mktemp("original")
    lengths = np.random.default_rng(0).integers(1, 200, DOCUMENTS)
    write_corpus(folder / "P", random_documents(lengths, 100), shard_bytes=40_000)
    return folder


@pytest.fixture(scope="module")
def expected(original):
    """The first batches of the local corpus."""
    return batches(Corpus(original / "P"), steps=40)


@pytest.fixture
def server(original, tmp_path, monkeypatch):
    """A server with a copy of the corpus, which tests may change."""
    monkeypatch.setattr(object_storage, "BLOCK_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(object_storage, "_WAITS_SECONDS", (0.01,) * 4)
    shutil.copytree(original, tmp_path / "bucket")
    with ObjectServer(tmp_path / "bucket").running() as running:
        yield running


@pytest.fixture
def storage(tmp_path):
    return ObjectStorage(tmp_path / "cache")


def count_requests(server, suffix):
    """Return how often each range of the files with this suffix was requested, by file and first byte."""
    return Counter((r.name, r.begin) for r in server.requests if r.method == "GET" and r.name.endswith(suffix))


def batches(corpus, *, steps=12, workers=0):
    stream = stream_over((Source(corpus, SplitPart((DOCUMENTS,), 0)),))
    return contents(islice(build_loader(stream, num_workers=workers), steps))


def cached_blocks(storage):
    """Return the paths of all complete blocks; a thread may be writing others."""
    return sorted((storage.folder / "blocks").glob("*/*[0-9]"))


def replace_objects(server, time):
    """Replace every .bin by a file of the same size."""
    for path in server.folder.glob("P_*.bin"):
        path.write_bytes(path.read_bytes())
        os.utime(path, (time, time))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_equal_those_of_the_local_corpus_and_each_block_is_fetched_once(server, storage, expected, workers):
    corpus = Corpus(f"{server.url}/P", storage)
    assert not count_requests(server, ".bin")
    assert batches(corpus, workers=workers) == expected[:12]
    # Both workers read the same windows.
    assert set(count_requests(server, ".bin").values()) == {1}
    check_content(corpus)


def test_indexes_are_fetched_once_until_the_manifest_changes(server, storage):
    for _ in range(2):
        Corpus(f"{server.url}/P", storage)
    assert list(count_requests(server, ".idx").values()) == [1] * 4
    # A truncated local copy is replaced.
    copy = next(storage.folder.rglob("P_00001.idx"))
    copy.write_bytes(copy.read_bytes()[:-1])
    Corpus(f"{server.url}/P", storage)
    assert sorted(count_requests(server, ".idx").values()) == [1, 1, 1, 2]
    manifest = server.folder / "P.json"
    manifest.write_text(manifest.read_text().replace('"content"', '"other"'))
    assert Corpus(f"{server.url}/P", storage).manifest.text_key == "other"
    assert sorted(count_requests(server, ".idx").values()) == [2, 2, 2, 3]


def test_documents_of_a_remote_corpus_are_chosen_by_a_copy_of_its_attributes(tmp_path, storage):
    (tmp_path / "bucket").mkdir()
    write_corpus(tmp_path / "bucket" / "P", random_documents([3] * 20, 100))
    write_attributes(tmp_path / "bucket" / "P", {"score": range(20)})
    add_attribute(Corpus(tmp_path / "bucket" / "P"), "test", "added", [*range(17), None, 18.5, 20])
    with ObjectServer(tmp_path / "bucket").running() as running:
        choose_documents(Corpus(f"{running.url}/P", storage), ["length>2"])
        assert not count_requests(running, ".parquet")
        for _ in range(2):
            remote = Corpus(f"{running.url}/P", storage)
            assert documents_in(choose_documents(remote, ["score>=15 and score!=added"]), 20) == [18, 19]
            # A damaged copy is fetched again.
            copy = next(storage.folder.rglob("P.attributes.parquet"))
            copy.write_bytes(copy.read_bytes()[::-1])


def test_blocks_stay_below_the_limit_and_batches_are_the_same(server, storage, expected, monkeypatch):
    monkeypatch.setattr(object_storage, "LIMIT_BYTES", 6 * BLOCK_BYTES)
    assert batches(Corpus(f"{server.url}/P", storage), steps=40) == expected
    storage.fetching.threads.shutdown()
    storage.add_written(BLOCK_BYTES)
    assert 0 < sum(path.stat().st_size for path in cached_blocks(storage)) <= 6 * BLOCK_BYTES


@pytest.mark.parametrize("damage", ["changed", "cut", "empty", "removed"])
def test_damaged_block_of_the_cache_is_fetched_again(server, storage, expected, damage):
    assert batches(Corpus(f"{server.url}/P", storage)) == expected[:12]
    # Threads may still be writing prefetched blocks.
    storage.fetching.threads.shutdown()
    for path in cached_blocks(storage):
        content = bytearray(path.read_bytes())
        content[7] ^= 1
        after = {"changed": content, "cut": content[:-9], "empty": b""}.get(damage)
        path.unlink() if after is None else path.write_bytes(after)
    assert batches(Corpus(f"{server.url}/P", ObjectStorage(storage.folder))) == expected[:12]
    assert max(count_requests(server, ".bin").values()) == 2


@pytest.mark.parametrize("fault", ["503", "cut", "short"])
def test_failed_requests_are_repeated(server, storage, expected, fault):
    requests = Counter()

    def fail_twice(method, name):
        # An answer to HEAD has no body, and one with another size is not a failure but another object.
        if method == "HEAD" and fault != "503":
            return None
        requests[method, name] += 1
        return fault if requests[method, name] <= 2 else None

    server.fault_of = fail_twice
    assert batches(Corpus(f"{server.url}/P", storage)) == expected[:12]


@pytest.mark.parametrize("workers", [0, 1])
def test_object_that_cannot_be_read_ends_the_run_with_exit_code_74_and_its_name(server, storage, workers):
    corpus = Corpus(f"{server.url}/P", storage)
    server.fault_of = lambda method, name: "503" if name == "P_00002.bin" else None
    with pytest.raises(StorageError, match=r"http://127.*P_00002\.bin could not be read in 5 attempts.*503") as caught:
        batches(corpus, workers=workers)
    assert caught.value.exit_code == 74


def test_object_that_is_replaced_during_a_run_ends_the_run(server, storage):
    corpus = Corpus(f"{server.url}/P", storage)
    replace_objects(server, time=1)
    message = r"P_0000\d\.bin was replaced after this run had opened it: expected version .* bytes, found"
    with pytest.raises(DataError, match=message):
        batches(corpus)
    assert not cached_blocks(storage)


def test_block_of_a_replaced_object_is_not_taken_from_the_cache(server, storage, expected):
    for time in (1, 2):
        replace_objects(server, time)
        storage = ObjectStorage(storage.folder)
        assert batches(Corpus(f"{server.url}/P", storage)) == expected[:12]
        # Wait for prefetched blocks.
        storage.fetching.threads.shutdown()
        assert set(count_requests(server, ".bin").values()) == {time}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("P_00001.bin", lambda content: content + b"\0\0", r"1\.bin: expected \d+ bytes as in the manifest, found"),
        ("P_00001.idx", lambda content: content[:-1] + b"\1", r"P_00001\.idx: expected sha256 \w{64} as in the"),
    ],
)
def test_object_that_contradicts_the_manifest_is_refused_on_open(server, storage, name, change, message):
    path = server.folder / name
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=message):
        Corpus(f"{server.url}/P", storage)
    with pytest.raises(MissingInputError, match=r"no corpus http://.*/Q: there is no http://.*/Q\.json"):
        Corpus(f"{server.url}/Q", storage)


def test_cache_that_cannot_be_written_is_reported_with_its_flag(server, tmp_path):
    # A file where a folder must be.
    claim_folder(tmp_path / "cache")
    (tmp_path / "cache" / "blocks").write_bytes(b"")
    corpus = Corpus(f"{server.url}/P", ObjectStorage(tmp_path / "cache"))
    with pytest.raises(StorageError, match=r"--object-storage-cache-path: .*cache/blocks.* cannot be read or written"):
        batches(corpus)


@pytest.fixture
def bucket(original, monkeypatch):
    """The s3fs file system of a mocked server, with the corpus in s3://bucket."""
    s3fs, moto_server = pytest.importorskip("s3fs"), pytest.importorskip("moto.server")
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in (
        ("AWS_ENDPOINT_URL", f"http://{host}:{port}"),
        ("AWS_ACCESS_KEY_ID", "somebody"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    # Cached instances know the server of another test.
    s3fs.S3FileSystem.clear_instance_cache()
    file_system = s3fs.S3FileSystem(skip_instance_cache=True)
    file_system.mkdir("bucket")
    for path in original.glob("P*"):
        file_system.put_file(str(path), f"bucket/{path.name}")
    yield file_system
    s3fs.S3FileSystem.clear_instance_cache()
    # All servers of a process share their buckets.
    file_system.rm("bucket", recursive=True)
    server.stop()


def test_batches_from_s3_equal_those_of_the_local_corpus_until_an_object_is_replaced(
    bucket, original, expected, tmp_path
):
    for workers in (0, 1):
        corpus = Corpus("s3://bucket/P", ObjectStorage(tmp_path / f"cache {workers}"))
        assert batches(corpus, workers=workers) == expected[:12]
    corpus = Corpus("s3://bucket/P", ObjectStorage(tmp_path / "another cache"))
    for path in original.glob("P*.bin"):
        bucket.pipe_file(f"bucket/{path.name}", path.read_bytes()[::-1])
    with pytest.raises(DataError, match=r"s3://bucket/P_0000\d\.bin was replaced after this run had opened it"):
        batches(corpus, workers=1)
