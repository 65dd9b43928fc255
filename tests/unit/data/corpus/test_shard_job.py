"""Corpus shards are written by jobs: the same bytes for any number of workers, and finished shards survive a kill."""

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
def whole(tmp_path):
    """The corpus, written without an interrupt."""
    folder = ChunkFolder(tmp_path / "whole")
    folder.write(**SPLIT)
    return folder


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """The same, interrupted after two corpus shards: that for validation and the first for training."""
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


def test_finished_corpus_shards_are_kept_after_an_interrupt_and_the_others_are_written(whole, stopped, monkeypatch):
    (work,) = stopped.files.partial.glob("output-*")
    finished = {file.stat().st_ino for file in work.glob("*.bin")}
    assert len(finished) == 2 and not any(name.startswith("P.") for name in stopped.corpus_bytes())
    unfinished = [work / name for name in ("1.bin.host-7", "1.done.host-7", "choices.host.name-7")]
    for file in unfinished:
        file.touch()

    def run(job):
        assert not any(file.exists() for file in unfinished), "unfinished files would need the disk space of the corpus"
        return jobs.run_job(job)

    monkeypatch.setattr(writer, "finish_jobs", partial(jobs.finish_jobs, function=run))
    stopped.write(**SPLIT)
    assert stopped.corpus_bytes() == whole.corpus_bytes()
    assert finished == {(stopped.folder / name).stat().st_ino for name in ("P_00000.bin", "P_validation.bin")}
    assert not work.exists()


@pytest.mark.parametrize(
    "change", [{"shard_bytes": 60}, {"shard_bytes": None}, {"deduplicate": False}, {"texts": "other"}], ids=str
)
def test_finished_corpus_shards_of_other_settings_or_chunks_are_not_kept(tmp_path, whole, stopped, change):
    fresh, options = ChunkFolder(tmp_path / "fresh"), {**SPLIT, **change}
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
