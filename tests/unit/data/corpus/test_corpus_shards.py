"""A corpus with several corpus shards reads like one with a single shard."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
from commands import ENVIRONMENT
from unit.data.small_corpus import numbered_tokenizer, random_documents, write_corpus

from megatron_neobert.data.corpus.format import token_dtype
from megatron_neobert.data.corpus.reader import Corpus, check_content


@pytest.mark.parametrize("vocab_size", [1000, 70_000])
@pytest.mark.parametrize(("shard_tokens", "shards"), [(1, 50), (150, 37), (1000, 5), (10_000, 1)])
def test_documents_are_read_from_any_number_of_shards(tmp_path, vocab_size, shard_tokens, shards):
    generator = np.random.default_rng(0)
    documents, dtype = random_documents(generator.integers(1, 200, 50), vocab_size), token_dtype(vocab_size)
    shard_bytes = shard_tokens * dtype.itemsize
    write_corpus(tmp_path / "corpus", documents, numbered_tokenizer(vocab_size), shard_bytes=shard_bytes)
    corpus = Corpus(tmp_path / "corpus")
    check_content(corpus)
    assert (len(corpus.shards), len(corpus)) == (shards, 50)
    all_lengths = corpus.lengths_of(np.arange(50))
    assert (all_lengths.dtype, all_lengths.tolist()) == (np.int32, list(map(len, documents)))
    assert corpus.lengths_between(7, 43).tolist() == all_lengths[7:43].tolist()
    for number in range(50):
        assert np.array_equal(corpus.document(number), documents[number])
    numbers = generator.integers(0, 50, 300)
    starts = generator.integers(0, all_lengths[numbers])
    lengths = generator.integers(0, all_lengths[numbers] - starts + 1)
    expected = [documents[d][s : s + n] for d, s, n in zip(numbers, starts, lengths, strict=True)]
    ids = corpus.gather(numbers, starts, lengths)
    assert ids.dtype == dtype
    assert np.array_equal(ids, np.concatenate(expected))
    assert corpus.gather(numbers[:0], starts[:0], lengths[:0]).size == 0
    pickled = pickle.dumps(corpus)
    assert len(pickled) < 1000, "another process maps the files itself"
    assert np.array_equal(pickle.loads(pickled).gather(numbers, starts, lengths), ids)


def test_limit_of_open_files_is_raised_for_many_shards(tmp_path):
    write_corpus(tmp_path / "corpus", random_documents([3] * 50, 100), numbered_tokenizer(100), shard_bytes=6)
    script = (
        "import resource, sys\n"
        "from megatron_neobert.data.corpus.reader import Corpus\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (60, 1000))\n"
        "print(len(Corpus(sys.argv[1])), 'documents')\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "corpus")]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=ENVIRONMENT)
    assert ended.stdout == "50 documents\n"
