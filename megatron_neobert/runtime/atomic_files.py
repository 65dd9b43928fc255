"""Checksums, and files and folders that appear complete or not at all, even if the process or machine crashes.

Also remedies for messages about a folder that is missing or of the wrong kind.
"""

import errno
import fcntl
import glob
import hashlib
import os
import shutil
import signal
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from megatron_neobert.errors import MissingInputError, OutputError, SaveError, short_reason, suggest_path
from megatron_neobert.runtime.own_files import create_temporary

MANIFEST = "MANIFEST.json"  # of a checkpoint
_CHUNK_BYTES = 1 << 20  # bytes per read
# Errors of flock on a file system without locks.
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}


def require_folder(flag: str, folder: Path, *, remedy: str) -> None:
    """Raise MissingInputError if `folder` is not a folder. The message begins with `flag` and ends with `remedy`."""
    if not folder.is_dir():
        raise MissingInputError(f"{flag} {folder}: no such folder{suggest_path(folder, otherwise=';')} {remedy}.")


def why_no_model(folder: Path) -> str:
    """Return a message that says why `folder` is not a Hugging Face folder, and what to convert or name instead."""
    if any(folder.glob(f"iter_*/{MANIFEST}")):
        return (
            f"it is the --save folder of a run; convert its newest checkpoint: neobert convert megatron-to-hf --load "
            f"{folder} --output DIR"
        )
    if (folder / MANIFEST).is_file():
        return f"it is a checkpoint; convert it: neobert convert megatron-to-hf --load {folder} --output DIR"
    if folder.is_dir():
        return "a folder without config.json; name a Hugging Face folder"
    return f"no such folder{suggest_path(folder, otherwise=';')} name a Hugging Face folder"


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file for reading, in binary mode. Raise ValueError at once for a pipe, device or folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path.name} is not a regular file")
    return os.fdopen(descriptor, "rb")


def read_text(path: Path) -> str:
    """Return the content of a UTF-8 text file. Raise ValueError if the file is not regular or not UTF-8, or OSError."""
    with open_regular(path) as stream:
        return stream.read().decode("utf-8")


def sha256_of(path: Path) -> str:
    """Return a file's hexadecimal SHA-256. Raise OSError if reading fails, ValueError if the file is not regular."""
    digest = hashlib.sha256()
    with open_regular(path) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def replace_file(path: Path, content: str, *, sync: bool = True) -> None:
    """Write a UTF-8 text file atomically; see `replacing`."""
    with replacing(path, sync=sync) as temporary:
        temporary.write_text(content, encoding="utf-8")


@contextmanager
def replacing(path: Path, *, sync: bool = True, folder: Path | None = None) -> Iterator[Path]:
    """Yield a temporary path. The block must write a file there, which is renamed to `path` when the block ends.

    Readers see the complete old or the complete new content. If several processes write the same path, the last one
    wins. If the block raises, or renaming raises OSError, the temporary file is removed.

    Args:
        sync: Wait until the file is on disk. If False, a crash of the machine may leave a damaged file.
        folder: Folder of the temporary file, on the same file system; None for the folder of `path`.
    """
    temporary = temporary_path(path if folder is None else folder / path.name)
    create_temporary(temporary).close()
    try:
        yield temporary
        if sync:
            sync_to_disk(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    if sync:
        sync_to_disk(path.parent)


def temporary_path(path: Path) -> Path:
    """Return a temporary path in the same folder, which no other process on any machine uses."""
    return path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}")


def sync_to_disk(path: Path) -> None:
    """Wait until a file's content, or a folder's list of files, is on disk. Raise OSError if this fails."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_if_possible(file: IO[bytes] | int, operation: int) -> bool:
    """Call `fcntl.flock` and return True, or return False if the file system has no locks.

    Raises:
        BlockingIOError: `operation` has LOCK_NB, and another process has the lock. Without LOCK_NB, the call waits.
        OSError: Locking fails.
    """
    try:
        fcntl.flock(file, operation)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def existing_parent(folder: Path) -> Path:
    """Return `folder` if it exists, or else its nearest existing parent, which is on the same file system."""
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def refuse_existing(output: Path) -> None:
    """Raise OutputError if `output` is a file, a symbolic link, or a folder that is not empty."""
    if output.is_symlink():
        raise OutputError(f"--output {output} is a link, and a folder cannot replace a link; name a new folder.")
    if output.is_file() or (output.is_dir() and any(output.iterdir())):
        raise OutputError(f"--output {output} exists already and is not empty; name a new folder or remove this one.")


@contextmanager
def build_folder(output: Path) -> Iterator[Path]:
    """Yield a temporary folder. Rename it to `output` if the block ends without an error, and remove it otherwise.

    In the main thread, SIGTERM raises KeyboardInterrupt in the block, like Ctrl-C. Temporary folders of other processes
    are printed and not removed, because a process on another machine may still write there.

    Raises:
        OutputError: `output` is a file, a link or a folder with files, perhaps created during the block, or the
            temporary folder cannot be created.
        SaveError: The block or the renaming raised OSError or SafetensorError, for example because the disk is full.
        OSError: The block raised OSError for a file outside of the temporary folder. This error is not converted.
    """
    # Slow to import, and most importers of this module do not need it.
    from safetensors import SafetensorError

    refuse_existing(output)
    for leftover in output.parent.glob(f"{glob.escape(output.name)}.unfinished.*"):
        print(f"note: {leftover} may be left over from a killed process; remove it if no process writes there")
    temporary = temporary_path(output.with_name(f"{output.name}.unfinished"))
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise OutputError(
            f"--output {output}: {temporary} cannot be created ({error.strerror}); name a folder that can be written."
        ) from error
    # Python allows signal handlers in the main thread only.
    is_main = threading.current_thread() is threading.main_thread()
    previous_handler = signal.signal(signal.SIGTERM, signal.default_int_handler) if is_main else None
    try:
        yield temporary
        for path in (*temporary.rglob("*"), temporary):
            sync_to_disk(path)
        temporary.rename(output)
    except (OSError, SafetensorError) as error:
        if not str(getattr(error, "filename", None) or temporary).startswith(str(temporary)):
            raise  # such as a missing input
        if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise OutputError(
                f"--output {output} was created by another program at the same time; name a new folder."
            ) from error
        raise SaveError(
            f"--output {output} cannot be written ({error}), and no file of it is left. Free some space, or name a "
            "folder on another disk."
        ) from error
    finally:
        # After a successful rename the folder no longer exists.
        shutil.rmtree(temporary, ignore_errors=True)
        if is_main:
            signal.signal(signal.SIGTERM, previous_handler)
    sync_to_disk(output.parent)


@contextmanager
def saving_weights(folder: Path) -> Iterator[None]:
    """Run a `with` block in which safetensors or torch.save writes into `folder`.

    Raise SaveError if safetensors or torch.save cannot write, for example because the disk is full.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, RuntimeError) as error:
        if not isinstance(error, SafetensorError) and "inline_container.cc" not in str(error):  # of torch.save
            raise
        raise SaveError(
            f"{folder} cannot be written ({short_reason(error)}). Free some space, and start the same command again."
        ) from error
