"""The table of contents of a checkpoint: real ones are read as torch reads them, and nothing in one runs code."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint

from megatron_neobert.errors import CheckpointError
from megatron_neobert.training.checkpoint_metadata import SafeReader


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tensors = {"a": torch.ones(3, 2), "b": torch.zeros(4, dtype=torch.bfloat16), "step": 3}
    torch_checkpoint.save(tensors, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    return tmp_path / "checkpoint"


def test_real_table_is_read_as_torch_reads_it(checkpoint: Path):
    ours, theirs = (reader(checkpoint).read_metadata() for reader in (SafeReader, torch_checkpoint.FileSystemReader))
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert set(ours.state_dict_metadata) == {"a", "b", "step"}


class Call:
    """Pickles as a call of `function`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


# A name with a dot walks through the attributes of an allowed module: torch's metadata module imports `os`.
THROUGH_AN_ALLOWED_MODULE = b"".join(
    [
        b"\x80\x04",
        b"\x8c" + bytes([len("torch.distributed.checkpoint.metadata")]) + b"torch.distributed.checkpoint.metadata",
        b"\x8c" + bytes([len("os.mkdir")]) + b"os.mkdir",
        b"\x93\x8c\x03ran\x85R.",
    ]
)


@pytest.mark.parametrize(
    ("content", "asked"),
    [
        (pickle.dumps(Call(eval, "open('ran', 'w')")), "builtins.eval"),
        (THROUGH_AN_ALLOWED_MODULE, "torch.distributed.checkpoint.metadata.os.mkdir"),
    ],
    ids=["builtin", "through an allowed module"],
)
def test_table_that_calls_a_function_is_refused_before_the_call(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, asked: str
):
    monkeypatch.chdir(checkpoint)
    (checkpoint / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"asks for {asked.replace('.', '[.]')}, which"):
        SafeReader(checkpoint).read_metadata()
    assert not (checkpoint / "ran").exists()
    pickle.loads(content)  # the control: torch, which trusts the file, would have run it
    assert (checkpoint / "ran").exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not the table of contents"),
        (b"\x80\x04\x95garbage", "not the table of contents"),
        (pickle.dumps({"a": 1}), "holds a dict"),
    ],
    ids=["empty", "garbage", "another object"],
)
def test_damaged_table_is_refused_with_its_path(checkpoint: Path, content: bytes, reason: str):
    (checkpoint / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"\.metadata: {reason}"):
        SafeReader(checkpoint).read_metadata()


def test_missing_table_is_an_incomplete_checkpoint(checkpoint: Path):
    (checkpoint / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"\.metadata: missing, so the checkpoint is incomplete"):
        SafeReader(checkpoint).read_metadata()
