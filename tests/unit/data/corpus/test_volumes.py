"""A corpus of several volumes reads as one, and each volume alone is Megatron's."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
from commands import ENVIRONMENT
from unit.data.small_corpus import numbered_tokenizer, random_documents, write_corpus

from megatron_neobert.data.corpus.format import token_dtype
from megatron_neobert.data.corpus.reader import Corpus, check_content

LENGTHS = [3, 1, 4, 2]


@pytest.mark.parametrize("vocab_size", [1000, 70_000])
@pytest.mark.parametrize(("volume_tokens", "volumes"), [(1, 50), (150, 37), (1000, 5), (10_000, 1)])
def test_documents_are_read_from_any_number_of_volumes(tmp_path, vocab_size, volume_tokens, volumes):
    generator = np.random.default_rng(0)
    documents, dtype = random_documents(generator.integers(1, 200, 50), vocab_size), token_dtype(vocab_size)
    shard_bytes = volume_tokens * dtype.itemsize
    write_corpus(tmp_path / "corpus", documents, numbered_tokenizer(vocab_size), shard_bytes=shard_bytes)
    corpus = Corpus(tmp_path / "corpus")
    check_content(corpus)
    assert len(corpus.volumes) == volumes
    assert len(corpus) == len(corpus.lengths) == 50
    everything = np.arange(50)
    assert corpus.lengths[everything].dtype == np.int32
    assert corpus.lengths[everything].tolist() == list(map(len, documents))
    for number in range(50):
        assert np.array_equal(corpus.document(number), documents[number])
    chosen = generator.integers(0, 50, 300)
    starts = generator.integers(0, corpus.lengths[chosen])
    lengths = generator.integers(0, corpus.lengths[chosen] - starts + 1)
    expected = [documents[d][s : s + n] for d, s, n in zip(chosen, starts, lengths, strict=True)]
    found = corpus.gather(chosen, starts, lengths)
    assert found.dtype == dtype
    assert np.array_equal(found, np.concatenate(expected))
    assert corpus.gather(chosen[:0], starts[:0], lengths[:0]).size == 0
    pickled = pickle.dumps(corpus)
    assert len(pickled) < 1000, "another process maps the files itself"
    assert np.array_equal(pickle.loads(pickled).gather(chosen, starts, lengths), found)


def test_limit_of_open_files_is_raised_for_many_volumes(tmp_path):
    write_corpus(tmp_path / "corpus", random_documents([3] * 50, 100), numbered_tokenizer(100), shard_bytes=6)
    script = (
        "import resource, sys\n"
        "from megatron_neobert.data.corpus.reader import Corpus\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (60, 1000))\n"
        "print(len(Corpus(sys.argv[1])), 'documents')\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "corpus")]
    assert (
        subprocess.run(command, capture_output=True, text=True, check=True, env=ENVIRONMENT).stdout == "50 documents\n"
    )
