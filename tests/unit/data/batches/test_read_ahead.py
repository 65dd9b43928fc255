"""Documents that are announced before they are read, where the corpus is shuffled in blocks."""

import mmap
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from unit.data.corpus.memory_corpus import contents, stream_of
from unit.data.small_corpus import numbered_tokenizer, random_documents, write_corpus

from megatron_neobert.data.batches.stream import StepBatches
from megatron_neobert.data.corpus.reader import Corpus

PAGE = mmap.PAGESIZE


class RecordingMap:
    """In place of a mapped file: what the operating system is asked to read."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def madvise(self, advice: int, start: int, length: int) -> None:
        assert advice == mmap.MADV_WILLNEED
        assert start % PAGE == 0  # else the operating system refuses
        self.asked.append((start, start + length))


@pytest.fixture(scope="module")
def volumes(tmp_path_factory) -> Corpus:
    """2,000 documents of 150 to 250 ids in several volumes, 200 KB each."""
    folder = tmp_path_factory.mktemp("corpus")
    lengths = np.random.default_rng(0).integers(150, 250, 2000)
    write_corpus(folder / "P", random_documents(lengths, 100), numbered_tokenizer(100), shard_bytes=200_000)
    corpus = Corpus(folder / "P")
    assert len(corpus.volumes) == 5
    return corpus


def asked(corpus: Corpus, documents: np.ndarray, monkeypatch, **options) -> list[list[tuple[int, int]]]:
    """The ranges of bytes of each volume that are asked for."""
    maps = [RecordingMap() for _ in corpus.volumes]
    for volume, recording in zip(corpus.volumes, maps, strict=True):
        monkeypatch.setattr(volume, "content", recording)
    corpus.will_need(documents, **options)
    return [recording.asked for recording in maps]


def bytes_of(corpus: Corpus, number: int) -> tuple[int, int, int]:
    """Volume, first byte and end of a document."""
    for at, volume in enumerate(corpus.volumes):
        if number < len(volume.lengths):
            begin = int(volume.pointers[number])
            return at, begin, begin + 2 * int(volume.lengths[number])
        number -= len(volume.lengths)
    raise AssertionError(number)


def test_every_byte_of_the_documents_is_asked_for(volumes, monkeypatch):
    documents = np.random.default_rng(1).permutation(2000)[:60]
    ranges = asked(volumes, documents, monkeypatch)
    for number in documents.tolist():
        volume, begin, end = bytes_of(volumes, number)
        assert any(start <= begin and end <= stop for start, stop in ranges[volume])


@pytest.mark.usefixtures("windows_of_40_documents")
def test_each_step_announces_what_this_rank_reads_in_the_next_and_changes_no_batch(corpus):
    own = replace(stream_of(corpus, document_block_size=10), data_parallel_rank=1, data_parallel_size=2)
    batches = list(islice(own.global_batches(), 31))
    for number, (step, (rows, cursor)) in enumerate(zip(own.steps(), batches[:30], strict=False), start=1):
        announced = [rows for rows, _ in batches[0 if number == 1 else number : number + 1]]  # at first two at once
        ours = [rows.take(first, first + 2).segments.documents_n for rows in announced for first in (2, 6)]
        assert np.concatenate(corpus.announced).tolist() == np.concatenate(ours).tolist()
        assert contents([step]) == contents([StepBatches(own.build(rows), cursor)])
        corpus.announced.clear()
