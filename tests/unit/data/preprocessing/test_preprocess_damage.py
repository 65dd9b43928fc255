"""Damaged input files, and fast back ends that give wrong ids."""

import gzip

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import call
from object_server import ObjectServer
from unit.data.preprocess_workspace import WORDS, cut_small, decoded
from unit.data.small_corpus import write_vocabulary

from megatron_neobert.data.corpus.format import BackendRecord
from megatron_neobert.data.preprocessing import chunks as chunks_module
from megatron_neobert.data.preprocessing import run as run_module
from megatron_neobert.data.preprocessing.run import is_complete, plan_preprocessing
from megatron_neobert.data.tokenizer import fast_backends
from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer
from megatron_neobert.errors import ConfigError, DataError

# --- damaged input files


@pytest.fixture
def server(tmp_path):
    """Address of a web server that ignores range requests and always sends whole files."""
    pytest.importorskip("aiohttp")
    with ObjectServer(tmp_path, has_ranges=False).running() as running:
        yield running.url


def add_damaged_inputs(workspace):
    """Add five input files, two of which are truncated gzip streams."""
    for name in ("a", "c", "e"):
        workspace.add_texts(f"{name}.jsonl", "hello", f"world {name}")
    for name in ("b.gz", "d.json"):
        (workspace.inputs / name).write_bytes(gzip.compress(b'{"content": "hello"}\n' * 10_000)[:-20])


def test_damaged_inputs_are_reported_together_after_all_others_are_finished(workspace):
    add_damaged_inputs(workspace)
    with pytest.raises(DataError, match=r"(?s)2 of 5 input .*/b\.gz: .*\n.*/d\.json: .*With --quarantine") as caught:
        workspace.run(max_error_rate=0.5)
    assert len(str(caught.value).splitlines()) == 3
    folder = workspace.folder / "out" / "run_content_document.partial"
    assert len(list(folder.glob("*.done"))) == 3
    assert [file.name for file in folder.parent.iterdir()] == [folder.name]
    workspace.add_texts("d.json", "xyz")
    (workspace.inputs / "b.gz").write_bytes(gzip.compress(b'{"content": "hello"}'))
    workspace.run(resume=True)
    sound = ["hello", "world [UNK]"]
    assert decoded(workspace) == [*sound, "hello", *sound, "xyz", *sound]


def test_quarantined_inputs_are_left_out_as_a_whole_and_named_in_the_manifest(workspace, monkeypatch):
    add_damaged_inputs(workspace)
    pq.write_table(pa.table({"text": ["hello"]}), workspace.inputs / "f.parquet")  # found by the plan
    pq.write_table(pa.table({"content": [f"hello {n}" for n in range(500)]}), workspace.inputs / "g.parquet", 100)
    content = (workspace.inputs / "g.parquet").read_bytes()
    (workspace.inputs / "g.parquet").write_bytes(content[:1000] + bytes(200) + content[1200:])
    cut_small(monkeypatch, 2000)
    chunks = plan_preprocessing(workspace.settings(quarantine=True)).chunks
    assert sum(chunk.path.endswith("g.parquet") for chunk in chunks) > 1
    workspace.run(quarantine=True)
    manifest = workspace.corpus().manifest
    left_out = {name.rpartition("/")[2]: file for name, file in manifest.quarantined.items()}
    assert list(left_out) == ["b.gz", "d.json", "f.parquet", "g.parquet"]
    assert left_out["b.gz"].bytes == (workspace.inputs / "b.gz").stat().st_size and "b.gz" in left_out["b.gz"].reason
    assert [name[-7:] for name in manifest.inputs] == ["a.jsonl", "c.jsonl", "e.jsonl"]
    assert (manifest.records, manifest.documents) == (6, 6)
    assert is_complete(plan_preprocessing(workspace.settings(quarantine=True, resume=True)))
    for name in left_out:
        (workspace.inputs / name).unlink()
    workspace.run("sound")
    for end in ("bin", "idx"):
        assert workspace.contents("sound")[f"content_document.{end}"] == workspace.contents()[f"content_document.{end}"]


def test_credentials_of_urls_stay_out_of_manifest_partial_folder_and_screen(workspace, server):
    """The server ignores the credentials. The plan finds one damaged file, the run finds the other."""
    workspace.add_texts("a.jsonl", *["hello"] * 20)
    (workspace.inputs / "b.parquet").write_bytes(b"PAR1" + bytes(100))
    (workspace.inputs / "c.gz").write_bytes(gzip.compress(b'{"content": "hello"}\n' * 10_000)[:-20])
    address = server.replace("http://", "http://me:secret@") + "/inputs/"
    inputs = [f"{address}{name}?sig=secret" for name in ("a.jsonl", "b.parquet", "c.gz")]
    command = ["--output-prefix", workspace.folder / "out" / "run", "--tokenizer-model", workspace.vocab]
    command += ["--max-error-rate", "1", "--input", *inputs]
    endings = {("--quarantine", "--dry-run"): 0, (): 65, (f"{address}gone?sig=secret",): 66, ("--quarantine",): 0}
    output = ""
    for more, expected in endings.items():
        code, *screen = call("preprocess", *command, *more)
        assert code == expected, screen
        output += "".join(screen)
    with pytest.raises(DataError):
        workspace.run("damaged", inputs=tuple(inputs[::2]))  # leaves its partial folder
    files = [file for file in (workspace.folder / "out").rglob("*") if file.suffix in (".json", ".done")]
    output += "".join(file.read_text() for file in files)
    assert len(files) >= 3 and list(workspace.corpus().manifest.quarantined) == [
        f"{server}/inputs/{name}" for name in ("b.parquet", "c.gz")
    ]
    assert f"{server}/inputs/b.parquet: damaged parquet file" in output and f"{server}/inputs/gone" in output
    assert "secret" not in output


# --- a fast back end that gives wrong ids


@pytest.fixture
def wrong_nanotoken(workspace, monkeypatch):
    """Make nanotoken exchange the ids of "xy" and "zy", and let it pass the probe."""
    pytest.importorskip("nanotoken")
    build, exchange = fast_backends._build_nanotoken, {"xy": "zy", "zy": "xy"}
    pieces = [exchange.get(piece, piece) for piece in WORDS]
    wrong = load_tokenizer(write_vocabulary(workspace.folder / "wrong.txt", pieces))
    monkeypatch.setattr(fast_backends, "_build_nanotoken", lambda tokenizer: build(wrong))
    monkeypatch.setattr(fast_backends, "probe_strings", lambda tokenizer: ["hello"])
    encoders = {}  # not shared with other tests
    for module in (chunks_module, run_module):
        monkeypatch.setattr(module, "loaded_encoders", encoders)


def add_inputs_with_wrong_ids(workspace, *, verified_in):
    """Add six input files of 80 documents: the 71st of each, which is not verified, and the 4th of one are wrong."""
    for number in range(6):
        texts = ["hello world"] * 80
        texts[70] = "hello xy"
        if number == verified_in:
            texts[3] = "hello xy"
        workspace.add_texts(f"{number}.jsonl", *texts)


@pytest.mark.usefixtures("wrong_nanotoken")
def test_wrong_ids_of_a_fast_back_end_end_the_run_and_none_of_its_chunks_is_resumed(workspace):
    add_inputs_with_wrong_ids(workspace, verified_in=None)
    workspace.run("unseen")  # control: documents that are not verified
    assert [*workspace.corpus("unseen").manifest.tokenizer_backends.values()] == [BackendRecord(480, 6 * 64)]
    add_inputs_with_wrong_ids(workspace, verified_in=4)
    for resume in (False, True):
        with pytest.raises(ConfigError, match=r"/4\.jsonl: nanotoken .* differs .*--tokenizer-backend reference --ov"):
            workspace.run(resume=resume)
    with pytest.raises(ConfigError, match="belongs to a run with tokenizer backend nanotoken"):
        workspace.run(tokenizer_backend="reference", resume=True)
    workspace.run(tokenizer_backend="reference", overwrite=True)
    assert [*workspace.corpus().manifest.tokenizer_backends.values()] == [BackendRecord(480, 0)]
    assert workspace.contents()["content_document.bin"] != workspace.contents("unseen")["content_document.bin"]
