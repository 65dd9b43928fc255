"""Batches of the corpus that preprocessing writes, from text to masked rows and back."""

import json
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest

from megatron_neobert.data.batches.inputs import token_ids_of
from megatron_neobert.data.batches.loader import build_loader
from megatron_neobert.data.batches.masking import MaskingScheme
from megatron_neobert.data.batches.stream import BatchSettings, BatchStream, Source
from megatron_neobert.data.corpus.reader import Corpus
from megatron_neobert.data.preprocessing.plan import PreprocessSettings, plan_preprocessing
from megatron_neobert.data.preprocessing.run import preprocess
from megatron_neobert.data.tokenizer.tokenizer import train_wordpiece

SEQ_LENGTH = 128


@pytest.fixture(scope="module")
def stream(tmp_path_factory) -> BatchStream:
    """300 documents of 1 to 400 words out of 2,000 made-up ones."""
    folder: Path = tmp_path_factory.mktemp("corpus")
    generator = np.random.default_rng(0)
    words = ["".join(chr(97 + letter) for letter in generator.integers(0, 26, 5)) for _ in range(2000)]
    texts = [" ".join(generator.choice(words, length)) for length in generator.integers(1, 401, 300)]
    shard = folder / "texts.jsonl"
    shard.write_text("".join(json.dumps({"content": text}) + "\n" for text in texts))
    tokenizer = train_wordpiece(texts, vocab_size=600, lowercase=True, min_frequency=1)
    tokenizer.save_tokenizer_files(folder / "tokenizer", model_max_length=SEQ_LENGTH)
    plan = plan_preprocessing(
        PreprocessSettings(
            inputs=(str(shard),), output_prefix=str(folder / "made_up"), tokenizer_model=str(folder / "tokenizer")
        )
    )
    preprocess(plan, on_progress=lambda progress: None)
    corpus = Corpus(folder / "made_up_content_document")
    ids = token_ids_of(tokenizer)
    settings = BatchSettings(
        seq_length=SEQ_LENGTH,
        micro_batch_size=1,
        global_batch_size=1,
        long_documents="chunk",
        masking=MaskingScheme(),
        token_ids=ids,
        seed=1,
    )
    return BatchStream((Source(corpus, range(len(corpus.lengths))),), settings)


def test_an_epoch_of_a_preprocessed_corpus_holds_every_token_of_it_once(stream):
    found: Counter = Counter()
    for step in stream.steps():
        (batch,) = step.micro_batches
        original = batch.tokens_t.clone()
        original[batch.masked_positions_m] = batch.labels_m
        bounds = [bound for bound in batch.cu_seqlens_n.tolist() if bound <= batch.real_tokens]
        found.update(tuple(original[start + 1 : stop - 1].tolist()) for start, stop in pairwise(bounds))
        if step.cursor_after.epoch:  # a step is one row, so the epoch ends with a step
            break
    piece = SEQ_LENGTH - 2
    corpus = stream.sources[0].corpus
    assert isinstance(corpus, Corpus)
    documents = [corpus.document(number).tolist() for number in range(len(corpus))]
    expected = Counter(
        tuple(document[start : start + piece]) for document in documents for start in range(0, len(document), piece)
    )
    assert found == expected


def test_workers_read_the_mapped_corpus_like_the_trainer_itself(stream):
    in_workers = islice(build_loader(stream, num_workers=2), 20)
    for step, expected in zip(in_workers, stream.steps(), strict=False):
        assert step.cursor_after == expected.cursor_after
        for batch, own in zip(step.micro_batches, expected.micro_batches, strict=True):
            assert batch.tokens_t.equal(own.tokens_t)
            assert batch.labels_m.equal(own.labels_m)
