"""Saved tensors and train states are read back, and invalid ones are refused."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_neobert.checkpoint.contents import (
    Box,
    StoredTensors,
    read_train_state,
    write_tensors,
    write_train_state,
)
from megatron_neobert.data.batches.windows import Cursor
from megatron_neobert.errors import CheckpointError
from megatron_neobert.state import TrainState

STATE = TrainState(corpus_sha256="ab" * 32, iteration=7, cursor=Cursor(1, 2, 3))


@pytest.mark.parametrize("optimizer", [{"param_groups": [{"step": 7, "lr": 0.1 + 0.2}]}, None])
def test_saved_train_state_is_read_back(tmp_path: Path, optimizer: dict[str, Any] | None):
    write_train_state(tmp_path, STATE, optimizer)
    assert read_train_state(tmp_path) == (STATE, optimizer)


def test_train_state_of_an_older_version_is_read(tmp_path: Path):
    progress = {"corpus_sha256": "ab", "iteration": 7, "cursor": asdict(Cursor()), "recent_updates": [[2.5, 0.5]]}
    state = {"progress": progress, "optimizer": {}}
    (tmp_path / "train_state.json").write_text(json.dumps(state))
    assert read_train_state(tmp_path) == (TrainState(corpus_sha256="ab", iteration=7), {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("progress"), r"KeyError: 'progress'"),
        (lambda state: state.update(optimizer=[1]), r"Expected `object | null`, got `array`"),
        (lambda state: state["progress"].update(iteration=-5), r"iteration is -5, which is not a valid count"),
        (lambda state: state["progress"].update(cursor={"row": 1 << 62}), r"row is \d+, which is not a valid count"),
    ],
)
def test_invalid_train_state_is_refused(tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str):
    state: dict[str, Any] = {"progress": asdict(STATE), "optimizer": {}}
    change(state)
    (tmp_path / "train_state.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match=rf"train_state\.json: not written by neobert \(.*{message}"):
        read_train_state(tmp_path)


def test_missing_or_damaged_file_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"train_state\.json: missing"):
        read_train_state(tmp_path)
    (tmp_path / "train_state.json").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(CheckpointError, match=r"train_state\.json: not written by neobert"):
        read_train_state(tmp_path)


WHOLE = torch.arange(12.0).view(3, 4)
# Part of a row, a whole row, and the rest, each in a file of its own.
BOXES = [((0, 1), (1, 3)), ((1, 0), (1, 4)), ((2, 0), (1, 4)), ((0, 0), (1, 1))]


def write_boxes(folder: Path, boxes: list[tuple[tuple[int, int], tuple[int, int]]], *, whole: tuple[int, ...]) -> None:
    for number, (offsets, shape) in enumerate(boxes):
        rows, columns = (slice(start, start + size) for start, size in zip(offsets, shape, strict=True))
        tensors = {"x": WHOLE[rows, columns].contiguous()}
        write_tensors(folder / f"rank_{number}.safetensors", tensors, {"x": Box(offsets, shape, whole)})


@pytest.mark.parametrize(
    ("boxes", "whole"),
    [
        (BOXES[:3], (3, 4)),
        ([*BOXES[:2], BOXES[3]], (3, 4)),
        ([*BOXES[:2], BOXES[1], BOXES[3]], (3, 4)),
        ([*BOXES[:2], BOXES[1], BOXES[3]], ()),
        (BOXES, (2, 6)),
        (BOXES, (4, 4)),
    ],
    ids=["first missing", "last missing", "twice for another", "twice, old", "other shape", "larger shape"],
)
def test_boxes_that_do_not_make_up_the_tensor_are_refused(tmp_path: Path, boxes, whole):
    write_boxes(tmp_path, boxes, whole=whole)
    with pytest.raises(CheckpointError, match=r"the shards of x do not add up to its shape"):
        StoredTensors(tmp_path)


@pytest.mark.parametrize("whole", [(3,), (3, -4)])
def test_a_shape_that_is_none_is_refused(tmp_path: Path, whole):
    write_boxes(tmp_path, BOXES, whole=whole)
    with pytest.raises(CheckpointError, match=r"rank_0\.safetensors: cannot be read .*x of shape \(1, 3\) begins at"):
        StoredTensors(tmp_path)
