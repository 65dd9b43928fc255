"""Checkpoints: folders, verification, pruning, crashes during a save, locks, tensors and train states."""

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from json_files import edit_json
from unit.data.child_processes import count_changes
from unit.data.small_corpus import damage, replaced

from megatron_neobert.checkpoint import folder as checkpoint_files
from megatron_neobert.checkpoint.contents import Box, StoredTensors, write_tensors
from megatron_neobert.checkpoint.folder import (
    check_folders,
    claim,
    iteration_folder,
    list_checkpoints,
    list_folders,
    prepare_folder,
    prune,
    publish,
    verify_files,
    write_manifest,
)
from megatron_neobert.checkpoint.train_state import TrainState, read_train_state, write_train_state
from megatron_neobert.config.schema import CheckpointConfig
from megatron_neobert.data.batches.windows import Cursor
from megatron_neobert.errors import CheckpointError, ConfigError, OutputError

FILES = ("train_state.json", "settings.yaml", "rank_00000.safetensors", "rank_00001.safetensors", "tokenizer/vocab.txt")


def save_files(save: Path, iteration: int) -> Path:
    final = iteration_folder(save, iteration)
    temporary = prepare_folder(final)
    (temporary / "tokenizer").mkdir()
    for name in FILES:
        (temporary / name).write_text("content")
    write_manifest(temporary, {})
    publish(temporary, final)
    return final


def test_leftover_of_a_crash_that_cannot_be_deleted_does_not_prevent_the_same_save(tmp_path, monkeypatch):
    final = iteration_folder(tmp_path, 1)
    left = prepare_folder(final)
    monkeypatch.setattr(checkpoint_files, "delete_folder", lambda *_: None)
    assert prepare_folder(final).name == f"{left.name}.2"
    monkeypatch.undo()
    assert prepare_folder(final) == left
    assert names(tmp_path) == [left.name], "both are deleted once they can be"


def names(save: Path) -> list[str]:
    return sorted(path.name for path in save.iterdir())


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"), [(2, None, [9, 10]), (3, 4, [4, 8, 9, 10]), (2, 3, [3, 6, 9, 10])]
)
def test_pruning_keeps_the_newest_checkpoints_and_multiples_of_keep_every(tmp_path, keep_last, keep_every, kept):
    for iteration in range(1, 11):
        save_files(tmp_path, iteration)
    prune(tmp_path, keep_last=keep_last, keep_every=keep_every)
    assert [checkpoint_files.iteration_of(folder) for folder in reversed(list_checkpoints(tmp_path))] == kept
    for folder in list_checkpoints(tmp_path):
        verify_files(folder)


def test_link_to_a_checkpoint_is_this_checkpoint(tmp_path):
    (tmp_path / "latest").symlink_to(folder := save_files(tmp_path, 1))
    assert list_checkpoints(tmp_path / "latest") == [folder]


def test_all_files_and_folders_are_synced_before_a_checkpoint_is_published(tmp_path, monkeypatch):
    """A file whose folder was never synced can be missing after a power failure."""
    synced: list[str] = []
    fsync = os.fsync

    def sync_and_record(descriptor: int) -> None:
        fsync(descriptor)
        synced.append(os.path.relpath(Path(f"/proc/self/fd/{descriptor}").readlink(), tmp_path / ".tmp-iter_0000001"))

    monkeypatch.setattr(os, "fsync", sync_and_record)
    monkeypatch.setattr(checkpoint_files, "publish", lambda *_, **__: None)
    final = save_files(tmp_path, 1)
    del synced[synced.index(".") + 1 :]  # after the folder itself comes the manifest
    below = [path.relative_to(final) for path in final.rglob("*") if path.name != "MANIFEST.json"]
    assert sorted({*map(str, below), "."} - {*synced}) == []


def save_and_prune(save: Path, iteration: int) -> None:
    save_files(save, iteration)
    prune(save, keep_last=2, keep_every=None)


def restart(save: Path) -> int:
    """Start after the crash and save iteration 4; return the iteration of the checkpoint that was found.

    That checkpoint must be undamaged, and the save must delete leftovers of the crash.
    """
    check_folders(config(save))
    with claim(str(save)):
        newest = list_folders(save)[0]
        verify_files(newest)
        iteration = checkpoint_files.iteration_of(newest)
        save_and_prune(save, 4)
    assert names(save) == [f"iter_{iteration:07d}", "iter_0000004", "latest_checkpointed_iteration.txt", "lock"]
    return iteration


@pytest.mark.parametrize(("earlier", "found"), [((1, 2), {2, 3}), ((2, 3), {3})], ids=["new", "saved again"])
def test_crash_at_any_file_system_event_of_a_save_leaves_an_undamaged_newest_checkpoint(
    tmp_path, monkeypatch, earlier, found
):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # counted only
    for iteration in earlier:
        save_files(tmp_path / "template", iteration)
    iterations, changes = [], 0
    while not changes:
        save = tmp_path / str(len(iterations))
        shutil.copytree(tmp_path / "template", save)
        changes = count_changes(partial(save_and_prune, save, 3), killed_at=len(iterations) + 1)
        iterations.append(restart(save))
    assert len(iterations) > 40
    assert iterations == sorted(iterations) and set(iterations) == found


def test_file_of_another_rank_that_is_not_visible_is_reported(tmp_path):
    written = {"rank_00001.safetensors": checkpoint_files.FileRecord(bytes=10, sha256="0" * 64)}
    with pytest.raises(OSError, match="is not seen here; --save must be on a file system that all nodes share"):
        write_manifest(tmp_path, written)


def list_as(name: str) -> Callable[[Path], object]:
    """Return a change of the manifest, which lists train_state.json under this name."""
    return lambda folder: damage(folder / "MANIFEST.json", replaced(b"train_state.json", name.encode()))


def link_elsewhere(folder: Path) -> None:
    (folder / "train_state.json").rename(folder.parent / "elsewhere")
    (folder / "train_state.json").symlink_to(folder.parent / "elsewhere")


DAMAGES = {
    "incomplete": (list_as("state.json"), "does not list train_state.json"),
    "parent": (list_as("../x"), "'../x', which is not a file of a checkpoint"),
    "link": (link_elsewhere, "train_state.json: missing"),
    "truncated": (lambda folder: (folder / "train_state.json").write_text("conten"), "6 bytes, expected 7"),
    "no manifest": (lambda folder: (folder / "MANIFEST.json").unlink(), "MANIFEST.json: cannot be read"),
}


@pytest.mark.parametrize(("change", "message"), DAMAGES.values(), ids=DAMAGES)
def test_damage_of_a_checkpoint_is_found_and_the_file_is_named(tmp_path, change, message):
    folder = save_files(tmp_path, 2)
    verify_files(folder)
    change(folder)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        verify_files(folder)


@pytest.mark.parametrize("name", FILES)
def test_damage_of_any_file_is_found_by_exactly_one_of_the_shares_of_a_verification(tmp_path, name):
    folder, found = save_files(tmp_path, 1), []
    (folder / name).write_text("contenT")
    for number in range(3):
        try:
            verify_files(folder, share=(number, 3))
        except CheckpointError as error:
            found.append(str(error))
    (message,) = found
    assert message.startswith(f"{folder / name}: its sha256")


def config(folder: Path, **changes: object) -> CheckpointConfig:
    return CheckpointConfig(**{"save": str(folder), "load": str(folder), **changes})


def test_save_folder_with_checkpoints_of_another_run_or_a_stop_file_is_refused(tmp_path):
    save_files(tmp_path, 1)
    with pytest.raises(OutputError, match=r"already holds checkpoints of a run; add --load .* to resume it"):
        check_folders(config(tmp_path, load=None))
    (tmp_path / "STOP").touch()
    with pytest.raises(ConfigError, match=f"{tmp_path}/STOP exists, so no run starts in --save {tmp_path}; remove"):
        check_folders(config(tmp_path))


@pytest.mark.parametrize("remains", ["iter_0000003", "iter_0000003.damaged", "latest_checkpointed_iteration.txt"])
def test_remains_of_checkpoints_prevent_a_start_from_scratch(tmp_path, remains):
    (tmp_path / remains).mkdir()
    with pytest.raises(CheckpointError, match=f"holds {remains} but no complete checkpoint"):
        check_folders(config(tmp_path))


def test_two_runs_cannot_claim_one_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "_LOCK_WAIT_SECONDS", 0)
    owner = f"process {os.getpid()} on"
    with claim(str(tmp_path)):  # the lock belongs to the open file, not to the process
        for _ in range(2):
            with pytest.raises(OutputError, match=f"is being written by another run .{owner}"), claim(str(tmp_path)):
                pass
            (tmp_path / "lock").write_bytes(b"process \xff")
            owner = "process \ufffd"
    with claim(str(tmp_path)):
        pass


# --- contents: tensors and train states are read back, and invalid ones are refused


STATE = TrainState(corpus_sha256="ab" * 32, iteration=7, cursor=Cursor(1, 2, 3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"progress": ...}, "missing required field `progress`"),
        ({"optimizer_steps": -1}, r"Expected `int` >= 0 - at `\$\.optimizer_steps`"),
        ({"progress": asdict(STATE) | {"iteration": -5}}, r"Expected `int` >= 0 - at `\$\.progress\.iteration`"),
        (
            {"progress": asdict(STATE) | {"cursor": {"sequence": 1 << 62}}},
            r"Expected `int` <= \d+ - at `\$\.progress\.cursor\.sequence`",
        ),
    ],
)
def test_invalid_train_state_is_refused(tmp_path: Path, change: dict[str, Any], message: str):
    write_train_state(tmp_path, STATE, optimizer_steps=7)
    assert read_train_state(tmp_path).state == STATE
    edit_json(tmp_path / "train_state.json", **change)
    with pytest.raises(CheckpointError, match=rf"train_state\.json: not written by neobert \(.*{message}"):
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
        ([*BOXES[:2], BOXES[1], BOXES[3]], (3, 4)),
        (BOXES, (2, 6)),
    ],
    ids=["missing", "twice for another", "other shape"],
)
def test_boxes_that_do_not_make_up_the_tensor_are_refused(tmp_path: Path, boxes, whole):
    write_boxes(tmp_path, boxes, whole=whole)
    with pytest.raises(CheckpointError, match=r"the shards of x do not add up to its shape"):
        StoredTensors(tmp_path)


@pytest.mark.parametrize(("offsets", "whole"), [((0, 0), ()), ((0, 0), (3,)), ((0, 0), (3, -4)), ((-1, 0), (3, 4))])
def test_a_shape_or_an_offset_that_is_none_is_refused(tmp_path: Path, offsets, whole):
    write_tensors(tmp_path / "rank_0.safetensors", {"x": WHOLE}, {"x": Box(offsets, (3, 4), whole)})
    with pytest.raises(CheckpointError, match=r"rank_0\.safetensors: cannot be read .*x of shape \(3, 4\) begins at"):
        StoredTensors(tmp_path)
