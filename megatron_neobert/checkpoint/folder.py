"""Files and folders of checkpoints: find, verify, publish and delete them. This module needs no torch.

    SAVE/latest_checkpointed_iteration.txt      the newest iteration
    SAVE/iter_0001000/                          settings.yaml  tokenizer/  train_state.json  rank_*.safetensors
    SAVE/iter_0001000/MANIFEST.json             size and sha256 of every file; written last

A folder is a checkpoint if it has its final name and a manifest. These folders are not checkpoints:

    SAVE/.tmp-iter_0001000/                     being written; after a crash, the next save deletes it
    SAVE/.old-iter_0001000/                     being deleted; after a crash, the next save deletes it
    SAVE/iter_0001000.damaged/                  quarantined: found damaged by a run that resumed from an older one
"""

import fcntl
import json
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

import msgspec

from megatron_neobert.config.schema import CheckpointConfig
from megatron_neobert.errors import CheckpointError, ConfigError, MissingInputError, OutputError
from megatron_neobert.runtime.atomic_files import (
    MANIFEST,
    lock_if_possible,
    read_text,
    replace_file,
    sha256_of,
    sync_to_disk,
)
from megatron_neobert.runtime.new_file import FileRecord
from megatron_neobert.runtime.own_files import (
    RECORD,
    claim_folder,
    delete_folder,
    exchange,
    is_own_folder,
    open_lock,
    require_own_folder,
)
from megatron_neobert.text import parse_json

POINTER = "latest_checkpointed_iteration.txt"
TRAIN_STATE = "train_state.json"
# Processes of a killed run may hold its lock a little longer than the run itself.
_LOCK_WAIT_SECONDS = 10
_REQUIRED_FILES = (TRAIN_STATE, "settings.yaml")


def record_of(path: Path) -> FileRecord:
    """Return the size and sha256 of a file."""
    return FileRecord(path.stat().st_size, sha256_of(path))


def iteration_folder(save: Path, iteration: int) -> Path:
    return save / f"iter_{iteration:07d}"


def list_checkpoints(save: Path) -> list[Path]:
    """Return the checkpoints in `save`, newest first. If `save` itself is a checkpoint, it is included."""
    return [folder for folder in list_folders(save) if (folder / MANIFEST).exists()]


def list_folders(save: Path) -> list[Path]:
    """Return the folders with a checkpoint's name, newest first, with or without a manifest. Includes `save` itself."""
    folders = [path for path in (save.resolve(), *save.glob("iter_*")) if re.fullmatch(r"iter_\d{7,}", path.name)]
    return sorted(folders, key=iteration_of, reverse=True)


def iteration_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("iter_"))


def latest_checkpoint(save: Path, *, iteration: int | None = None) -> Path:
    """Return the checkpoint of `iteration` in `save`, or the newest if `iteration` is None. Files are not verified.

    Raise MissingInputError if the folder does not contain this checkpoint.
    """
    by_iteration = {iteration_of(checkpoint): checkpoint for checkpoint in list_checkpoints(save)}
    if not by_iteration:
        remedy = "name the folder given to --save; a run writes its first checkpoint after --save-interval iterations"
        if (save / "config.json").is_file():
            remedy = (
                "it is a Hugging Face folder; make a checkpoint of it: neobert convert hf-to-megatron --load "
                f"{save} --output DIR"
            )
        raise MissingInputError(f"{save} holds no checkpoint; {remedy}.")
    if iteration is None:
        iteration = max(by_iteration)
    if iteration not in by_iteration:
        raise MissingInputError(
            f"{save} holds no checkpoint of iteration {iteration}. Choose one of {', '.join(map(str, by_iteration))}."
        )
    return by_iteration[iteration]


def check_folders(config: CheckpointConfig) -> None:
    """Check --save, --load and --continue-from before a start, without creating --save.

    Raises:
        CheckpointError: --load contains remains of checkpoints, but no complete checkpoint.
        ConfigError: --save contains a file named STOP.
        MissingInputError: --load contains no checkpoint, and either --continue-from contains no checkpoint, or
            --continue-from is not set and --load differs from --save.
        OutputError: --save contains checkpoints but differs from --load, cannot be created, or contains a link or
            another program's folder with the name of an unfinished checkpoint.
    """
    if config.save is not None:
        if (Path(config.save) / "STOP").exists():
            raise ConfigError(
                f"{config.save}/STOP exists, so no run starts in --save {config.save}; remove that file to start again."
            )
        for unfinished in _unfinished(Path(config.save)):
            require_own_folder(unfinished, MANIFEST)
    load = Path(config.load).resolve() if config.load is not None else None
    save = Path(config.save).resolve() if config.save is not None else None
    if load is None or not list_checkpoints(load):
        remains = [] if load is None else sorted(path.name for path in (*load.glob("iter_*"), *load.glob(POINTER)))
        if remains:
            raise CheckpointError(
                f"--load {config.load} holds {', '.join(remains[:3])} but no complete checkpoint (iter_*/{MANIFEST}), "
                "and a start from scratch would hide the loss. Remove them, or name another folder."
            )
        flag, source = "--continue-from", config.continue_from
        if source is None and not config.loads_save:
            flag, source = "--load", config.load
        if source is not None and not list_checkpoints(Path(source)):
            raise MissingInputError(f"{flag} {source} holds no checkpoint (iter_*/{MANIFEST}); check the path.")
    if save and save != load and list_checkpoints(save):
        raise OutputError(
            f"--save {config.save} already holds checkpoints of a run; add --load {config.save} to resume it, or "
            "name another folder."
        )
    if save and not save.is_dir():
        existing = next(path for path in (save, *save.parents) if os.path.lexists(path))
        try:
            with TemporaryDirectory(dir=existing):  # with a unique name, because all nodes check at the same time
                pass
        except OSError as error:
            raise OutputError(
                f"--save {config.save} cannot be created ({error.strerror}); name another folder."
            ) from error


@contextmanager
def claim(save: str | None) -> Iterator[None]:
    """Create the folder of --save and lock it against other runs until the context ends. Only rank 0 calls this.

    Print a warning if the file system has no locks. Do nothing if `save` is None. Raise OutputError if another run
    still holds the lock after 10 seconds, or if the file `lock` is a link or not our lock.
    """
    if save is None:
        yield
        return
    Path(save).mkdir(parents=True, exist_ok=True)
    with open_lock(Path(save) / "lock") as lock:
        deadline = time.monotonic() + _LOCK_WAIT_SECONDS
        while True:
            try:
                if not lock_if_possible(lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    print(f"warning: {save} is on a file system without locks; start no second run there", flush=True)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    lock.seek(0)
                    raise OutputError(
                        f"--save {save} is being written by another run ({lock.read(100).decode(errors='replace')}). "
                        "Wait until it ends, or name another folder."
                    ) from error
                time.sleep(0.2)
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        lock.flush()
        yield


def verify_files(checkpoint: Path, *, with_tensors: bool = True, share: tuple[int, int] = (0, 1)) -> None:
    """Raise CheckpointError if the manifest is not valid, or if a file is missing or its size or sha256 differs.

    Args:
        with_tensors: Also check the safetensors files, which takes seconds per GB.
        share: (number, shares): check only every `shares`-th file, starting at `number`, so that ranks share the work.
    """
    files = _read_manifest(checkpoint / MANIFEST)
    number, shares = share
    for name in sorted(files, key=lambda name: (-files[name].bytes, name))[number::shares]:  # large files first
        expected = files[name]
        if name.endswith(".safetensors") and not with_tensors:
            continue
        path = checkpoint / name
        if not path.is_file() or path.resolve() != checkpoint.resolve() / name:  # links are refused
            raise CheckpointError(f"{path}: missing, although the manifest lists it; use another checkpoint.")
        size = path.stat().st_size
        if size != expected.bytes:
            raise CheckpointError(f"{path}: {size} bytes, expected {expected.bytes}; use another checkpoint.")
        if sha256_of(path) != expected.sha256:
            raise CheckpointError(f"{path}: its sha256 is not the manifest's; it is damaged, use another checkpoint.")


def _read_manifest(manifest: Path) -> dict[str, FileRecord]:
    """Return a manifest as relative file name -> record. Raise CheckpointError if the manifest is not valid."""
    try:
        files = msgspec.convert(parse_json(read_text(manifest))["files"], dict[str, FileRecord])
    except (FileNotFoundError, msgspec.ValidationError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{manifest}: cannot be read ({error}), so the checkpoint is incomplete; use another checkpoint."
        ) from error
    for name in files:
        # No file of a checkpoint is hidden; .metadata would be a pickle of megatron.core.
        if name.startswith(("/", ".")) or ".." in PurePosixPath(name).parts or not name.isprintable():
            raise CheckpointError(
                f"{manifest}: lists {name!r:.80}, which is not a file of a checkpoint; use another checkpoint."
            )
    if missing := [name for name in _REQUIRED_FILES if name not in files]:
        raise CheckpointError(f"{manifest}: does not list {', '.join(missing)}; use another checkpoint.")
    return files


def quarantine(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint, so that no run uses it and its name is free. Return the new path."""
    return checkpoint.rename(_free_name(checkpoint.with_name(f"{checkpoint.name}.damaged")))


def _free_name(path: Path) -> Path:
    """Return the first of `path`, `path`.2, `path`.3 and so on that does not exist."""
    names = (path.name, *(f"{path.name}.{number}" for number in range(2, 1000)))
    return next(free for free in map(path.with_name, names) if not free.exists())


def leftovers(save: Path) -> list[Path]:
    """Return this project's unfinished checkpoint folders from crashed runs. The next save deletes these folders."""
    return [folder for folder in _unfinished(save) if is_own_folder(folder, MANIFEST)]


def _unfinished(save: Path) -> list[Path]:
    return [*save.glob(".tmp-iter_*"), *save.glob(".old-iter_*")]


def prepare_folder(final: Path) -> Path:
    """Create and return a temporary folder for the checkpoint `final`. Delete the leftovers of crashed saves."""
    save = final.parent
    save.mkdir(parents=True, exist_ok=True)
    for leftover in leftovers(save):
        with suppress(OSError):
            delete_folder(leftover, MANIFEST)
    for leftover in save.glob(f"{POINTER}.*-[0-9]*"):  # temporary files of replace_file
        leftover.unlink(missing_ok=True)
    # A process of another node may still hold a file of a leftover, which then cannot be deleted.
    temporary = _free_name(final.with_name(f".tmp-{final.name}"))
    temporary.mkdir()
    claim_folder(temporary)
    return temporary


def write_manifest(folder: Path, written: Mapping[str, FileRecord]) -> None:
    """Flush the files and folders of a checkpoint to disk, then write the manifest.

    Args:
        written: Files that have already been flushed, by name.

    Raises:
        OSError: A file in `written` is missing or its size differs, or a file cannot be read or written.
    """
    for name, expected in written.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != expected.bytes:
            raise OSError(
                f"{path} was written by another rank but is not seen here; --save must be on a file system that all "
                "nodes share"
            )
    files = dict(written)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        if name not in (*files, RECORD):
            sync_to_disk(path)
            files[name] = record_of(path)
    for path in sorted(path for path in folder.rglob("*") if path.is_dir()):
        sync_to_disk(path)
    content = msgspec.to_builtins({"format": 1, "files": dict(sorted(files.items()))})
    replace_file(folder / MANIFEST, json.dumps(content, indent=1))


def publish(temporary: Path, final: Path) -> None:
    """Rename the complete folder `temporary`, which contains a manifest, to `final`, and update the pointer file.

    The name of `final` must be iter_NNNNNNN, which identifies a checkpoint. An existing checkpoint `final` is replaced.
    Raise OutputError if `final` exists and is not a checkpoint of this project.
    """
    (temporary / RECORD).unlink(missing_ok=True)
    if is_replaced := os.path.lexists(final):
        require_own_folder(final, MANIFEST)
        exchange(temporary, final)
    else:
        temporary.rename(final)
    sync_to_disk(final.parent)
    replace_file(final.parent / POINTER, str(iteration_of(final)))
    if is_replaced:
        with suppress(OSError):  # the next save deletes the rest
            delete_folder(temporary, MANIFEST)


def prune(save: Path, *, keep_last: int, keep_every: int | None) -> None:
    """Delete checkpoints, but keep the newest `keep_last` and all at multiples of `keep_every` iterations."""
    for checkpoint in list_checkpoints(save)[keep_last:]:
        if (keep_every is None or iteration_of(checkpoint) % keep_every) and is_own_folder(checkpoint, MANIFEST):
            # With this name it is no checkpoint while it is being deleted.
            old = checkpoint.with_name(f".old-{checkpoint.name}")
            delete_folder(old, MANIFEST)
            delete_folder(checkpoint.rename(old), MANIFEST)
