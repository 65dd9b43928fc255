"""common.pt: what a run saves is read back, and nothing else is computed with."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_neobert.data.rows import Cursor, read_cursor
from megatron_neobert.errors import CheckpointError
from megatron_neobert.training.common_file import read_common
from megatron_neobert.training.run import Progress

PROGRESS = Progress(corpus_sha256="ab" * 32, iteration=7, cursor=Cursor(1, 2, 3), recent_updates=((2.5, 0.5),))


def test_progress_that_a_run_saves_is_read_back(tmp_path: Path):
    common = {"progress": asdict(PROGRESS), "optimizer": {"param_groups": [{"step": 7}]}}
    torch.save(common, tmp_path / "common.pt")
    assert read_common(tmp_path) == common
    assert read_cursor(common["progress"]["cursor"]) == PROGRESS.cursor


def test_place_in_a_blend_by_rows_is_refused_but_its_checkpoint_is_read(tmp_path: Path):
    retired = {"sources": (asdict(Cursor()), asdict(Cursor(0, 0, 9))), "rows": (1, 2)}
    common = {"progress": {**asdict(PROGRESS), "cursor": retired}, "optimizer": {}}
    torch.save(common, tmp_path / "common.pt")
    with pytest.raises(CheckpointError, match=r"a blend whose shares counted rows.* as --continue-from"):
        read_cursor(read_common(tmp_path)["progress"]["cursor"])


def test_progress_of_an_older_version_is_read(tmp_path: Path):
    common = {"progress": {"corpus_sha256": "ab", "iteration": 7, "cursor": asdict(Cursor())}, "optimizer": {}}
    torch.save(common, tmp_path / "common.pt")
    assert read_common(tmp_path) == common


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda common: common.pop("progress"), r"no progress and optimizer"),
        (lambda common: common.update(optimizer=[1]), r"no progress and optimizer"),
        (lambda common: common["progress"].pop("iteration"), r"its progress has no iteration;"),
        (lambda common: common["progress"].update(iteration=-5), r"has iteration -5;"),
        (lambda common: common["progress"].update(iteration="7"), r"has iteration '7';"),
        (lambda common: common["progress"].update(iteration=torch.ones(2)), r"has iteration of type Tensor;"),
        (lambda common: common["progress"].update(cursor={"epoch": "a"}), r"has cursor of type dict;"),
        (lambda common: common["progress"].update(cursor={"sources": 3, "row": ()}), r"has cursor of type dict;"),
        (lambda common: common["progress"].update(recent_updates=((1.0,),)), r"has recent_updates of type tuple;"),
        (lambda common: common["progress"].update(corpus_sha256=3, more=1), r"has an unknown 'more', corpus_sha256 3;"),
    ],
)
def test_progress_that_no_run_saves_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
):
    common: dict[str, Any] = {"progress": asdict(PROGRESS), "optimizer": {}}
    change(common)
    torch.save(common, tmp_path / "common.pt")
    with pytest.raises(CheckpointError, match=rf"common\.pt: .*{message}"):
        read_common(tmp_path)


def test_missing_file_is_an_incomplete_checkpoint(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"common\.pt: missing"):
        read_common(tmp_path)


def test_damaged_file_is_refused(tmp_path: Path):
    (tmp_path / "common.pt").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(CheckpointError, match=r"common\.pt: cannot be read safely"):
        read_common(tmp_path)
