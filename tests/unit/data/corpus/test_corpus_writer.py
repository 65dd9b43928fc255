"""Corpora written from chunks: which documents and files they have, and what a kill leaves."""

import multiprocessing
import os
import shutil
import tracemalloc
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import count

import numpy as np
import pyarrow.parquet as pq
import pytest
from unit.data.child_processes import count_changes
from unit.data.small_corpus import numbered_tokenizer, write_chunk

from megatron_neobert.data.corpus import shard_files
from megatron_neobert.data.corpus.attribute_columns import pack_columns
from megatron_neobert.data.corpus.format import FileRecord, corpus_files
from megatron_neobert.data.corpus.reader import Corpus, check_content
from megatron_neobert.data.corpus.writer import refuse_existing, write_corpus
from megatron_neobert.errors import DataError, MissingInputError, OutputError
from megatron_neobert.runtime import new_file
from megatron_neobert.runtime.atomic_files import sha256_of
from megatron_neobert.runtime.jobs import JobFolder, JobOptions, JobRunner

TOKENIZER = numbered_tokenizer(100)
UNKNOWN = 1


class ChunkFolder:
    """A folder with chunks of made-up documents in P.partial, from which `write` makes the corpus P.

    Args:
        inputs: For each input file, the number of documents of each of its chunks.
        ids_seed: Another seed gives documents with the same lengths and other ids.
    """

    def __init__(self, folder, *, inputs=((3, 2), (4,), (0,), (5, 0, 6)), ids_seed=0):
        self.folder, self.files = folder, corpus_files(folder / "P")
        self.files.partial.mkdir(parents=True)
        self.documents, self.chunks = [], []
        for number, sizes in enumerate(inputs):
            for size in sizes:
                documents = [[7 + ids_seed] * (1 + len(self.chunks)) + [UNKNOWN] * at for at in range(size)]
                rejects = f'{{"chunk": {len(self.chunks)}}}\n' if size % 2 else ""
                self.add_chunk(documents, input=f"input {number}", rejects=rejects)
                self.documents += documents

    def add_chunk(self, documents, *, input, rejects=""):
        """Add a chunk whose documents have their length as an attribute."""
        chunk = write_chunk(self.files.partial, len(self.chunks), documents, TOKENIZER, input=input, rejects=rejects)
        file = self.files.partial / f"{chunk.result.name}.attributes"
        file.write_bytes(pack_columns({"size": list(map(len, documents))}))
        chunk.files["attributes"] = FileRecord(file.stat().st_size, sha256_of(file))
        if not self.chunks:
            chunk.result.counts.rejected["malformed JSON"], chunk.result.counts.dropped["empty text"] = 2, 1
        self.chunks.append(chunk)

    def write(self, **options):
        return write_corpus(self.chunks, self.files, TOKENIZER, text_key="content", filters={}, **options)

    def corpus_bytes(self):
        return {file.name: file.read_bytes() for file in self.folder.glob("P*") if file.is_file()}


def documents_of(prefix):
    corpus = Corpus(prefix)
    check_content(corpus)
    return [corpus.document(number).tolist() for number in range(len(corpus))]


def documents_if_it_opens(prefix):
    """Return the documents of a corpus, which must be sound; None if there is no corpus or opening it fails."""
    try:
        Corpus(prefix)
    except (MissingInputError, DataError):
        return None
    return documents_of(prefix)


@pytest.fixture
def chunks(tmp_path):
    return ChunkFolder(tmp_path)


@pytest.mark.parametrize("copied_bytes", [1 << 20, 10])
@pytest.mark.parametrize(("layout", "workers"), [({}, 1), ({"shard_bytes": 30}, 1), ({"shard_bytes": 30}, 2)])
def test_a_corpus_is_its_chunks_in_order(chunks, monkeypatch, copied_bytes, layout, workers):
    monkeypatch.setattr(new_file, "_BLOCK_BYTES", copied_bytes)
    monkeypatch.setattr(shard_files, "_ITEMS_PER_STEP", 2)
    with JobRunner(JobOptions(workers=workers)) as runner:
        manifest = chunks.write(**layout, runner=runner)
    assert documents_of(chunks.folder / "P") == chunks.documents
    assert (manifest.records, manifest.documents) == (3 + len(chunks.documents), len(chunks.documents))
    assert manifest.unknown_tokens == sum(document.count(UNKNOWN) for document in chunks.documents) > 0
    assert [record.documents for record in manifest.inputs.values()] == [5, 4, 0, 11]
    tokens = [sum(map(len, documents)) for documents in np.split(np.array(chunks.documents, dtype=object), [5, 9])]
    assert [record.tokens for record in manifest.inputs.values()] == [*tokens[:2], 0, tokens[2]]
    sizes = pq.read_table(chunks.files.attributes)["size"].to_pylist()
    assert sizes == list(map(len, chunks.documents))
    assert f"longest {max(map(len, chunks.documents))}" in Corpus(chunks.folder / "P").describe()["tokens/document"]
    assert (len(manifest.shards) > 1) == bool(layout)


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
        chunks.write(shard_bytes={1: None, 2: 150}[shards_before])
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


@pytest.mark.parametrize("options", [{}, {"shard_bytes": 30}], ids=str)
def test_whole_new_corpus_is_on_disk_before_the_first_old_file_is_removed(chunks, monkeypatch, options):
    chunks.write(shard_bytes=30)
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
    assert len(new) == (11 if options else 5)
    assert {name for name, inode in new.items() if inode not in before_removal[0]} == set()


@pytest.mark.parametrize("name", ["P.bin", "P.json", "P.attributes.parquet", "P_00000.bin"])
def test_every_file_of_a_corpus_is_replaced_only_with_overwrite_and_only_if_it_is_ours(tmp_path, name):
    files = corpus_files(tmp_path / "P")
    # Negative control: without files, nothing is refused.
    refuse_existing(files, overwrite=False)
    (tmp_path / name).touch()
    with pytest.raises(OutputError, match=rf"{name} exists already; choose another --output-prefix, or .*--overwrite"):
        refuse_existing(files, overwrite=False)
    with pytest.raises(OutputError, match=rf"{name} is not replaced, because P.json is no manifest"):
        refuse_existing(files, overwrite=True)
    # A killed run removes the manifest first.
    with JobFolder(files.partial) as folder:
        folder.begin({}, resume=False, overwrite=False)
        refuse_existing(files, overwrite=True)


def measure_peak(folder):
    """Return the peak of the bytes allocated by Python while a corpus shard with 8 MB of ids is written."""
    new_file._BLOCK_BYTES, shard_files._ITEMS_PER_STEP = 100_000, 1000
    made_up = ChunkFolder(folder, inputs=())
    for _ in range(20):
        made_up.add_chunk([[7] * 100] * 2000, input="input")
    tracemalloc.start()
    made_up.write()
    return tracemalloc.get_traced_memory()[1]


def test_memory_does_not_grow_with_the_corpus_shard(tmp_path):
    """Measured: 2.6 MB, in another process, because threads of other tests allocate memory too."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        assert pool.submit(measure_peak, tmp_path / "made_up").result() < 5e6


# --- a kill at any moment

SHARDS = {"shard_bytes": 30}


@pytest.mark.parametrize(
    ("old_options", "new_options"),
    [
        ({}, {}),
        pytest.param(SHARDS, SHARDS, marks=pytest.mark.slow),
        pytest.param(SHARDS, {}, marks=pytest.mark.slow),
        pytest.param({}, {"shard_bytes": 40}, marks=pytest.mark.slow),
    ],
    ids=["one over one", "shards over shards", "one over shards", "shards over one"],
)
def test_kill_at_any_moment_leaves_the_old_corpus_or_none_and_a_repeated_call_gives_the_same_bytes(
    tmp_path, old_options, new_options
):
    # Documents of the old corpus have the lengths of the new ones, so only the manifests tell the corpora apart.
    old, new = ChunkFolder(tmp_path / "old", ids_seed=1), ChunkFolder(tmp_path / "new")
    old.write(**old_options)
    new.write(**new_options)
    old_documents, new_documents = (documents_if_it_opens(folder.folder / "P") for folder in (old, new))
    assert old_documents and new_documents and old_documents != new_documents
    outcomes = set()
    for killed_at in count(1):
        shutil.rmtree(tmp_path / "killed", ignore_errors=True)
        chunks = ChunkFolder(tmp_path / "killed")
        for name, content in old.corpus_bytes().items():
            (chunks.folder / name).write_bytes(content)
        changes = count_changes(partial(chunks.write, **new_options), killed_at=killed_at)
        found = documents_if_it_opens(chunks.folder / "P")
        assert found in (None, old_documents, new_documents), killed_at
        outcomes.add("none" if found is None else "old" if found == old_documents else "new")
        if changes:
            break
        chunks.write(**new_options)
        assert chunks.corpus_bytes() == new.corpus_bytes()
        assert not (chunks.files.partial / "output").exists()
    assert outcomes == {"none", "old", "new"}
