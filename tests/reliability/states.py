"""What checkpoints hold, for comparisons bit for bit."""

import json
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whichever ranks wrote it."""
    reader = dcp.HuggingFaceStorageReader(str(checkpoint))  # and not this project's own
    described = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in described.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    assert len(tensors) == len(described) > 0, sorted(described)
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def progress_of(checkpoint: Path) -> dict[str, Any]:
    """How far the run had come: iteration, place in the data, counts."""
    return dict(json.loads((checkpoint / "train_state.json").read_text())["progress"])


def assert_same_state(checkpoint: Path, expected: Path) -> None:
    """Weights, moments and progress are those of the other checkpoint, bit for bit."""
    found, wanted = tensors_of(checkpoint), tensors_of(expected)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    assert progress_of(checkpoint) == progress_of(expected)


def names_in(folder: Path) -> set[str]:
    """Of the checkpoints and of whatever lies beside them, without logs and lock."""
    return {path.name for path in folder.iterdir()} - {"metrics.jsonl", "tensorboard", "lock"}
