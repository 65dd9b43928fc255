"""A corpus in S3, read by the real client from moto's server."""

from itertools import islice

import numpy as np
import pytest
from unit.data.corpus.memory_corpus import batch_settings, contents
from unit.data.small_corpus import numbered_tokenizer, random_documents, write_corpus

from megatron_neobert.data.batches.loader import build_loader
from megatron_neobert.data.batches.stream import BatchStream, Source
from megatron_neobert.data.corpus.object_storage import ObjectStorage
from megatron_neobert.data.corpus.reader import Corpus
from megatron_neobert.errors import DataError, MissingInputError

s3fs = pytest.importorskip("s3fs")
moto_server = pytest.importorskip("moto.server")


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """A folder with a corpus P in two volumes, and the file system that holds the same in s3://bucket."""
    lengths = np.random.default_rng(0).integers(1, 200, 400)
    write_corpus(tmp_path / "P", random_documents(lengths, 100), numbered_tokenizer(100), shard_bytes=50_000)
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
    for path in tmp_path.glob("P*"):
        file_system.put_file(str(path), f"bucket/{path.name}")
    yield tmp_path, file_system
    s3fs.S3FileSystem.clear_instance_cache()
    file_system.rm("bucket", recursive=True)  # else it would be there for the next server of this process
    server.stop()


def test_batches_from_s3_are_those_of_the_local_corpus_until_an_object_is_replaced(bucket):
    folder, file_system = bucket

    def batches(corpus, workers):
        stream = BatchStream((Source(corpus, range(400)),), batch_settings(seq_length=128))
        return contents(islice(build_loader(stream, num_workers=workers), 10))

    for workers in (0, 1):
        corpus = Corpus("s3://bucket/P", ObjectStorage(folder / f"cache {workers}", limit_bytes=10**9))
        assert batches(corpus, workers) == batches(Corpus(folder / "P"), 0)
    corpus = Corpus("s3://bucket/P", ObjectStorage(folder / "another cache", limit_bytes=10**9))
    for path in folder.glob("P*.bin"):
        file_system.pipe_file(f"bucket/{path.name}", path.read_bytes()[::-1])
    with pytest.raises(DataError, match=r"s3://bucket/P_0000\d\.bin was replaced after this run had opened it"):
        batches(corpus, 1)


def test_prefix_that_is_not_in_the_bucket_is_no_corpus(bucket):
    folder, _ = bucket
    with pytest.raises(MissingInputError, match=r"no corpus s3://bucket/Q: there is no s3://bucket/Q\.json"):
        Corpus("s3://bucket/Q", ObjectStorage(folder / "cache", limit_bytes=10**9))
