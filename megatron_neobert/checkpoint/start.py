"""Checks before ranks start: the newest checkpoint fits the settings, and there is disk space, without torch."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from megatron_neobert.checkpoint.folder import iteration_of, leftovers, list_checkpoints, verify_files
from megatron_neobert.checkpoint.train_state import SavedState, read_train_state
from megatron_neobert.config.cli import read_record
from megatron_neobert.config.resume_rules import SavedRun, refuse_unfit_checkpoint
from megatron_neobert.config.schema import CheckpointConfig, Settings
from megatron_neobert.data.batches.corpora import OpenedCorpora
from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer
from megatron_neobert.errors import CheckpointError, SaveError
from megatron_neobert.model.flops import checkpoint_bytes
from megatron_neobert.runtime.atomic_files import existing_parent
from megatron_neobert.text import in_bytes


def refuse_unfit_start(settings: Settings, opened: Sequence[OpenedCorpora]) -> None:
    """Check that a run can start from the newest checkpoint of --load, or else of --continue-from.

    Raise the errors of `read_fitting_run`. Tensors are not read. A damaged checkpoint is not checked, because loading
    may skip it and use an older checkpoint.
    """
    folder = newest_checkpoint(settings.checkpoint)
    if folder is None:
        return
    try:
        verify_files(folder, with_tensors=False)
    except (CheckpointError, OSError):
        return
    load = settings.checkpoint.load
    read_fitting_run(folder, settings, opened, has_new_data=load is None or not list_checkpoints(Path(load)))


def read_fitting_run(
    folder: Path, settings: Settings, opened: Sequence[OpenedCorpora], *, has_new_data: bool
) -> tuple[SavedRun, SavedState]:
    """Return a checkpoint's records of its run. Check that a run with these settings, data and tokenizer can continue.

    Args:
        has_new_data: The checkpoint comes from --continue-from, so its data may differ.

    Raises:
        CheckpointError: A record is damaged or from another version, or the tokenizers differ.
            `refuse_unfit_checkpoint` raises further errors.
    """
    recorded = read_train_state(folder)
    state = recorded.state
    saved = SavedRun(
        folder=folder,
        settings=read_record(folder / "settings.yaml"),
        iteration=state.iteration,
        corpus_sha256=state.corpus_sha256,
        first_corpus_sha256=state.first_corpus_sha256,
        read_corpora=state.read_corpora,
        weights_only=recorded.optimizer_steps is None,
    )
    hashes, corpora = [each.sha256 for each in opened], [each.corpora for each in opened]
    refuse_unfit_checkpoint(saved, settings, hashes, corpora, has_new_data=has_new_data)
    trained, current = load_tokenizer(folder / "tokenizer"), opened[0].tokenizer
    if trained.fingerprint != current.fingerprint:
        raise CheckpointError(
            f"{folder} was trained with tokenizer {trained.fingerprint[:12]} ({trained.vocab_size:,} ids), but "
            f"--tokenizer-model is {current.fingerprint[:12]} ({current.vocab_size:,} ids). Use {folder / 'tokenizer'} "
            "and a corpus written with it."
        )
    return saved, recorded


def refuse_full_disk(settings: Settings, *, vocab_size: int) -> None:
    """Raise SaveError if the file system of --save has too little free space for one checkpoint of this run.

    Leftovers of crashed saves count as free space. Do nothing without --save, or if no iteration is left.
    """
    checkpoint = settings.checkpoint
    if checkpoint.save is None or first_iteration(checkpoint) >= settings.training.train_iters:
        return
    save, size = Path(checkpoint.save).resolve(), checkpoint_bytes(settings, vocab_size=vocab_size)
    free = shutil.disk_usage(existing_parent(save)).free
    if free < size:  # the first save deletes leftovers of crashes
        free += sum(path.stat().st_size for folder in leftovers(save) for path in folder.rglob("*") if path.is_file())
    if free < size:
        raise SaveError(
            f"a checkpoint of this run takes {in_bytes(size)}, but --save {checkpoint.save} has {in_bytes(free)} free; "
            "at least one must fit. Make room there, or give --save a folder on another file system."
        )


def newest_checkpoint(config: CheckpointConfig) -> Path | None:
    """Return the newest checkpoint of --load, or else of --continue-from, or None. Files are not verified."""
    folders = [Path(folder) for folder in (config.load, config.continue_from) if folder is not None]
    return next((checkpoint for folder in folders for checkpoint in list_checkpoints(folder)), None)


def first_iteration(config: CheckpointConfig) -> int:
    """Return the iteration of the newest checkpoint, from which this run continues, or 0 if there is no checkpoint."""
    folder = newest_checkpoint(config)
    return 0 if folder is None else iteration_of(folder)
