"""train_state.json: what a run saves is read back, and nothing else is computed with."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megatron_neobert.checkpoint.contents import read_train_state, write_train_state
from megatron_neobert.data.batches.rows import Cursor
from megatron_neobert.errors import CheckpointError
from megatron_neobert.state import TrainState

PROGRESS = TrainState(corpus_sha256="ab" * 32, iteration=7, cursor=Cursor(1, 2, 3), recent_updates=((2.5, 0.5),))


@pytest.mark.parametrize("optimizer", [{"param_groups": [{"step": 7, "lr": 0.1 + 0.2}]}, None])
def test_progress_that_a_run_saves_is_read_back(tmp_path: Path, optimizer: dict[str, Any] | None):
    write_train_state(tmp_path, PROGRESS, optimizer)
    assert read_train_state(tmp_path) == (PROGRESS, optimizer)


def test_progress_of_an_older_version_is_read(tmp_path: Path):
    state = {"progress": {"corpus_sha256": "ab", "iteration": 7, "cursor": asdict(Cursor())}, "optimizer": {}}
    (tmp_path / "train_state.json").write_text(json.dumps(state))
    assert read_train_state(tmp_path) == (TrainState(corpus_sha256="ab", iteration=7), {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("progress"), r"KeyError: 'progress'"),
        (lambda state: state.update(optimizer=[1]), r"optimizer a list"),
        (lambda state: state["progress"].pop("iteration"), r"KeyError: 'iteration'"),
        (lambda state: state["progress"].update(iteration=-5), r"iteration is -5, no count"),
        (lambda state: state["progress"].update(iteration="7"), r"iteration is '7', no count"),
        (lambda state: state["progress"].update(cursor={"epoch": "a"}), r"epoch is 'a', no count"),
        (lambda state: state["progress"].update(cursor={"sources": 3, "row": ()}), r"TypeError: .*'sources'"),
        (lambda state: state["progress"].update(recent_updates=((1.0,),)), r"ValueError: not enough values"),
        (lambda state: state["progress"].update(recent_updates=((1.0, "a"),)), r"recent_updates holds more"),
        (lambda state: state["progress"].update(corpus_sha256=3), r"corpus_sha256 is 3"),
        (lambda state: state["progress"].update(more=1), r"TypeError: .*'more'"),
    ],
)
def test_progress_that_no_run_saves_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
):
    state: dict[str, Any] = {"progress": asdict(PROGRESS), "optimizer": {}}
    change(state)
    (tmp_path / "train_state.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match=rf"train_state\.json: not of a run of this program \(.*{message}"):
        read_train_state(tmp_path)


def test_missing_or_damaged_file_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"train_state\.json: missing"):
        read_train_state(tmp_path)
    (tmp_path / "train_state.json").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(CheckpointError, match=r"train_state\.json: not of a run"):
        read_train_state(tmp_path)
