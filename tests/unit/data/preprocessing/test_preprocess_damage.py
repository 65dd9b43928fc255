"""Preprocessing of damaged shards and with a fast back end that is found wrong."""

import gzip

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import call
from unit.data.preprocess_place import cut_small, decoded

from megatron_neobert.data.corpus.format import BackendRecord
from megatron_neobert.data.preprocessing import chunks as chunks_module
from megatron_neobert.data.preprocessing.plan import is_complete, plan_preprocessing
from megatron_neobert.data.tokenizer import fast_backends
from megatron_neobert.data.tokenizer.tokenizer import EncodedBatch
from megatron_neobert.errors import ConfigError, DataError

# --- damaged shards


def add_damaged_shards(place):
    """Of five shards, two break off when they are read."""
    for name in ("a", "c", "e"):
        place.add_texts(f"{name}.jsonl", "hello", f"world {name}")
    for name in ("b.gz", "d.json"):
        (place.shards / name).write_bytes(gzip.compress(b'{"content": "hello"}\n' * 1000)[:-20])


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_damaged_shards_are_reported_together_when_all_others_are_finished(place, workers):
    add_damaged_shards(place)
    with pytest.raises(DataError, match=r"(?s)2 of 5 shards .*/b\.gz: .*\n.*/d\.json: .*With --quarantine") as caught:
        place.run(workers=workers, max_error_rate=0.5)
    assert len(str(caught.value).splitlines()) == 3
    folder = place.folder / "out" / "run_content_document.partial"
    assert len(list(folder.glob("*.done"))) == 3
    assert [file.name for file in folder.parent.iterdir()] == [folder.name]
    place.add_texts("d.json", "xyz")
    (place.shards / "b.gz").write_bytes(gzip.compress(b'{"content": "hello"}'))
    place.run(resume=True)
    assert decoded(place) == ["hello", "world [UNK]", "hello", "hello", "world [UNK]", "xyz", "hello", "world [UNK]"]


def test_quarantined_shards_are_left_out_whole_and_named_in_the_manifest(place, monkeypatch):
    add_damaged_shards(place)
    pq.write_table(pa.table({"text": ["hello"]}), place.shards / "f.parquet")  # as the plan sees already
    pq.write_table(pa.table({"content": [f"hello {number}" for number in range(500)]}), place.shards / "g.parquet", 100)
    content = (place.shards / "g.parquet").read_bytes()
    (place.shards / "g.parquet").write_bytes(content[:1000] + bytes(200) + content[1200:])
    cut_small(monkeypatch, 2000)
    chunks = plan_preprocessing(place.settings(quarantine=True)).chunks
    assert sum(chunk.path.endswith("g.parquet") for chunk in chunks) > 1
    report = place.run(quarantine=True)
    manifest = place.corpus().manifest
    left_out = {name.rpartition("/")[2]: shard for name, shard in manifest.quarantined.items()}
    assert list(left_out) == ["b.gz", "d.json", "f.parquet", "g.parquet"]
    assert left_out["b.gz"].bytes == (place.shards / "b.gz").stat().st_size and "b.gz" in left_out["b.gz"].reason
    assert [name[-7:] for name in manifest.inputs] == ["a.jsonl", "c.jsonl", "e.jsonl"]
    assert (manifest.records, manifest.documents, len(report.damaged)) == (6, 6, 4)
    assert is_complete(plan_preprocessing(place.settings(quarantine=True, resume=True)))
    for name in left_out:
        (place.shards / name).unlink()
    place.run("sound")
    for end in ("bin", "idx"):
        assert place.contents("sound")[f"content_document.{end}"] == place.contents()[f"content_document.{end}"]


def test_plan_names_every_unusable_table_at_once(place):
    for number, table in enumerate([{"content": ["hello"]}, {"text": ["hello"]}, {"content": [1]}, {"content": ["x"]}]):
        pq.write_table(pa.table(table), place.shards / f"{number}.parquet")
    (place.shards / "3.parquet").write_bytes((place.shards / "3.parquet").read_bytes()[:-20])
    reasons = [
        r"1\.parquet has no column 'content'",
        r"2\.parquet: column 'content' holds int64",
        r"3\.parquet: damaged",
    ]
    with pytest.raises(DataError, match="(?s)3 of 4 shards .*" + ".*\n.*".join(reasons)):
        plan_preprocessing(place.settings())
    assert not (place.folder / "out").exists()


def test_credentials_of_urls_stay_out_of_manifest_partial_folder_and_screen(place, server):
    """The server ignores them. Planning finds the one damaged file; the preview and the run find the other."""
    place.add_texts("a.jsonl", *["hello"] * 20)
    (place.shards / "b.parquet").write_bytes(b"PAR1" + bytes(100))
    (place.shards / "c.gz").write_bytes(gzip.compress(b'{"content": "hello"}\n' * 1000)[:-20])
    address = server.replace("http://", "http://me:secret@") + "/shards/"
    inputs = [f"{address}{name}?sig=secret" for name in ("a.jsonl", "b.parquet", "c.gz")]
    command = ["--output-prefix", place.folder / "out" / "run", "--tokenizer-model", place.vocab]
    command += ["--max-error-rate", "1", "--input", *inputs]
    endings = {("--quarantine", "--dry-run"): 65, (): 65, (f"{address}gone?sig=secret",): 66, ("--quarantine",): 0}
    said = ""
    for more, expected in endings.items():
        code, *screen = call("preprocess", *command, *more)
        assert code == expected, screen
        said += "".join(screen)
    with pytest.raises(DataError):
        place.run("damaged", inputs=tuple(inputs[::2]))  # leaves its partial folder
    files = [file for file in (place.folder / "out").rglob("*") if file.suffix in (".json", ".done")]
    said += "".join(file.read_text() for file in files)
    assert len(files) >= 3 and list(place.corpus().manifest.quarantined) == [
        f"{server}/shards/{name}" for name in ("b.parquet", "c.gz")
    ]
    assert f"{server}/shards/b.parquet: damaged parquet file" in said and f"{server}/shards/gone" in said
    assert "secret" not in said


# --- a fast back end that is wrong


@pytest.fixture
def fast_but_wrong(monkeypatch):
    """nanotoken, with a wrong id where "hello xy zy" occurs, as none of the probe's strings has it."""
    pytest.importorskip("nanotoken")
    build = fast_backends._build_nanotoken

    def build_wrong(tokenizer):
        right = build(tokenizer)
        unknown = tokenizer.unk_id

        def encode(texts):
            batch = right(texts)
            ends = np.cumsum(batch.lengths)
            ids = batch.ids.copy()
            ids[[end - 1 for text, end in zip(texts, ends, strict=True) if text == "hello xy zy"]] = unknown
            return EncodedBatch(ids, batch.lengths)

        return encode

    monkeypatch.setattr(fast_backends, "_build_nanotoken", build_wrong)
    monkeypatch.setattr(chunks_module, "_loaded", {})  # which other tests share


def add_shards_for_a_wrong_back_end(place, *, found_in):
    """Six shards of 80 documents. Of each the 71st is wrong, which nobody compares; of one the fourth is, too."""
    for number in range(6):
        texts = ["hello world"] * 80
        texts[70] = "hello xy zy"
        if number == found_in:
            texts[3] = "hello xy zy"
        place.add_texts(f"{number}.jsonl", *texts)


@pytest.mark.usefixtures("fast_but_wrong")
def test_fast_back_end_found_wrong_in_one_chunk_ends_the_run_and_none_of_its_chunks_is_continued(place):
    add_shards_for_a_wrong_back_end(place, found_in=None)
    place.run("unseen")  # control: what is not compared is not found
    assert [*place.corpus("unseen").manifest.tokenizer_backends.values()] == [BackendRecord(480, 6 * 64)]
    add_shards_for_a_wrong_back_end(place, found_in=4)
    for resume in (False, True):
        with pytest.raises(ConfigError, match=r"/4\.jsonl: nanotoken .* differs .*--tokenizer-backend reference --ov"):
            place.run(resume=resume)
    with pytest.raises(ConfigError, match="belongs to a run with tokenizer backend nanotoken"):
        place.run(tokenizer_backend="reference", resume=True)
    place.run(tokenizer_backend="reference", overwrite=True)
    assert [*place.corpus().manifest.tokenizer_backends.values()] == [BackendRecord(480, 0)]
    assert place.contents()["content_document.bin"] != place.contents("unseen")["content_document.bin"]
