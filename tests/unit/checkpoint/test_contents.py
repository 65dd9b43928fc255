"""train_state.json: saved values are read back, and invalid values are refused."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megatron_neobert.checkpoint.contents import read_train_state, write_train_state
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
        (lambda state: state["progress"].update(iteration="7"), r"got `str` - at `\$\.iteration`"),
        (lambda state: state["progress"].update(iteration=True), r"got `bool` - at `\$\.iteration`"),
        (lambda state: state["progress"].update(cursor={"epoch": "a"}), r"got `str` - at `\$\.cursor\.epoch`"),
        (lambda state: state["progress"].update(cursor={"row": 1 << 62}), r"row is \d+, which is not a valid count"),
        (lambda state: state["progress"].update(corpus_sha256=3), r"got `int` - at `\$\.corpus_sha256`"),
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
