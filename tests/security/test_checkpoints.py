"""Hostile checkpoints: training and conversion end with code 78 and one sentence, and nothing in them runs.

Each control shows that the file is dangerous: the same command with --trust-checkpoint, or the plain library call, runs
what it holds.
"""

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint
from hostile import Canary, Checkpoint
from processes import Ended, run_command
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from megatron_neobert.errors import CheckpointError
from megatron_neobert.training.common_file import read_common
from megatron_neobert.training.safe_reading import open_reader

Reader = Callable[..., Ended]


@pytest.fixture(params=["training", "convert"])
def read(request: pytest.FixtureRequest, training: list[str], checkpoint: Checkpoint, tmp_path: Path) -> Reader:
    """Runs a command that reads the checkpoint; each is a door of its own."""
    save = checkpoint.save
    return {
        "training": lambda *more: run_command(
            "megatron_neobert.pretrain", *training, "--save", save, "--load", save, *more
        ),
        "convert": lambda *more: run_command(
            "checkpoint_conversion.convert", "megatron-to-hf", "--load", save, "--output", tmp_path / "hf", *more
        ),
    }[request.param]


def test_untouched_checkpoint_is_read(read: Reader):
    assert read().code == 0


def test_table_of_contents_that_runs_code_is_refused(read: Reader, checkpoint: Checkpoint, canary: Canary):
    checkpoint.replace(".metadata", pickle.dumps(canary))
    result = read()
    assert result.refused(78), result.output
    assert "asks for posix.mkdir, which no table of contents needs; if you trust" in result.output
    assert not canary.has_run
    read("--trust-checkpoint")
    assert canary.has_run


def test_verify_goes_through_the_same_door(checkpoint: Checkpoint, canary: Canary):
    checkpoint.replace(".metadata", pickle.dumps(canary))
    result = run_command("checkpoint_conversion.verify", checkpoint.save, checkpoint.save)
    assert result.refused(78), result.output
    assert not canary.has_run


@pytest.mark.parametrize("name", ["weights_note", "decoder.layers.0.self_attention.core_attention._extra_state"])
def test_stored_object_is_refused(read: Reader, checkpoint: Checkpoint, canary: Canary, name: str):
    place = _StorageInfo(*checkpoint.append(canary))

    def add_object(table: Metadata) -> None:
        table.state_dict_metadata[name] = BytesStorageMetadata()
        table.storage_data[MetadataIndex(name)] = place

    checkpoint.change_table(add_object)
    result = read()
    assert result.refused(78), result.output
    assert f"'{name}' is a stored object, which torch would unpickle" in result.output
    torch_checkpoint.load({name: b""}, checkpoint_id=checkpoint.folder, no_dist=True)
    assert canary.has_run, "the control: torch opens it when it is asked for"


def test_tensor_data_that_is_an_object_is_refused(read: Reader, checkpoint: Checkpoint, canary: Canary):
    file, offset, length = checkpoint.append([canary, torch.ones(200_000)])
    name = "output_layer.bias"

    def move(table: Metadata) -> None:
        (index,) = [index for index in table.storage_data if index.fqn == name]
        table.storage_data[index] = _StorageInfo(file, offset, length)

    checkpoint.change_table(move)
    result = read()
    assert result.refused(78), result.output
    assert "it asks for posix.mkdir, which no tensor needs" in result.output
    assert not canary.has_run
    with (checkpoint.folder / file).open("rb") as stream:
        stream.seek(offset)
        torch.load(stream, weights_only=False)
    assert canary.has_run


def test_extra_state_of_transformer_engine_is_not_unpickled(read: Reader, checkpoint: Checkpoint, canary: Canary):
    """megatron.core 0.16.1 calls pickle.loads on such bytes when Transformer Engine's modules load them."""
    name = "decoder.layers.self_attention.linear_qkv._extra_state"
    state = torch.frombuffer(bytearray(pickle.dumps(canary)), dtype=torch.uint8)
    torch_checkpoint.save({name: state}, checkpoint_id=checkpoint.save / "other", no_dist=True)
    other = Checkpoint(checkpoint.save / "other").read_table()
    place = _StorageInfo(*checkpoint.append(state))

    def add_tensor(table: Metadata) -> None:
        table.state_dict_metadata |= other.state_dict_metadata
        table.storage_data |= dict.fromkeys(other.storage_data, place)

    checkpoint.change_table(add_tensor)
    result = read()
    assert "Traceback" not in result.output
    assert result.code in (0, 78)  # the converter refuses a tensor that no NeoBERT has
    assert not canary.has_run
    pickle.loads(state.numpy().tobytes())
    assert canary.has_run


@pytest.mark.parametrize("content", [b'{"sharded_backend": "zarr"}', b"[]", b"{", b"[" * 100_000], ids=len)
def test_other_format_is_refused(training: list[str], checkpoint: Checkpoint, content: bytes):
    checkpoint.replace("metadata.json", content)
    result = run_command("megatron_neobert.pretrain", *training, "--save", checkpoint.save, "--load", checkpoint.save)
    assert result.refused(78), result.output
    assert "metadata.json: " in result.output


def test_common_file_that_runs_code_is_refused(training: list[str], checkpoint: Checkpoint, canary: Canary):
    torch.save({"progress": canary}, checkpoint.folder / "common.pt")
    checkpoint.seal()
    result = run_command("megatron_neobert.pretrain", *training, "--save", checkpoint.save, "--load", checkpoint.save)
    assert result.refused(78), result.output
    assert "common.pt: cannot be read safely (it asks for posix.mkdir, which no tensor needs)" in result.output
    assert not canary.has_run


def test_common_file_is_read_safely_even_where_torch_is_told_not_to(
    checkpoint: Checkpoint, canary: Canary, monkeypatch: pytest.MonkeyPatch
):
    torch.save({"progress": canary}, checkpoint.folder / "common.pt")
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    with pytest.raises(CheckpointError, match=r"common\.pt: cannot be read safely"):
        read_common(checkpoint.folder)
    assert not canary.has_run
    torch.load(checkpoint.folder / "common.pt")
    assert canary.has_run


def test_classes_that_megatron_adds_are_not_created_from_a_common_file(checkpoint: Checkpoint, tmp_path: Path):
    path = checkpoint.folder / "common.pt"
    torch.save({"progress": tmp_path}, path)
    with torch.serialization.safe_globals([type(tmp_path)]):
        assert torch.load(path)["progress"] == tmp_path
        with pytest.raises(CheckpointError, match=r"asks for pathlib\.PosixPath"):
            read_common(checkpoint.folder)
        assert type(tmp_path) in torch.serialization.get_safe_globals()


def test_table_of_one_rank_is_no_way_round(checkpoint: Checkpoint, canary: Canary):
    """torch unpickles __0.metadata where .metadata is missing or damaged."""
    (checkpoint.folder / ".metadata").unlink()
    (checkpoint.folder / "__0.metadata").write_bytes(pickle.dumps(canary))
    with pytest.raises(CheckpointError, match=r"\.metadata: missing"):
        open_reader(checkpoint.folder, trust=False)
    assert not canary.has_run
    with pytest.raises(torch_checkpoint.CheckpointException):
        torch_checkpoint.load({"a": torch.ones(1)}, checkpoint_id=checkpoint.folder, no_dist=True)
    assert canary.has_run


@pytest.mark.parametrize("command", ["training", "convert", "verify"])
def test_variable_that_makes_torch_unpickle_is_refused(
    training: list[str], checkpoint: Checkpoint, tmp_path: Path, command: str
):
    save = checkpoint.save
    module, *words = {
        "training": ["megatron_neobert.pretrain", *training],
        "convert": ["checkpoint_conversion.convert", "megatron-to-hf", "--load", save, "--output", tmp_path / "hf"],
        "verify": ["checkpoint_conversion.verify", save, save],
    }[command]
    result = run_command(str(module), *words, environment={"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"})
    assert result.refused(2), result.output
    assert "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 lets checkpoints run code; unset it" in result.output
