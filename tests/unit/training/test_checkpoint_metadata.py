"""The table of contents of a checkpoint: real ones are read as torch reads them; nothing in one runs code or lies."""

import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)

from megatron_neobert.errors import CheckpointError
from megatron_neobert.training.checkpoint_metadata import SafeReader


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tensors = {"a": torch.ones(3, 2), "b": torch.zeros(4, dtype=torch.bfloat16), "scalar": torch.tensor(3)}
    torch_checkpoint.save(tensors, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    return tmp_path / "checkpoint"


def change(checkpoint: Path, edit: Callable[[Metadata], object]) -> None:
    table = torch_checkpoint.FileSystemReader(checkpoint).read_metadata()
    edit(table)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(table))


def test_real_table_is_read_as_torch_reads_it(checkpoint: Path):
    ours, theirs = (reader(checkpoint).read_metadata() for reader in (SafeReader, torch_checkpoint.FileSystemReader))
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert set(ours.state_dict_metadata) == {"a", "b", "scalar"}


def test_table_is_not_read_again_after_it_was_checked(checkpoint: Path):
    reader = SafeReader(checkpoint)
    checked = reader.read_metadata()
    (checkpoint / ".metadata").write_bytes(b"")
    assert reader.read_metadata() is checked


# --- what a table may create ---


class Call:
    """Pickles as a call of `function`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def pickled_name(module: str, name: str) -> bytes:
    return b"".join(b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, name)) + b"\x93"


METADATA = "torch.distributed.checkpoint.metadata"
# A name with a dot walks through the attributes of an allowed module: torch's metadata module imports `os`.
THROUGH_AN_ALLOWED_MODULE = b"\x80\x04" + pickled_name(METADATA, "os.mkdir") + b"\x8c\x03ran\x85R."


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


def test_module_is_not_imported_because_a_table_names_it(checkpoint: Path):
    (checkpoint / ".metadata").write_bytes(b"\x80\x04" + pickled_name("antigravity", "anything") + b".")
    with pytest.raises(CheckpointError, match=r"asks for antigravity\.anything"):
        SafeReader(checkpoint).read_metadata()
    assert "antigravity" not in sys.modules


STATE = b"N}\x8c\x07changedK\x01s\x86b"  # (None, {"changed": 1}), and BUILD, which sets these attributes
LAYOUT = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
CHANGES = {
    "class": (b"\x80\x04" + pickled_name(METADATA, "Metadata") + STATE + b".", Metadata),
    "function": (b"\x80\x04" + pickled_name("torch.serialization", "_get_layout") + STATE + b".",
                 torch.serialization._get_layout),
    "member": (pickle.dumps(LAYOUT)[:-1] + STATE + b".", LAYOUT),
}  # fmt: skip


@pytest.mark.parametrize("kind", CHANGES)
def test_table_cannot_change_what_this_process_goes_on_using(checkpoint: Path, kind: str):
    content, target = CHANGES[kind]
    (checkpoint / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"it changes a \w+, which no table of contents does"):
        SafeReader(checkpoint).read_metadata()
    assert not hasattr(target, "changed")
    pickle.loads(content)  # the control
    assert target.changed == 1
    del target.changed


# --- damaged tables ---


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not the table of contents"),
        (b"\x80\x04\x95garbage", "not the table of contents"),
        (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x0f.", "not the table of contents"),
        (pickle.dumps({"a": 1}), "holds a dict"),
        (pickle.dumps(Metadata.__new__(Metadata)), "its records are damaged"),
    ],
    ids=["empty", "garbage", "2^60 bytes", "another object", "no fields"],
)
def test_damaged_table_is_refused_with_its_path(checkpoint: Path, content: bytes, reason: str):
    (checkpoint / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"\.metadata: {reason}"):
        SafeReader(checkpoint).read_metadata()


def test_missing_table_is_an_incomplete_checkpoint(checkpoint: Path):
    (checkpoint / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"\.metadata: missing, so the checkpoint is incomplete"):
        SafeReader(checkpoint).read_metadata()


# --- what a table may refer to ---


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "sub/file", "..", ".", "", "a\nb", "link", "absent"])
def test_file_outside_the_folder_is_refused(checkpoint: Path, name: str):
    (checkpoint.parent / "outside").write_bytes(bytes(10_000))
    (checkpoint / "sub").mkdir()
    (checkpoint / "sub" / "file").write_bytes(bytes(10_000))
    (checkpoint / "link").symlink_to(checkpoint.parent / "outside")

    def edit(table: Metadata) -> None:
        for place in table.storage_data.values():
            place.relative_path = name

    change(checkpoint, edit)
    with pytest.raises(CheckpointError, match=r"\.metadata: it refers to '?.*, which is "):
        SafeReader(checkpoint).read_metadata()


def test_file_that_the_manifest_does_not_list_is_refused(checkpoint: Path):
    manifest = checkpoint / "MANIFEST.json"
    manifest.write_text(json.dumps({"files": {"__0_0.distcp": {}}}))
    SafeReader(checkpoint).read_metadata()
    manifest.write_text(json.dumps({"files": {".metadata": {}}}))
    with pytest.raises(CheckpointError, match=r"it refers to __0_0\.distcp, which MANIFEST\.json does not list"):
        SafeReader(checkpoint).read_metadata()


def place_of(table: Metadata, name: str) -> Any:
    return next(place for index, place in table.storage_data.items() if index.fqn == name)


LIES: dict[str, tuple[Callable[[Metadata], object], str]] = {
    "ends after the file": (
        lambda table: setattr(place_of(table, "a"), "length", 2**40),
        r"'a' ends at byte \d+ of __0_0\.distcp, which has \d+",
    ),
    "starts before the file": (lambda table: setattr(place_of(table, "a"), "offset", -1), r"\(-1, \d+\) are not all"),
    "is transformed": (
        lambda table: setattr(place_of(table, "a"), "transform_descriptors", ["zlib"]),
        "'a' is stored through a transformation",
    ),
    "is larger than its data": (
        lambda table: table.state_dict_metadata.update(
            a=TensorStorageMetadata(
                table.state_dict_metadata["a"].properties,
                torch.Size([2**40, 2]),
                [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2**40, 2]))],
            )
        ),
        "'a' has a part of 2199023255552 values, too many for the",
    ),
    "has no parts": (
        lambda table: setattr(table.state_dict_metadata["a"], "chunks", []),
        "'a' has 6 values, but its parts hold 0",
    ),
    "has a part outside": (
        lambda table: setattr(table.state_dict_metadata["a"], "size", torch.Size([2, 2])),
        r"'a' has a part that ends at \[3, 2\], outside its \(2, 2\)",
    ),
    "has a part of negative size": (
        lambda table: setattr(table.state_dict_metadata["a"].chunks[0], "sizes", torch.Size([-3, -2])),
        r"\(0, 0, -3, -2\) are not all counts",
    ),
    "is stored nowhere": (lambda table: table.storage_data.clear(), "its records are damaged"),
}


@pytest.mark.parametrize("lie", LIES)
def test_tensor_that_does_not_lie_where_the_table_says_is_refused(checkpoint: Path, lie: str):
    edit, message = LIES[lie]
    change(checkpoint, edit)
    with pytest.raises(CheckpointError, match=rf"\.metadata: {message}"):
        SafeReader(checkpoint).read_metadata()


def test_data_that_is_another_tensor_is_a_damaged_checkpoint(checkpoint: Path):
    def exchange(table: Metadata) -> None:
        a, b = place_of(table, "a"), place_of(table, "b")
        a.offset, b.offset, a.length, b.length = b.offset, a.offset, b.length, a.length

    change(checkpoint, exchange)
    with pytest.raises(torch_checkpoint.CheckpointException, match=r"CheckpointError: .* cannot be read \("):
        torch_checkpoint.load({"a": torch.ones(3, 2)}, storage_reader=SafeReader(checkpoint), no_dist=True)
