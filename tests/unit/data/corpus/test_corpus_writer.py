"""Chunks become a corpus: which documents end up where, in which corpus shards, and a kill at any moment."""

import json
import os
import shutil
import sys

import pytest
from unit.data.corpus.made_up_chunks import (
    UNKNOWN,
    Place,
    documents_if_it_opens,
    documents_of,
    selected,
)

from megatron_neobert.data.corpus import shard_job
from megatron_neobert.data.corpus.format import corpus_files, validation_files
from megatron_neobert.data.corpus.writer import refuse_existing
from megatron_neobert.errors import DataError, OutputError

WHOLE = {f"P.{end}" for end in ("bin", "idx", "json", "rejects.jsonl", "attributes.parquet")}


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


@pytest.mark.parametrize("small_windows", [False, True])
@pytest.mark.parametrize("layout", [{}, {"shard_bytes": 30}], ids=str)
@pytest.mark.parametrize("deduplicate", [False, True])
@pytest.mark.parametrize("validation_fraction", [0.0, 0.4])
def test_documents_are_those_that_a_plain_loop_selects(
    place, monkeypatch, small_windows, layout, deduplicate, validation_fraction
):
    if small_windows:
        monkeypatch.setattr(shard_job, "_WINDOW_DOCUMENTS", 2)
        monkeypatch.setattr(shard_job, "_WINDOW_BYTES", 10)
    selection = {"deduplicate": deduplicate, "validation_fraction": validation_fraction}
    training, held_out, dropped = selected(place.texts, place.documents, **selection)
    written = place.write(**selection, **layout)
    manifest = written.manifest
    assert documents_of(place.folder / "P") == training
    assert manifest.documents == len(training) and manifest.held_out == len(held_out)
    assert manifest.records == 3 + len(place.documents)
    assert manifest.dropped == {"empty text": 1} | ({"duplicate": len(dropped)} if dropped else {})
    assert manifest.unknown_tokens == sum(document.count(UNKNOWN) for document in training) > 0
    assert manifest.statistics.longest == max(map(len, training))
    assert manifest.part_of == ("training" if held_out else "all")
    assert bool(dropped) == deduplicate and bool(held_out) == bool(validation_fraction)  # or this would show nothing
    if not validation_fraction:
        assert written.validation is None and not validation_files(place.files).manifest.exists()
        return
    validation = written.validation
    assert documents_of(place.folder / "P_validation") == held_out
    assert (validation.documents, validation.held_out) == (len(held_out), len(training))
    assert (validation.part_of, len(validation.volumes)) == ("validation", 1)
    assert validation.unknown_tokens == sum(document.count(UNKNOWN) for document in held_out) > 0
    assert validation.statistics.longest == max(map(len, held_out))
    assert (validation.records, validation.dropped) == (manifest.records, manifest.dropped)


@pytest.mark.parametrize("options", [{}, {"deduplicate": True, "validation_fraction": 0.4}], ids=str)
def test_bytes_do_not_depend_on_the_chunks_that_the_documents_came_in(tmp_path, options):
    cut = Place(tmp_path / "cut")
    whole = Place(tmp_path / "whole", inputs=())
    rejects = "".join((cut.files.partial / f"{chunk.name}.rejects").read_text() for chunk in cut.chunks)
    whole.add_chunk(cut.documents, cut.texts, input="input 0", rejects=rejects)
    cut.write(**options)
    whole.write(**options)
    assert cut.corpus_bytes() == whole.corpus_bytes()
    assert len(cut.corpus_bytes()) == (9 if options else 5)


def test_corpus_shard_of_one_whole_chunk_is_linked_or_copied_where_the_file_system_has_no_links(tmp_path, monkeypatch):
    linking, copying = Place(tmp_path / "a"), Place(tmp_path / "b")
    linking.write(shard_bytes=2)

    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    copying.write(shard_bytes=2)
    assert linking.corpus_bytes() == copying.corpus_bytes()
    assert (linking.folder / "P_00002.bin").samefile(linking.files.partial / "000002.ids")
    assert (copying.folder / "P_00002.bin").stat().st_nlink == 1


@pytest.mark.parametrize("shard_bytes", [2, 40, 90, 1 << 20])
def test_corpus_shards_hold_as_many_whole_chunks_as_fit(place, shard_bytes):
    expected, used = [], shard_bytes + 1
    for chunk in place.chunks:
        if not chunk.documents:
            continue
        if used + 2 * chunk.tokens > shard_bytes:
            expected.append(0)
            used = 0
        expected[-1] += chunk.documents
        used += 2 * chunk.tokens
    manifest = place.write(shard_bytes=shard_bytes).manifest
    assert documents_of(place.folder / "P") == place.documents
    assert [volume.documents for volume in manifest.volumes] == expected
    assert len(expected) == {2: 5, 40: 5, 90: 2, 1 << 20: 1}[shard_bytes]


def test_rejects_are_joined_in_order_and_have_no_file_where_there_are_none(place, tmp_path):
    place.write()
    lines = place.files.rejects.read_text().splitlines()
    assert [json.loads(line)["chunk"] for line in lines] == [0, 4]  # the chunks of 3 and of 5 documents
    clean = Place(tmp_path / "clean", inputs=((2, 4),))
    clean.files.rejects.write_text("of an earlier run")
    clean.write()
    assert not clean.files.rejects.exists()


@pytest.mark.parametrize("shards_before", [0, 1, 2])
def test_files_of_other_corpora_with_similar_names_are_left_alone(place, shards_before):
    if shards_before:
        place.write(shard_bytes={1: None, 2: 90}[shards_before])
    own_corpus = {0: "P_00000", 1: "P_00000", 2: "P_00002"}[shards_before]
    names = ("P_1.bin", "P_00000x.bin", "PP.bin", "P_test.idx", "P_20240101.bin", "P_00012.bin", "P_00012.idx")
    others = [place.folder / name for name in (*names, *(f"{own_corpus}.{end}" for end in ("bin", "idx", "json")))]
    for other in others:
        other.write_text("keep")
    refuse_existing(place.files, overwrite=bool(shards_before))
    place.write()
    assert all(other.read_text() == "keep" for other in others)
    with pytest.raises(OutputError, match=rf"{own_corpus}.bin belongs to another corpus; move it away"):
        place.write(shard_bytes=2)
    assert all(other.read_text() == "keep" for other in others) and documents_of(place.folder / "P") == place.documents


@pytest.mark.parametrize("options", [{}, {"shard_bytes": 30, "validation_fraction": 0.4}], ids=str)
def test_all_of_the_new_corpus_is_on_disk_before_anything_of_the_old_is_removed(place, monkeypatch, options):
    place.write(shard_bytes=30, validation_fraction=0.4)
    synced, before_removal = {file.stat().st_ino for file in place.files.partial.glob("*.ids")}, []  # they are complete
    fsync, unlink = os.fsync, os.unlink

    def note_sync(descriptor):
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def note_removal(path, **keywords):
        if os.path.dirname(path) == str(place.folder) and not before_removal:  # noqa: PTH120
            before_removal.append(set(synced))
        unlink(path, **keywords)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "unlink", note_removal)
    place.write(**options)
    new = {name: (place.folder / name).stat().st_ino for name in place.corpus_bytes()}
    assert len(new) == (17 if options else 5)
    assert {name for name, inode in new.items() if inode not in before_removal[0]} == set()


@pytest.mark.parametrize(
    "name", ["P.bin", "P.idx", "P.json", "P.attributes.parquet", "P_00000.bin", "P_validation.json"]
)
def test_each_piece_of_a_corpus_is_replaced_only_when_asked(tmp_path, name):
    files = corpus_files(tmp_path / "P")
    refuse_existing(files, overwrite=False)  # control
    (tmp_path / name).touch()
    with pytest.raises(OutputError, match=rf"{name} exists already; choose another --output-prefix, or .*--overwrite"):
        refuse_existing(files, overwrite=False)
    refuse_existing(files, overwrite=True)


@pytest.mark.parametrize(
    ("fraction", "message"),
    [
        (1e-9, "--split-validation 1e-09 of 20 documents holds out 0 and leaves 20;"),
        (0.999999, "holds out 20 and leaves 0;"),
        (1.0, "holds out 20 and leaves 0;"),
    ],
)
def test_split_that_leaves_one_corpus_empty_is_refused_before_the_old_corpus_is_touched(place, fraction, message):
    place.write()
    before = place.corpus_bytes()
    with pytest.raises(DataError, match=message):
        place.write(validation_fraction=fraction)
    assert place.corpus_bytes() == before
    assert not [*place.files.partial.glob("output-*")]


# --- a kill at any moment

CHANGES = {"open", "os.rename", "os.remove", "os.link", "os.mkdir", "os.rmdir", "shutil.rmtree"}


def killed_before(change_number, place, **options):
    """Writes in a child that dies before it opens, renames or removes a file for the n-th time; False: it survived."""
    child = os.fork()
    if child == 0:
        left = change_number

        def count(event, _):
            nonlocal left
            left -= event in CHANGES
            if left < 0:
                os._exit(9)

        sys.addaudithook(count)
        place.write(**options)
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
def test_kill_at_any_moment_leaves_the_old_corpus_or_none_and_the_same_call_gives_the_same_bytes(
    tmp_path, old_options, new_options
):
    # Of the same lengths as the new corpus: only the manifests tell one from the other without reading all tokens.
    template = Place(tmp_path / "template", ids_seed=1)
    template.write(**old_options)
    new = Place(tmp_path / "new")
    new.write(**new_options)
    old_documents = {name: documents_if_it_opens(tmp_path / "template" / name) for name in ("P", "P_validation")}
    new_documents = {name: documents_if_it_opens(tmp_path / "new" / name) for name in ("P", "P_validation")}
    assert old_documents["P"] and new_documents["P"] and old_documents["P"] != new_documents["P"]
    outcomes = set()
    for change_number in range(1000):
        shutil.rmtree(tmp_path / "place", ignore_errors=True)
        place = Place(tmp_path / "place")
        for name, content in template.corpus_bytes().items():
            (place.folder / name).write_bytes(content)
        killed = killed_before(change_number, place, **new_options)
        for name in ("P", "P_validation"):
            found = documents_if_it_opens(place.folder / name)
            assert found in (None, old_documents[name], new_documents[name]), change_number
            outcomes.add((name, "none" if found is None else "old" if found == old_documents[name] else "new"))
        if not killed:
            break
        place.write(**new_options)
        assert place.corpus_bytes() == new.corpus_bytes()
        assert not [*place.files.partial.glob("output-*")]
    assert 20 < change_number < 999  # so many moments were tried, and all of them
    assert {("P", "none"), ("P", "old"), ("P", "new")} <= outcomes
