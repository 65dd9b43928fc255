"""Hostile inputs of preprocessing and hostile corpora: nothing is unpickled or unpacked to where it wants to go."""

import io
import pickle
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hostile import Canary
from processes import run_command


def pack_tar(canary: Canary) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        entry = tarfile.TarInfo(f"../{canary.mark.name}")
        entry.size = 3
        archive.addfile(entry, io.BytesIO(b"ran"))
    return content.getvalue()


def pack_zip(canary: Canary) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr(f"../{canary.mark.name}", "ran")
    return content.getvalue()


def pack_numpy(canary: Canary) -> bytes:
    content = io.BytesIO()
    np.save(content, np.array([canary], dtype=object), allow_pickle=True)
    return content.getvalue()


HOSTILE = {
    "shard.pkl": pickle.dumps,
    "shard.jsonl": pickle.dumps,
    "shard.tar": pack_tar,
    "shard.zip": pack_zip,
    "shard.npy": pack_numpy,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_shard_that_is_no_text_is_refused(tiny_corpus: Any, tmp_path: Path, canary: Canary, name: str):
    (tmp_path / "in").mkdir()
    shard = tmp_path / "in" / name
    shard.write_bytes(HOSTILE[name](canary))
    result = run_command(
        "tools.preprocess_data",
        *("--input", shard, "--output-prefix", tmp_path / "out", "--tokenizer-model", tiny_corpus.tokenizer),
    )
    assert result.refused(65), result.output
    assert not canary.has_run


def test_arrow_type_that_is_a_pickle_is_read_as_its_text(tiny_corpus: Any, tmp_path: Path, canary: Canary):
    """Arrow once unpickled a column's extension type when it opened the file."""
    extension = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": pickle.dumps(canary)}
    schema = pa.schema([pa.field("content", pa.string(), metadata=extension)])
    table = pa.table({"content": ["the cat sat on a mat"]}, schema=schema)
    with pa.OSFile(str(tmp_path / "shard.arrow"), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_table(table)
    result = run_command(
        "tools.preprocess_data",
        *("--input", tmp_path / "shard.arrow", "--output-prefix", tmp_path / "out"),
        *("--tokenizer-model", tiny_corpus.tokenizer),
    )
    assert "Traceback" not in result.output
    assert not canary.has_run
