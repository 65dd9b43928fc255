"""Batches of one corpus do not change with the version, so that the checkpoints of releases resume with them."""

import hashlib
from itertools import islice

import numpy as np
import pytest
from unit.data.corpus.memory_corpus import BERT, IDS, PAPER, MemoryCorpus, bits_of, ranks_of, stream_over

from megatron_neobert.data.batches.batch import BatchStream
from megatron_neobert.data.batches.windows import Cursor, Source
from megatron_neobert.data.corpus.attributes import ChosenDocuments


def arithmetic_corpus() -> MemoryCorpus:
    """9,000 documents of 1 to 311 tokens, made without a random generator, which may change between versions."""
    corpus = MemoryCorpus(1 + np.arange(9000) * 7919 % 311)
    ids = np.arange(len(corpus.ids)) * 2654435761 % 997 + 3
    corpus.ids = np.maximum(ids, 4).astype(np.uint16)
    return corpus


def digest(stream: BatchStream) -> tuple[Cursor, str]:
    """Return the last cursor and the hash of every seventh of 420 steps, about three epochs."""
    content = hashlib.sha256()
    for step in islice(stream.rank_batches(), 0, 420, 7):
        content.update(repr(tuple(vars(step.cursor_after).values())).encode())
        for batch in step.micro_batches:
            for tensor in (batch.tokens_t, batch.labels_m, batch.masked_positions_m, batch.cu_seqlens_n):
                content.update(tensor.numpy().tobytes())
            content.update(f"{batch.max_seqlen} {batch.real_tokens}".encode())
    return step.cursor_after, content.hexdigest()


@pytest.mark.parametrize(
    ("long_documents", "masking", "cursor", "expected"),
    [
        ("truncate", PAPER, (3, 1, 1990), "18f86efb84b76cdfdaccbc28fd41bb859afdb713d461d1d7fc6e7a57cfc689a8"),
        ("truncate", BERT, (3, 1, 1990), "9fce1b0e35933a22554e028d667c698ae751caab58d2a1a608053d6af6b31abb"),
        ("chunk", PAPER, (2, 0, 4551), "84011ef8f60c86a9beaf265305362b81a7049dd5acef27a11f8ee087fe41fd5c"),
        ("chunk", BERT, (2, 0, 4551), "9e1abc29e3535f21d8b9f3239022e2b575403db3de93eae0087e7ef218b98a46"),
    ],
)
def test_batches_of_one_corpus_are_those_of_the_first_release(long_documents, masking, cursor, expected):
    sizes = {"seq_length": 128, "micro_batch_size": 4, "global_batch_size": 64}
    chosen = ChosenDocuments(bits_of((np.arange(9000) >= 100) & (np.arange(9000) < 8900)))
    sources = (Source(arithmetic_corpus(), chosen),)
    _, stream = ranks_of(stream_over(sources, long_documents=long_documents, **sizes, **masking), 2)
    assert IDS.special == (0, 1, 2, 3, 4)
    assert digest(stream) == (Cursor(*cursor), expected)
