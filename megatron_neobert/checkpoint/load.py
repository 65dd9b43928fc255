"""Load a checkpoint into a run.

shards.py describes the boxes that each rank holds, and contents.py finds them in the files. Each rank reads its own
boxes into its memory, so that any number of ranks in any layout can load a checkpoint.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_neobert.checkpoint.contents import OPTIMIZER_STATE, StoredTensors
from megatron_neobert.checkpoint.folder import list_checkpoints, list_folders, quarantine, verify_files
from megatron_neobert.checkpoint.shards import local_parts
from megatron_neobert.checkpoint.start import read_fitting_run
from megatron_neobert.config.phases import phase_at
from megatron_neobert.config.resume_rules import changes, continue_warnings
from megatron_neobert.config.schema import Settings
from megatron_neobert.data.batches.windows import Cursor
from megatron_neobert.errors import CheckpointError
from megatron_neobert.runtime.distributed import broadcast, first_of_ranks
from megatron_neobert.runtime.environment import is_rank_zero
from megatron_neobert.state import Run


class Found(NamedTuple):
    """A checkpoint whose files have been verified."""

    folder: Path
    has_new_data: bool  # it is of --continue-from, so its data may differ from this run's


def find_checkpoint(settings: Settings) -> Found | None:
    """Return the newest undamaged checkpoint of --load, else of --continue-from. All ranks get the same result.

    Return None if neither folder contains a checkpoint; `check_folders` has allowed a fresh start. Damaged checkpoints
    in --save that are newer are renamed. Raise CheckpointError if a folder has checkpoints, and all are damaged.

    Collective: all ranks.
    """
    config = settings.checkpoint
    for load in (config.load, config.continue_from):
        is_save = load == config.load and config.loads_save
        if load is not None and (folder := _find_in(Path(load), is_save=is_save)) is not None:
            return Found(folder, has_new_data=load != config.load)
    return None


def load_from(run: Run, folder: Path, *, has_new_data: bool = False) -> None:
    """Restore weights, optimizer and train state from a checkpoint whose files have been verified.

    If the checkpoint contains no optimizer state, the optimizer starts with new state. Rank 0 prints the settings that
    have changed since the checkpoint. Raise CheckpointError if the checkpoint does not fit this run or is damaged.

    If `has_new_data` and the data differ from the checkpoint's, this run starts at the beginning of its own data.

    Collective: all ranks.
    """
    saved, recorded = read_fitting_run(folder, run.settings, run.opened, has_new_data=has_new_data)
    train_state = recorded.state
    stored = broadcast(_on_all_ranks(lambda: StoredTensors(folder) if is_rank_zero() else None))
    _on_all_ranks(lambda: _read_tensors(run, stored, with_moments=not saved.weights_only))
    if run.settings.use_distributed_optimizer:
        run.model.start_param_sync(force_sync=True)  # gathers the weights, of which each rank has read its part
    if not saved.weights_only:
        for group in run.optimizer.param_groups:
            if "betas" in group:  # Muon does not count steps
                group["step"] = recorded.optimizer_steps
    compared, phase = (saved.settings, run.settings), phase_at(run.settings, train_state.iteration)
    if has_new_data:  # the phases of the other run do not matter, only its settings at this iteration
        compared = phase_at(saved.settings, train_state.iteration).settings, phase.settings
        begins = run.training_stream.phases[phase.number]
        cursor = begins.start_after(compared[0], train_state.corpus_sha256, train_state.cursor)
        train_state = replace(train_state, cursor=cursor)
    corpus_sha256, first_corpus_sha256 = run.opened[phase.number].sha256, run.opened[0].sha256
    run.state = replace(train_state, corpus_sha256=corpus_sha256, first_corpus_sha256=first_corpus_sha256)
    run.scheduler.step(increment=run.state.iteration)  # the learning rate depends on the iteration only
    if is_rank_zero():
        if has_new_data:
            start, cursor = "start from the beginning", train_state.cursor
            if cursor != Cursor():
                position = f"epoch {cursor.epoch}, window {cursor.window}, after {cursor.sequence} packed sequences"
                start = f"continue in {position}"
            rate = run.optimizer.param_groups[0]["lr"]
            print(f"continues {folder}: the learning rate is {rate:.2e} from here, the data {start}", flush=True)
        for warning in continue_warnings(saved, run.settings, run.opened[0].corpora):
            print(f"warning: {warning}", flush=True)
        for change in changes(*compared, weights_only=saved.weights_only):
            print(f"changed since {folder}: {change}", flush=True)


def _read_tensors(run: Run, stored: StoredTensors, *, with_moments: bool) -> None:
    """Read this rank's parts of the weights and, if `with_moments`, of the moments; see `local_parts`."""
    for part in local_parts(run):
        for name, box, data, is_padded in part.boxes_of(part.main, ""):
            stored.read(stored.main_name(name), data, offsets=box.offsets, is_padded=is_padded)
        for moment, values in part.moments.items() if with_moments else ():
            for name, box, data, is_padded in part.boxes_of(values, f"{OPTIMIZER_STATE}{moment}."):
                stored.read(name, data, offsets=box.offsets, is_padded=is_padded)
        if part.has_main:
            part.weight.copy_(part.main)


def _find_in(load: Path, *, is_save: bool) -> Path | None:
    """Return a folder's newest undamaged checkpoint, equal on all ranks, or None if the folder contains no checkpoint.

    Each rank verifies a share of the files. Rank 0 prints a warning for each skipped checkpoint. If `is_save`, damaged
    checkpoints are renamed, so that --keep-last does not count them. Raise CheckpointError if all checkpoints are
    damaged or cannot be read.

    Collective: all ranks.
    """
    # Rank 0 lists the folders, because a network file system may show them to other ranks later.
    folders = broadcast(_on_all_ranks(lambda: list_folders(load) if is_rank_zero() and list_checkpoints(load) else []))
    share = torch.distributed.get_rank(), torch.distributed.get_world_size()
    problems: list[tuple[Path, CheckpointError | OSError]] = []

    def skip() -> None:
        for folder, problem in problems if is_rank_zero() else ():
            # After an OSError the checkpoint may be readable again later.
            is_damaged = isinstance(problem, CheckpointError)
            renamed = f" It is now {quarantine(folder).name}." if is_save and is_damaged else ""
            kind = "a damaged" if is_damaged else "an unreadable"
            print(f"warning: skipped {kind} checkpoint: {problem}{renamed}", flush=True)

    for folder in folders:
        try:
            _on_all_ranks(partial(verify_files, folder, share=share))
        except (CheckpointError, OSError) as error:
            problems.append((folder, error))
        else:
            _on_all_ranks(skip)
            return folder
    if problems:
        reasons = " ".join(str(problem) for _, problem in problems)
        raise CheckpointError(f"{folders[0].parent} has no usable checkpoint. {reasons}")
    return None


def _on_all_ranks(function: Callable[[], Any]) -> Any:
    """Call `function` on each rank, and return this rank's result. Collective: all ranks.

    If it raises CheckpointError or OSError on some rank, all ranks raise the lowest rank's error.
    """
    result, error = None, None
    try:
        result = function()
    except (CheckpointError, OSError) as own_error:
        error = own_error
    if first_error := first_of_ranks(error):
        raise first_error
    return result
