"""A folder of checkpoints as files: which of them count, and whether they are whole. Needs no torch.

    SAVE/latest_checkpointed_iteration.txt      the newest iteration
    SAVE/iter_0001000/                          settings.yaml  tokenizer/  train_state.json  rank_*.safetensors
    SAVE/iter_0001000/MANIFEST.json             size and sha256 of every file; written last

A checkpoint counts when its folder has its final name and a manifest. Others do not:

    SAVE/.tmp-iter_0001000/                     being written; after a crash, deleted by the next save
    SAVE/.old-iter_0001000/                     being deleted; after a crash, by the next save
    SAVE/iter_0001000.damaged/                  quarantined: found damaged when a run resumed from an older one
"""

import fcntl
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

import msgspec

from megatron_neobert.config.schema import CheckpointConfig
from megatron_neobert.errors import CheckpointError, ConfigError, MissingInputError, OutputError
from megatron_neobert.runtime.atomic_files import (
    lock_if_possible,
    read_text,
    replace_file,
    sha256_of,
    sync_to_disk,
)
from megatron_neobert.runtime.new_file import FileRecord
from megatron_neobert.text import parse_json

POINTER = "latest_checkpointed_iteration.txt"
MANIFEST = "MANIFEST.json"
TRAIN_STATE = "train_state.json"
_LOCK = "lock"
_LEAVE_SECONDS = 10  # a run that was killed may have children that hold its lock a little longer
# Without these there is nothing to load.
_NEEDED = (TRAIN_STATE, "settings.yaml")


def record_of(path: Path) -> FileRecord:
    """Return size and sha256 of a file."""
    return FileRecord(path.stat().st_size, sha256_of(path))


def iteration_folder(save: Path, iteration: int) -> Path:
    return save / f"iter_{iteration:07d}"


def list_checkpoints(save: Path) -> list[Path]:
    """Return the folders of the checkpoints in `save`, newest first; or `save` if it is itself a checkpoint."""
    return [folder for folder in _list_folders(save) if (folder / MANIFEST).exists()]


def _list_folders(save: Path) -> list[Path]:
    folders = [path for path in (save.absolute(), *save.glob("iter_*")) if re.fullmatch(r"iter_\d{7,}", path.name)]
    return sorted(folders, key=iteration_of, reverse=True)


def iteration_of(checkpoint: Path) -> int:
    """Return the iteration in the name of a checkpoint folder."""
    return int(checkpoint.name.removeprefix("iter_"))


def latest_checkpoint(save: Path, *, iteration: int | None = None) -> Path:
    """Return the newest checkpoint of a save folder, or that of one iteration; its files are not verified."""
    by_iteration = {iteration_of(checkpoint): checkpoint for checkpoint in list_checkpoints(save)}
    if not by_iteration:
        raise MissingInputError(f"{save} holds no checkpoint; name the folder given to --save.")
    wanted = max(by_iteration) if iteration is None else iteration
    if wanted not in by_iteration:
        found = ", ".join(map(str, by_iteration))
        raise MissingInputError(f"{save} holds no checkpoint of iteration {wanted}; it holds those of {found}.")
    return by_iteration[wanted]


def check_folders(config: CheckpointConfig) -> None:
    """Refuse folders that a run must not start with. A refused start leaves no folder: only `claim` creates --save."""
    if config.save is not None and (Path(config.save) / "STOP").exists():
        raise ConfigError(
            f"{config.save}/STOP exists, so no run starts in --save {config.save}; remove that file to start again."
        )
    load = Path(config.load).resolve() if config.load is not None else None
    save = Path(config.save).resolve() if config.save is not None else None
    if load is None or not list_checkpoints(load):
        _refuse_fresh_start(config, load, is_save=load == save)
    if save and save != load and list_checkpoints(save):
        raise OutputError(
            f"--save {config.save} already holds checkpoints of a run; give --load {config.save} to continue it, or "
            "name another folder."
        )
    if save and not save.is_dir():
        existing = next(path for path in (save, *save.parents) if os.path.lexists(path))
        try:
            with TemporaryDirectory(dir=existing):  # of its own name: other nodes try at the same time
                pass
        except OSError as error:
            raise OutputError(
                f"--save {config.save} cannot be created ({error.strerror}); name another folder."
            ) from error


def _refuse_fresh_start(config: CheckpointConfig, load: Path | None, *, is_save: bool) -> None:
    """Refuse a start from scratch where there was something, and an input that is missing."""
    if load is not None:
        remains = sorted(path.name for path in (*load.glob("iter_*"), *load.glob(POINTER)))
        if remains:
            raise CheckpointError(
                f"--load {config.load} holds {', '.join(remains[:3])} but no whole checkpoint (iter_*/{MANIFEST}); a "
                "fresh start would hide that. Remove them, or name another folder."
            )
    if config.continue_from is not None:
        if not list_checkpoints(Path(config.continue_from)):
            raise MissingInputError(
                f"--continue-from {config.continue_from} holds no checkpoint (iter_*/{MANIFEST}); check the path."
            )
    elif load is not None and not is_save:
        raise MissingInputError(f"--load {config.load} holds no checkpoint (iter_*/{MANIFEST}); check the path.")


@contextmanager
def claim(save: str | None) -> Iterator[None]:
    """Create a save folder and lock it against other runs while the context is entered. Only rank 0 enters it."""
    if save is None:
        yield
        return
    Path(save).mkdir(parents=True, exist_ok=True)
    with (Path(save) / _LOCK).open("a+b") as lock:
        until = time.monotonic() + _LEAVE_SECONDS
        while True:
            try:
                if not lock_if_possible(lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    print(f"warning: {save} is on a file system without locks; start no second run there", flush=True)
                break
            except BlockingIOError as error:
                if time.monotonic() > until:
                    lock.seek(0)
                    raise OutputError(
                        f"--save {save} is being written by another run ({lock.read().decode()}); wait for its end, or "
                        "name another folder."
                    ) from error
                time.sleep(0.2)
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        lock.flush()
        yield


def verify_files(checkpoint: Path, *, with_tensors: bool = True) -> None:
    """Raise CheckpointError if a file is missing or differs from the manifest in size or sha256.

    Args:
        with_tensors: Check the safetensors files too, whose checksums take seconds per GB.
    """
    for name, expected in _read_manifest(checkpoint / MANIFEST).items():
        if name.endswith(".safetensors") and not with_tensors:
            continue
        path = checkpoint / name
        if not path.is_file() or path.resolve() != checkpoint.resolve() / name:  # no links
            raise CheckpointError(f"{path}: missing, although the manifest lists it; use another checkpoint.")
        size = path.stat().st_size
        if size != expected.bytes:
            raise CheckpointError(f"{path}: {size} bytes, expected {expected.bytes}; use another checkpoint.")
        if sha256_of(path) != expected.sha256:
            raise CheckpointError(f"{path}: its sha256 is not the manifest's; it is damaged, use another checkpoint.")


def _read_manifest(manifest: Path) -> dict[str, FileRecord]:
    try:
        files = msgspec.convert(parse_json(read_text(manifest))["files"], dict[str, FileRecord])
    except (FileNotFoundError, msgspec.ValidationError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{manifest}: not readable ({error}); the checkpoint is incomplete.") from error
    for name in files:
        if name.startswith("/") or ".." in PurePosixPath(name).parts or not name.isprintable():
            raise CheckpointError(
                f"{manifest}: lists {name!r:.80}, which is no file below its folder; use another checkpoint."
            )
    if ".metadata" in files:
        raise CheckpointError(
            f"{manifest.parent} is in megatron.core's format, which holds pickles and is no longer read; export it "
            "with the version that wrote it, and import that here (neobert convert hf-to-megatron)."
        )
    missing = [name for name in _NEEDED if name not in files]
    if missing:
        raise CheckpointError(f"{manifest}: does not list {', '.join(missing)}; the checkpoint is incomplete.")
    return files


def find_good_checkpoint(load: Path) -> tuple[Path, list[tuple[Path, CheckpointError | OSError]]]:
    """Return the newest checkpoint whose files are whole, and what is wrong with newer ones."""
    problems: list[tuple[Path, CheckpointError | OSError]] = []
    for candidate in _list_folders(load):
        try:
            verify_files(candidate)
        except (CheckpointError, OSError) as error:
            problems.append((candidate, error))
        else:
            return candidate, problems
    raise CheckpointError(f"{load}: no usable checkpoint. {' '.join(str(problem) for _, problem in problems)}")


def quarantine(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint, so that it neither counts nor is in the way of its successor."""
    names = (f"{checkpoint.name}.damaged{number}" for number in ("", *map(str, range(2, 1000))))
    aside = next(path for path in map(checkpoint.with_name, names) if not path.exists())
    return checkpoint.rename(aside)


def leftovers(save: Path) -> list[Path]:
    """Return the folders that crashes have left and that the next save deletes."""
    return [*save.glob(".tmp-iter_*"), *save.glob(".old-iter_*")]


def prepare_folder(temporary: Path) -> None:
    """Create the folder that a checkpoint is written to; remove what crashes have left beside it."""
    save = temporary.parent
    save.mkdir(parents=True, exist_ok=True)
    for leftover in leftovers(save):
        shutil.rmtree(leftover, ignore_errors=True)
    for leftover in save.glob(f"{POINTER}.*"):  # of replace_file
        leftover.unlink(missing_ok=True)
    temporary.mkdir()


def write_manifest(folder: Path, written: Mapping[str, FileRecord]) -> None:
    """Seal a checkpoint folder: every file and folder on disk, then the manifest.

    Args:
        written: Files that are on disk already, by name.
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
        if name not in files:
            sync_to_disk(path)
            files[name] = record_of(path)
    for path in sorted(path for path in folder.rglob("*") if path.is_dir()):
        sync_to_disk(path)
    content = msgspec.to_builtins({"format": 1, "files": dict(sorted(files.items()))})
    replace_file(folder / MANIFEST, json.dumps(content, indent=1))


def publish(temporary: Path, final: Path) -> None:
    """Make a sealed folder a checkpoint by one rename, and the newest one by one replacement.

    A folder of the same iteration, which was not readable when the run resumed, is moved away first and deleted last.
    """
    older = _out_of_the_way(final) if final.exists() else None
    temporary.rename(final)
    sync_to_disk(final.parent)
    replace_file(final.parent / POINTER, str(iteration_of(final)))
    if older is not None:
        shutil.rmtree(older, ignore_errors=True)  # the next save deletes the rest


def prune(save: Path, *, keep_last: int, keep_every: int | None) -> None:
    """Delete all but the newest checkpoints, and those of every so many iterations."""
    for checkpoint in list_checkpoints(save)[keep_last:]:
        if keep_every is None or iteration_of(checkpoint) % keep_every:
            shutil.rmtree(_out_of_the_way(checkpoint))


def _out_of_the_way(checkpoint: Path) -> Path:
    """Rename a folder so that it is no checkpoint while it is being deleted, and return the new path."""
    going = checkpoint.with_name(f".old-{checkpoint.name}")
    shutil.rmtree(going, ignore_errors=True)
    return checkpoint.rename(going)
