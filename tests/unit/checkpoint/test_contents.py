"""train_state.json: what a run saves is read back, and nothing else is computed with."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megatron_neobert.checkpoint.contents import read_train_state, write_train_state
from megatron_neobert.data.batches.rows import Cursor, read_cursor
from megatron_neobert.errors import CheckpointError
from megatron_neobert.state import Progress

PROGRESS = Progress(corpus_sha256="ab" * 32, iteration=7, cursor=Cursor(1, 2, 3), recent_updates=((2.5, 0.5),))


def write(folder: Path, state: dict[str, Any]) -> None:
    (folder / "train_state.json").write_text(json.dumps(state))


def test_progress_that_a_run_saves_is_read_back(tmp_path: Path):
    optimizer = {"param_groups": [{"step": 7, "lr": 0.1 + 0.2}]}
    write_train_state(tmp_path, PROGRESS, optimizer)
    state = read_train_state(tmp_path)
    assert state == {"progress": asdict(PROGRESS), "optimizer": optimizer}
    assert read_cursor(state["progress"]["cursor"]) == PROGRESS.cursor


def test_place_in_a_blend_by_rows_is_refused_but_its_checkpoint_is_read(tmp_path: Path):
    retired = {"sources": (asdict(Cursor()), asdict(Cursor(0, 0, 9))), "rows": (1, 2)}
    common = {"progress": {**asdict(PROGRESS), "cursor": retired}, "optimizer": {}}
    write(tmp_path, common)
    with pytest.raises(CheckpointError, match=r"a blend whose shares counted rows.* as --continue-from"):
        read_cursor(read_train_state(tmp_path)["progress"]["cursor"])


def test_progress_of_an_older_version_is_read(tmp_path: Path):
    common = {"progress": {"corpus_sha256": "ab", "iteration": 7, "cursor": asdict(Cursor())}, "optimizer": {}}
    write(tmp_path, common)
    assert read_train_state(tmp_path)["progress"] == {**common["progress"], "recent_updates": ()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda common: common.pop("progress"), r"no progress and optimizer"),
        (lambda common: common.update(optimizer=[1]), r"no progress and optimizer"),
        (lambda common: common["progress"].pop("iteration"), r"its progress has no iteration;"),
        (lambda common: common["progress"].update(iteration=-5), r"has iteration -5;"),
        (lambda common: common["progress"].update(iteration="7"), r"has iteration '7';"),
        (lambda common: common["progress"].update(iteration=[2]), r"has iteration of type list;"),
        (lambda common: common["progress"].update(cursor={"epoch": "a"}), r"has cursor of type dict;"),
        (lambda common: common["progress"].update(cursor={"sources": 3, "row": ()}), r"has cursor of type dict;"),
        (lambda common: common["progress"].update(recent_updates=((1.0,),)), r"has recent_updates of type list;"),
        (lambda common: common["progress"].update(corpus_sha256=3, more=1), r"has an unknown 'more', corpus_sha256 3;"),
    ],
)
def test_progress_that_no_run_saves_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
):
    common: dict[str, Any] = {"progress": asdict(PROGRESS), "optimizer": {}}
    change(common)
    write(tmp_path, common)
    with pytest.raises(CheckpointError, match=rf"train_state\.json: .*{message}"):
        read_train_state(tmp_path)


def test_missing_file_is_an_incomplete_checkpoint(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"train_state\.json: missing"):
        read_train_state(tmp_path)


def test_damaged_file_is_refused(tmp_path: Path):
    (tmp_path / "train_state.json").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(CheckpointError, match=r"train_state\.json: cannot be read"):
        read_train_state(tmp_path)
