"""Corpus shards are written by jobs: finished shards of other settings are not kept, and the memory is bounded."""

import multiprocessing
import tracemalloc
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import pytest
from unit.data.corpus.made_up_chunks import TOKENIZER, ChunkFolder
from unit.data.small_corpus import made_up_draft, output_settings, write_chunk

from megatron_neobert.data.corpus import shard_job, writer
from megatron_neobert.data.corpus.format import corpus_files
from megatron_neobert.data.corpus.writer import write_corpus
from megatron_neobert.runtime import jobs

SPLIT = {"shard_bytes": 30, "deduplicate": True, "validation_fraction": 0.4}


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """A corpus, interrupted after two corpus shards: that for validation and the first for training."""
    folder, done = ChunkFolder(tmp_path / "stopped"), []

    def stop_after_two(job):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(job)
        return jobs.run_job(job)

    with monkeypatch.context() as patch:
        patch.setattr(writer, "finish_jobs", partial(jobs.finish_jobs, function=stop_after_two))
        with pytest.raises(KeyboardInterrupt):
            folder.write(**SPLIT)
    return folder


@pytest.mark.parametrize(
    "change", [{"shard_bytes": 60}, {"shard_bytes": None}, {"deduplicate": False}, {"texts": "other"}], ids=str
)
def test_finished_corpus_shards_of_other_settings_or_chunks_are_not_kept(tmp_path, stopped, change):
    whole, fresh = ChunkFolder(tmp_path / "whole"), ChunkFolder(tmp_path / "fresh")
    options = {**SPLIT, **change}
    whole.write(**SPLIT)
    for folder in (stopped, fresh) if options.pop("texts", None) else ():
        rest, folder.chunks = folder.chunks[1:], []
        texts = ["another", *folder.texts[1:3]]
        folder.add_chunk(folder.documents[:3], texts, input="input 0", rejects='{"chunk": 0}\n')
        folder.chunks += rest
    stopped.write(**options)
    fresh.write(**options)
    assert stopped.corpus_bytes() == fresh.corpus_bytes() != whole.corpus_bytes()


def measure_peak(folder, chunks):
    """Return the peak of the bytes allocated by Python while a corpus of this number of equal chunks is written."""
    shard_job._WINDOW_DOCUMENTS, shard_job._WINDOW_BYTES = 1000, 100_000
    # 400 kB of ids.
    documents, files = [[7] * 100] * 2000, corpus_files(folder / str(chunks))
    files.partial.mkdir()
    written = [write_chunk(files.partial, number, documents, TOKENIZER) for number in range(chunks)]
    draft = made_up_draft(written, TOKENIZER)
    tracemalloc.start()
    write_corpus(written, output_settings(files), draft, folder=files.partial)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_memory_does_not_grow_with_the_corpus_shard(tmp_path):
    """Measured in another process, because threads of other tests allocate memory too."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        small, large = pool.map(measure_peak, [tmp_path] * 2, [2, 20])
    # Measured: 2.3 and 2.6 MB. Whole corpus shards in memory would take 0.8 and 8 MB.
    assert large < small + 1e6 < 5e6
