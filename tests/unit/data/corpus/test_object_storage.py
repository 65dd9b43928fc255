"""Corpora behind URLs, S3 among them: the same batches as from a disk, through a bounded cache."""

import os
import shutil
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from object_server import ObjectServer
from unit.data.corpus.memory_corpus import batch_settings, contents
from unit.data.small_corpus import numbered_tokenizer, random_documents, write_attributes, write_corpus

from megatron_neobert.data.batches.loader import build_loader
from megatron_neobert.data.batches.stream import BatchStream, Source
from megatron_neobert.data.batches.windows import Cursor
from megatron_neobert.data.corpus import object_storage
from megatron_neobert.data.corpus.attributes import ChosenDocuments, choose_documents
from megatron_neobert.data.corpus.object_storage import ObjectStorage
from megatron_neobert.data.corpus.reader import Corpus, check_content
from megatron_neobert.errors import DataError, MissingInputError, StorageError

pytest.importorskip("aiohttp")

DOCUMENTS = 600
BLOCK = 4096  # bytes


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """600 documents of 1 to 200 ids in four volumes."""
    folder = tmp_path_factory.mktemp("original")
    lengths = np.random.default_rng(0).integers(1, 200, DOCUMENTS)
    write_corpus(folder / "P", random_documents(lengths, 100), numbered_tokenizer(100), shard_bytes=40_000)
    return folder


@pytest.fixture
def server(original, tmp_path, monkeypatch):
    """Serves a copy of them, which tests may change."""
    monkeypatch.setattr(object_storage, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(object_storage, "_WAITS_SECONDS", (0.01,) * 4)
    shutil.copytree(original, tmp_path / "bucket")
    with ObjectServer(tmp_path / "bucket").running() as running:
        yield running


@pytest.fixture
def storage(tmp_path):
    return ObjectStorage(tmp_path / "cache")


def fetched(server, ending, method="GET"):
    """What was asked for: file and first byte, with how often."""
    asked = ((r.name, r.begin) for r in server.requests if r.method == method and r.name.endswith(ending))
    return Counter(asked)


def stream(corpus, *, cursor=Cursor(), **settings):  # noqa: B008  frozen
    return BatchStream((Source(corpus, range(DOCUMENTS)),), batch_settings(**settings), cursor=cursor)


def batches(corpus, *, steps=12, workers=0, **settings):
    return contents(islice(build_loader(stream(corpus, **settings), num_workers=workers), steps))


def blocks_in(storage):
    """Complete ones; a thread may still be at work."""
    return sorted((storage.folder / "blocks").glob("*/*[0-9]"))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_from_a_url_are_those_of_the_local_corpus_and_each_block_is_fetched_once(
    server, storage, original, workers
):
    corpus = Corpus(f"{server.url}/P", storage)
    assert not fetched(server, ".bin")
    assert batches(corpus, workers=workers) == batches(Corpus(original / "P"))
    assert set(fetched(server, ".bin").values()) == {1}  # by two workers that read the same windows
    check_content(corpus)


def test_indexes_are_fetched_once_until_the_manifest_changes(server, storage):
    for _ in range(2):
        Corpus(f"{server.url}/P", storage)
    assert set(fetched(server, ".idx").values()) == {1} and len(fetched(server, ".idx")) == 4
    cut = next(storage.folder.rglob("P_00001.idx"))
    cut.write_bytes(cut.read_bytes()[:-1])
    Corpus(f"{server.url}/P", storage)  # a local copy that was cut off is replaced
    assert sorted(fetched(server, ".idx").values()) == [1, 1, 1, 2]
    manifest = server.folder / "P.json"
    manifest.write_text(manifest.read_text().replace('"content"', '"other"'))
    assert Corpus(f"{server.url}/P", storage).manifest.text_key == "other"
    assert sorted(fetched(server, ".idx").values()) == [2, 2, 2, 3]


def test_documents_of_a_remote_corpus_are_chosen_by_the_copy_of_its_attributes(tmp_path, storage):
    (tmp_path / "bucket").mkdir()
    write_corpus(tmp_path / "bucket" / "P", random_documents([3] * 20, 100), numbered_tokenizer(100))
    write_attributes(tmp_path / "bucket" / "P", {"score": range(20)})
    with ObjectServer(tmp_path / "bucket").running() as running:
        choose_documents(Corpus(f"{running.url}/P", storage), ["length>2"], None)
        assert not fetched(running, ".parquet")
        for _ in range(2):
            remote = Corpus(f"{running.url}/P", storage)
            chosen = ChosenDocuments(choose_documents(remote, ["score>=15"], None), range(20))
            assert chosen.numbers(np.arange(len(chosen))).tolist() == [15, 16, 17, 18, 19]
            copy = next(storage.folder.rglob("P.attributes.parquet"))
            copy.write_bytes(copy.read_bytes()[::-1])  # damaged: it is fetched again


def test_blocks_stay_below_the_limit_and_batches_the_same(server, storage, original, monkeypatch):
    monkeypatch.setattr(object_storage, "LIMIT_BYTES", 6 * BLOCK)
    assert batches(Corpus(f"{server.url}/P", storage), steps=40) == batches(Corpus(original / "P"), steps=40)
    storage.fetching.threads.shutdown()
    storage.count_written(BLOCK)
    assert 0 < sum(path.stat().st_size for path in blocks_in(storage)) <= 6 * BLOCK


@pytest.mark.parametrize("damage", ["changed", "cut", "empty", "removed"])
def test_damaged_block_of_the_cache_is_fetched_again(server, storage, original, damage):
    before = batches(Corpus(f"{server.url}/P", storage))
    storage.fetching.threads.shutdown()  # they may still write blocks that were ordered ahead
    for path in blocks_in(storage):
        content = bytearray(path.read_bytes())
        content[7] ^= 1
        after = {"changed": content, "cut": content[:-9], "empty": b""}.get(damage)
        path.unlink() if after is None else path.write_bytes(after)
    corpus = Corpus(f"{server.url}/P", ObjectStorage(storage.folder))
    assert batches(corpus) == before == batches(Corpus(original / "P"))
    assert max(fetched(server, ".bin").values()) == 2


@pytest.mark.parametrize("fault", ["503", "cut", "short"])
def test_what_fails_now_and_then_is_asked_for_again(server, storage, original, fault):
    seen = Counter()

    def first_two(method, name):
        seen[method, name] += 1
        return fault if seen[method, name] <= 2 and not (fault == "cut" and method == "HEAD") else None

    server.fault_of = first_two
    if fault == "short":  # says another size, and a size is what HEAD is asked for
        server.fault_of = lambda method, name: first_two(method, name) if method == "GET" else None
    assert batches(Corpus(f"{server.url}/P", storage)) == batches(Corpus(original / "P"))


@pytest.mark.parametrize("workers", [0, 1])
def test_object_that_cannot_be_read_ends_the_run_with_74_and_its_name(server, storage, workers):
    corpus = Corpus(f"{server.url}/P", storage)
    server.fault_of = lambda method, name: "503" if name == "P_00002.bin" else None
    with pytest.raises(StorageError, match=r"http://127.*P_00002\.bin could not be read in 5 attempts.*503") as caught:
        batches(corpus, workers=workers)
    assert caught.value.exit_code == 74


def test_object_that_is_replaced_under_the_run_ends_it(server, storage):
    corpus = Corpus(f"{server.url}/P", storage)
    for path in server.folder.glob("P_*.bin"):
        path.write_bytes(path.read_bytes())  # the same size
        os.utime(path, (1, 1))
    with pytest.raises(
        DataError, match=r"P_0000\d\.bin was replaced after this run had opened it: expected version .* bytes, found"
    ):
        batches(corpus)
    assert not blocks_in(storage)  # of what was fetched


def test_block_of_a_replaced_object_is_not_taken_from_the_cache(server, storage, original):
    for time in (1, 2):
        for path in server.folder.glob("P_*.bin"):
            os.utime(path, (time, time))
        storage = ObjectStorage(storage.folder)
        assert batches(Corpus(f"{server.url}/P", storage)) == batches(Corpus(original / "P"))
        storage.fetching.threads.shutdown()  # what is announced has been fetched
        assert set(fetched(server, ".bin").values()) == {time}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "P_00001.bin",
            lambda content: content + b"\0\0",
            r"P_00001\.bin: expected \d+ bytes as in the manifest, found",
        ),
        ("P_00001.idx", lambda content: content[:-8], r"P_00001\.idx: expected \d+ bytes as in the manifest"),
        ("P_00001.idx", lambda content: content[:-1] + b"\1", r"P_00001\.idx: expected sha256 \w{64} as in the"),
        ("P.json", lambda content: content[:-9], r"P\.json: not a manifest"),
    ],
)
def test_object_that_is_not_the_manifests_is_refused_on_open(server, storage, name, content, message):
    path = server.folder / name
    path.write_bytes(content(path.read_bytes()))
    with pytest.raises(DataError, match=message):
        Corpus(f"{server.url}/P", storage)


def test_prefix_without_manifest_is_no_corpus(server, storage):
    with pytest.raises(MissingInputError, match=r"no corpus http://.*/Q: there is no http://.*/Q\.json"):
        Corpus(f"{server.url}/Q", storage)


def test_cache_that_cannot_be_written_is_named(server, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "blocks").write_bytes(b"")  # a file where a folder must be
    corpus = Corpus(f"{server.url}/P", ObjectStorage(tmp_path / "cache"))
    with pytest.raises(StorageError, match=r"--object-storage-cache-path: .*cache/blocks.* cannot be written"):
        batches(corpus)


# --- S3


@pytest.fixture
def bucket(original, monkeypatch):
    """The file system that has the same in s3://bucket."""
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
    s3fs.S3FileSystem.clear_instance_cache()  # of those that know another server
    file_system = s3fs.S3FileSystem(skip_instance_cache=True)
    file_system.mkdir("bucket")
    for path in original.glob("P*"):
        file_system.put_file(str(path), f"bucket/{path.name}")
    yield file_system
    s3fs.S3FileSystem.clear_instance_cache()
    file_system.rm("bucket", recursive=True)  # else it would be there for the next server of this process
    server.stop()


def test_batches_from_s3_are_those_of_the_local_corpus_until_an_object_is_replaced(bucket, original, tmp_path):
    for workers in (0, 1):
        corpus = Corpus("s3://bucket/P", ObjectStorage(tmp_path / f"cache {workers}"))
        assert batches(corpus, workers=workers) == batches(Corpus(original / "P"))
    corpus = Corpus("s3://bucket/P", ObjectStorage(tmp_path / "another cache"))
    for path in original.glob("P*.bin"):
        bucket.pipe_file(f"bucket/{path.name}", path.read_bytes()[::-1])
    with pytest.raises(DataError, match=r"s3://bucket/P_0000\d\.bin was replaced after this run had opened it"):
        batches(corpus, workers=1)
