"""Corpus shards are jobs: the same bytes by any number of workers, kept after a kill."""

import multiprocessing
import tracemalloc
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import pytest
from unit.data.corpus.made_up_chunks import TOKENIZER, Place
from unit.data.small_corpus import made_up_draft, output_settings, write_chunk

from megatron_neobert.data.corpus import shard_job, writer
from megatron_neobert.data.corpus.format import corpus_files
from megatron_neobert.data.corpus.writer import write_corpus
from megatron_neobert.runtime import jobs

SPLIT = {"shard_bytes": 30, "deduplicate": True, "validation_fraction": 0.4}


@pytest.mark.parametrize("options", [{}, SPLIT], ids=str)
def test_bytes_are_those_of_one_process_for_any_number_of_workers(tmp_path, options):
    one, many = Place(tmp_path / "one"), Place(tmp_path / "many")
    one.write(**options)
    many.write(workers=3, **options)
    assert one.corpus_bytes() == many.corpus_bytes()


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """Two of the corpus shards are finished: the one for validation and the first for training."""
    place, whole, done = Place(tmp_path / "place"), Place(tmp_path / "whole"), []

    def stop_after_two(job):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(job)
        return jobs.run_job(job)

    with monkeypatch.context() as patch:
        patch.setattr(writer, "finish_jobs", partial(jobs.finish_jobs, function=stop_after_two))
        with pytest.raises(KeyboardInterrupt):
            place.write(**SPLIT)
    whole.write(**SPLIT)
    return place, whole


def test_finished_corpus_shards_are_kept_after_an_interrupt_and_the_others_are_written(stopped, monkeypatch):
    place, whole = stopped
    (work,) = place.files.partial.glob("output-*")
    finished = {file.stat().st_ino for file in work.glob("*.bin")}
    assert len(finished) == 2 and not any(name.startswith("P.") for name in place.corpus_bytes())
    unfinished = [work / name for name in ("1.bin.host-7", "1.done.host-7", "choices.host.name-7")]
    for file in unfinished:
        file.touch()

    def run(job):
        assert not any(file.exists() for file in unfinished), "they would take as much room as the corpus"
        return jobs.run_job(job)

    monkeypatch.setattr(writer, "finish_jobs", partial(jobs.finish_jobs, function=run))
    place.write(**SPLIT)
    assert place.corpus_bytes() == whole.corpus_bytes()
    assert finished == {(place.folder / name).stat().st_ino for name in ("P_00000.bin", "P_validation.bin")}
    assert not work.exists()


@pytest.mark.parametrize("name", ["0.bin", "0.idx", "0.done", "held_out.bin"])
@pytest.mark.parametrize("spoil", ["changed", "cut", "gone"])
def test_finished_corpus_shard_that_is_damaged_is_written_again(stopped, name, spoil):
    place, whole = stopped
    (file,) = place.files.partial.glob(f"output-*/{name}")
    content = bytearray(file.read_bytes())
    if spoil == "changed" and name.endswith(".done"):
        content[:] = b"{"
    content[-1] ^= 1
    file.unlink() if spoil == "gone" else file.write_bytes(content[:-2] if spoil == "cut" else content)
    place.write(**SPLIT)
    assert place.corpus_bytes() == whole.corpus_bytes()


@pytest.mark.parametrize(
    "change",
    [{"shard_bytes": 60}, {"shard_bytes": None}, {"deduplicate": False}, {"texts": "other"}],
    ids=str,
)
def test_finished_corpus_shards_of_other_settings_or_chunks_are_not_kept(tmp_path, stopped, change):
    place, fresh = stopped[0], Place(tmp_path / "fresh")
    options = {**SPLIT, **change}
    for one in (place, fresh) if options.pop("texts", None) else ():
        chunks, one.chunks = one.chunks, []
        one.add_chunk(one.documents[:3], ["another", *one.texts[1:3]], input="input 0", rejects='{"chunk": 0}\n')
        one.chunks += chunks[1:]
    place.write(**options)
    fresh.write(**options)
    assert place.corpus_bytes() == fresh.corpus_bytes() != stopped[1].corpus_bytes()


def peak_of_writing(folder, chunks):
    """Return the bytes that Python holds at most while a corpus of equal chunks is written."""
    shard_job._WINDOW_DOCUMENTS, shard_job._WINDOW_BYTES = 1000, 100_000
    documents, files = [[7] * 100] * 2000, corpus_files(folder / str(chunks))  # 400 kB of ids
    files.partial.mkdir()
    written = [write_chunk(files.partial, number, documents, TOKENIZER) for number in range(chunks)]
    draft = made_up_draft(written, TOKENIZER)
    tracemalloc.start()
    write_corpus(written, output_settings(files), draft, folder=files.partial)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_memory_does_not_grow_with_the_corpus_shard(tmp_path):
    """Measured in processes of their own: threads that other tests leave behind allocate too."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        small, large = pool.map(peak_of_writing, [tmp_path] * 2, [2, 20])
    assert large < small + 1e6 < 5e6  # measured: 2.3 and 2.6 MB; corpus shards held whole have 0.8 and 8 MB
