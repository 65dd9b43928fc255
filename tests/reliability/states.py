"""Contents of checkpoints, for comparisons bit for bit."""

from pathlib import Path

import torch
from json_files import read_json
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the whole tensors of a checkpoint, read by torch instead of this project."""
    reader = dcp.HuggingFaceStorageReader(str(checkpoint))
    described = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in described.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    assert len(tensors) == len(described) > 0, sorted(described)
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def assert_same_tensors(checkpoint: Path, expected: Path) -> None:
    """Assert that weights and optimizer state of two checkpoints are equal bit for bit."""
    tensors, expected_tensors = tensors_of(checkpoint), tensors_of(expected)
    assert tensors.keys() == expected_tensors.keys()
    assert [name for name, tensor in expected_tensors.items() if not torch.equal(tensors[name], tensor)] == []


def assert_same_state(checkpoint: Path, expected: Path) -> None:
    """Assert that weights, optimizer state and train state of two checkpoints are equal bit for bit."""
    assert_same_tensors(checkpoint, expected)
    state, expected_state = (read_json(folder / "train_state.json") for folder in (checkpoint, expected))
    assert state["progress"] == expected_state["progress"]
