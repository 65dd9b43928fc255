"""Corpora written from chunks: which documents and files they have, and what a kill leaves."""

import multiprocessing
import os
import shutil
import sys
import tracemalloc
from concurrent.futures import ProcessPoolExecutor
from itertools import product

import numpy as np
import pytest
from unit.data.corpus.made_up_chunks import UNKNOWN, ChunkFolder, documents_if_it_opens, documents_of, select

from megatron_neobert.data.corpus import chunk_files, exact_duplicates, shard_files
from megatron_neobert.data.corpus.exact_duplicates import find_exact_duplicates
from megatron_neobert.data.corpus.format import corpus_files, validation_files
from megatron_neobert.data.corpus.reader import Corpus
from megatron_neobert.data.corpus.writer import refuse_existing
from megatron_neobert.errors import DataError, OutputError
from megatron_neobert.runtime.jobs import JobFolder


@pytest.fixture
def chunks(tmp_path):
    return ChunkFolder(tmp_path)


@pytest.mark.parametrize("small_windows", [False, True])
@pytest.mark.parametrize("layout", [{}, {"shard_bytes": 30}], ids=str)
@pytest.mark.parametrize("deduplicate", [False, True])
@pytest.mark.parametrize("validation_fraction", [0.0, 0.4])
def test_documents_are_those_that_a_loop_selects(
    chunks, monkeypatch, small_windows, layout, deduplicate, validation_fraction
):
    if small_windows:
        monkeypatch.setattr(chunk_files, "_WINDOW_DOCUMENTS", 2)
        monkeypatch.setattr(chunk_files, "_WINDOW_BYTES", 10)
    selection = {"deduplicate": deduplicate, "validation_fraction": validation_fraction}
    training, held_out, dropped = select(chunks.texts, chunks.documents, **selection)
    # Controls: each setting changes something.
    assert bool(dropped) == deduplicate and bool(held_out) == bool(validation_fraction)
    manifest, validation = chunks.write(**selection, **layout)
    for written, name, documents, others in (
        (manifest, "P", training, held_out),
        (validation, "P_validation", held_out, training),
    ):
        if written is None:
            assert not held_out and not validation_files(chunks.files).manifest.exists()
            continue
        assert documents_of(chunks.folder / name) == documents
        assert (written.documents, written.held_out) == (len(documents), len(others))
        assert written.records == 3 + len(chunks.documents)
        assert written.dropped == {"empty text": 1} | ({"duplicate": len(dropped)} if dropped else {})
        assert written.unknown_tokens == sum(document.count(UNKNOWN) for document in documents) > 0
        assert f"longest {max(map(len, documents))}" in Corpus(chunks.folder / name).describe()["tokens/document"]
    assert manifest.part_of == ("training" if held_out else "all")
    assert validation is None or (validation.part_of, len(validation.shards)) == ("validation", 1)


def test_corpus_shard_of_one_whole_chunk_is_a_hard_link_or_without_links_a_copy(tmp_path, monkeypatch):
    linking, copying = ChunkFolder(tmp_path / "a"), ChunkFolder(tmp_path / "b")
    linking.write(shard_bytes=2)

    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    copying.write(shard_bytes=2)
    assert linking.corpus_bytes() == copying.corpus_bytes()
    assert (linking.folder / "P_00002.bin").samefile(linking.files.partial / "000002.ids")
    assert (copying.folder / "P_00002.bin").stat().st_nlink == 1


def test_without_rejects_the_file_of_an_earlier_run_is_removed(tmp_path):
    clean = ChunkFolder(tmp_path / "clean", inputs=((2, 4),))
    clean.files.rejects.write_text("from an earlier run")
    clean.write()
    assert not clean.files.rejects.exists()


@pytest.mark.parametrize("shards_before", [0, 1, 2])
def test_files_of_other_corpora_with_similar_names_do_not_change(chunks, shards_before):
    if shards_before:
        chunks.write(shard_bytes={1: None, 2: 90}[shards_before])
    corpus_name = {0: "P_00000", 1: "P_00000", 2: "P_00002"}[shards_before]
    names = ("P_1.bin", "P_00000x.bin", "PP.bin", "P_test.idx", "P_20240101.bin", "P_00012.bin", "P_00012.idx")
    foreign = [chunks.folder / name for name in (*names, *(f"{corpus_name}.{end}" for end in ("bin", "idx", "json")))]
    for file in foreign:
        file.write_text("keep")
    refuse_existing(chunks.files, overwrite=bool(shards_before))
    chunks.write()
    with pytest.raises(OutputError, match=rf"{corpus_name}.bin belongs to another corpus; move it away"):
        chunks.write(shard_bytes=2)
    assert all(file.read_text() == "keep" for file in foreign)
    assert documents_of(chunks.folder / "P") == chunks.documents


@pytest.mark.parametrize("options", [{}, {"shard_bytes": 30, "validation_fraction": 0.4}], ids=str)
def test_whole_new_corpus_is_on_disk_before_the_first_old_file_is_removed(chunks, monkeypatch, options):
    chunks.write(shard_bytes=30, validation_fraction=0.4)
    # The ids of chunks are on disk already.
    synced, before_removal = {file.stat().st_ino for file in chunks.files.partial.glob("*.ids")}, []
    fsync, unlink = os.fsync, os.unlink

    def note_sync(descriptor):
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def note_removal(path, **keywords):
        if os.path.dirname(path) == str(chunks.folder) and not before_removal:  # noqa: PTH120
            before_removal.append(set(synced))
        unlink(path, **keywords)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "unlink", note_removal)
    chunks.write(**options)
    new = {name: (chunks.folder / name).stat().st_ino for name in chunks.corpus_bytes()}
    assert len(new) == (17 if options else 5)
    assert {name for name, inode in new.items() if inode not in before_removal[0]} == set()


@pytest.mark.parametrize("name", ["P.bin", "P.json", "P.attributes.parquet", "P_00000.bin", "P_validation.json"])
def test_every_file_of_a_corpus_is_replaced_only_with_overwrite_and_only_if_it_is_ours(tmp_path, name):
    files = corpus_files(tmp_path / "P")
    # Negative control: without files, nothing is refused.
    refuse_existing(files, overwrite=False)
    (tmp_path / name).touch()
    with pytest.raises(OutputError, match=rf"{name} exists already; choose another --output-prefix, or .*--overwrite"):
        refuse_existing(files, overwrite=False)
    with pytest.raises(OutputError, match=rf"{name} is not replaced, because P(_validation)?.json is no manifest"):
        refuse_existing(files, overwrite=True)
    # A killed run removes the manifest first.
    with JobFolder(files.partial) as folder:
        folder.begin({}, resume=False, overwrite=False)
        refuse_existing(files, overwrite=True)


@pytest.mark.parametrize(
    ("fraction", "message"),
    [
        (1e-9, "--split-validation 1e-09 of 20 documents holds out 0 and leaves 20,"),
        (0.999999, "holds out 20 and leaves 0,"),
    ],
)
def test_split_that_leaves_one_corpus_empty_is_refused_and_the_old_corpus_stays(chunks, fraction, message):
    chunks.write()
    before = chunks.corpus_bytes()
    with pytest.raises(DataError, match=message):
        chunks.write(validation_fraction=fraction)
    assert chunks.corpus_bytes() == before
    assert not [*chunks.files.partial.glob("output-*")]


def measure_peak(folder, chunks):
    """Return the peak of the bytes allocated by Python while a corpus of this number of equal chunks is written."""
    chunk_files._WINDOW_DOCUMENTS, chunk_files._WINDOW_BYTES = 1000, 100_000
    # 400 kB of ids.
    documents, made_up = [[7] * 100] * 2000, ChunkFolder(folder / str(chunks), inputs=())
    for _ in range(chunks):
        made_up.add_chunk(documents, [""] * len(documents), input="input")
    tracemalloc.start()
    made_up.write()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_memory_does_not_grow_with_the_corpus_shard(tmp_path):
    """Measured in another process, because threads of other tests allocate memory too."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        small, large = pool.map(measure_peak, [tmp_path] * 2, [2, 20])
    # Measured: 2.3 and 2.6 MB. Whole corpus shards in memory would take 0.8 and 8 MB.
    assert large < small + 1e6 < 5e6


# --- a kill at any moment

CHANGES = {"open", "os.rename", "os.remove", "os.link", "os.mkdir", "os.rmdir", "shutil.rmtree"}


def write_until_killed(change_number, chunks, **options):
    """Write in a child process that dies before its n-th change of a file or folder; return True if it died."""
    child = os.fork()
    if child == 0:
        remaining = change_number

        def count(event, _):
            nonlocal remaining
            remaining -= event in CHANGES
            if remaining < 0:
                os._exit(9)

        sys.addaudithook(count)
        chunks.write(**options)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


SHARDS_AND_SPLIT = {"shard_bytes": 30, "deduplicate": True, "validation_fraction": 0.4}


@pytest.mark.parametrize(
    ("old_options", "new_options"),
    [
        ({}, {}),
        pytest.param(SHARDS_AND_SPLIT, SHARDS_AND_SPLIT, marks=pytest.mark.slow),
        pytest.param(SHARDS_AND_SPLIT, {}, marks=pytest.mark.slow),
        pytest.param({}, {"shard_bytes": 40}, marks=pytest.mark.slow),
    ],
    ids=["one over one", "split over split", "one over split", "corpus shards over one"],
)
def test_kill_at_any_moment_leaves_the_old_corpus_or_none_and_a_repeated_call_gives_the_same_bytes(
    tmp_path, old_options, new_options
):
    # Documents of the old corpus have the lengths of the new ones, so only the manifests tell the corpora apart.
    old, new = ChunkFolder(tmp_path / "old", ids_seed=1), ChunkFolder(tmp_path / "new")
    old.write(**old_options)
    new.write(**new_options)
    names = ("P", "P_validation")
    old_documents, new_documents = (
        {name: documents_if_it_opens(folder.folder / name) for name in names} for folder in (old, new)
    )
    assert old_documents["P"] and new_documents["P"] and old_documents["P"] != new_documents["P"]
    outcomes = set()
    for change_number in range(1000):
        shutil.rmtree(tmp_path / "killed", ignore_errors=True)
        chunks = ChunkFolder(tmp_path / "killed")
        for name, content in old.corpus_bytes().items():
            (chunks.folder / name).write_bytes(content)
        killed = write_until_killed(change_number, chunks, **new_options)
        for name in names:
            found = documents_if_it_opens(chunks.folder / name)
            assert found in (None, old_documents[name], new_documents[name]), change_number
            outcomes.add((name, "none" if found is None else "old" if found == old_documents[name] else "new"))
        if not killed:
            break
        chunks.write(**new_options)
        assert chunks.corpus_bytes() == new.corpus_bytes()
        assert not [*chunks.files.partial.glob("output-*")]
    # The loop has tried every moment.
    assert 20 < change_number < 999
    assert {("P", "none"), ("P", "old"), ("P", "new")} <= outcomes


def write_hashes(folder, hashes, files=3):
    """Write 16-byte hashes to several files."""
    paths = [folder / f"{number}.hashes" for number in range(files)]
    for path, indices in zip(paths, np.array_split(np.arange(len(hashes)), files), strict=True):
        path.write_bytes(b"".join(hashes[index] for index in indices))
    return paths


@pytest.mark.parametrize(("step", "bucket"), [(1 << 20, 1 << 24), (7, 5), (1, 1), (64, 64)])
@pytest.mark.parametrize("seed", range(3))
def test_duplicates_are_those_that_a_set_finds(tmp_path, monkeypatch, step, bucket, seed):
    """Many hashes agree in one half only."""
    monkeypatch.setattr(shard_files, "_ITEMS_PER_STEP", step)
    monkeypatch.setattr(exact_duplicates, "_BUCKET_DOCUMENTS", bucket)
    generator = np.random.default_rng(seed)
    halves = [generator.bytes(8) for _ in range(7)]
    distinct = [first + second for first, second in product(halves, halves)]
    hashes = [distinct[index] for index in generator.integers(0, 49, 100)]
    seen = set()
    expected = [hash_ in seen or seen.add(hash_) is not None for hash_ in hashes]
    assert 0 < sum(expected) < 100
    assert find_exact_duplicates(write_hashes(tmp_path, hashes), tmp_path).tolist() == expected
    assert {file.suffix for file in tmp_path.iterdir()} == {".hashes"}, "buckets are removed"
