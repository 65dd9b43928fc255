"""Contents of checkpoints, for comparisons bit for bit."""

import json
from pathlib import Path
from typing import Any

import torch
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


def train_state_of(checkpoint: Path) -> dict[str, Any]:
    return dict(json.loads((checkpoint / "train_state.json").read_text())["progress"])


def assert_same_tensors(checkpoint: Path, expected: Path) -> None:
    """Assert that weights and optimizer state of two checkpoints are equal bit for bit."""
    tensors, expected_tensors = tensors_of(checkpoint), tensors_of(expected)
    assert tensors.keys() == expected_tensors.keys()
    assert [name for name, tensor in expected_tensors.items() if not torch.equal(tensors[name], tensor)] == []


def assert_same_state(checkpoint: Path, expected: Path) -> None:
    """Assert that weights, optimizer state and train state of two checkpoints are equal bit for bit."""
    assert_same_tensors(checkpoint, expected)
    assert train_state_of(checkpoint) == train_state_of(expected)


def names_in(folder: Path) -> set[str]:
    """Return the names of all files and folders in a save folder, without logs and lock."""
    return {path.name for path in folder.iterdir()} - {"metrics.jsonl", "tensorboard", "lock"}
