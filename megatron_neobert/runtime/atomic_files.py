"""Files and folders that are whole or absent: checksums, and writing that survives a crash at any instant."""

import errno
import fcntl
import hashlib
import os
import shutil
import signal
import socket
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from megatron_neobert.errors import ConfigError, MissingInputError, OutputError, SaveError

_CHUNK_BYTES = 1 << 20  # read at a time, for a checksum
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}  # of a file system that has none


def require_folder(flag: str, folder: Path, *, holding: str = "", remedy: str = "check the path") -> None:
    """Raise MissingInputError if a folder, or the file in it, is missing, before torch is imported."""
    if not (folder / holding).exists():
        without = f", or one without {holding}" if holding else ""
        raise MissingInputError(f"{flag} {folder}: no such folder{without}; {remedy}.")


def name_models(folders: Sequence[Path]) -> dict[str, Path]:
    """Return the folders of models by their names in the results of an evaluation, or refuse them."""
    models: dict[str, Path] = {}
    for folder in folders:
        require_folder("--model", folder, holding="config.json")
        if (name := folder.resolve().name) in models:
            raise ConfigError(f"--model: two folders are called {name}, as results are; rename one of them.")
        models[name] = folder
    return models


def open_regular(path: Path) -> IO[bytes]:
    """Open a file for reading; raise ValueError for a pipe, a socket, a device or a folder, without waiting for it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path.name} is no regular file")
    return os.fdopen(descriptor, "rb")


def read_text(path: Path) -> str:
    """Return the content of a regular file as UTF-8 text; see `open_regular`."""
    with open_regular(path) as stream:
        return stream.read().decode("utf-8")


def sha256_of(path: Path) -> str:
    """Hexadecimal sha256 of a regular file's content, read in chunks."""
    digest = hashlib.sha256()
    with open_regular(path) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def replace_file(path: Path, content: str, *, sync: bool = True) -> None:
    """Write a small text file; see `replacing`."""
    with replacing(path, sync=sync) as temporary:
        temporary.write_text(content, encoding="utf-8")


@contextmanager
def replacing(path: Path, *, sync: bool = True) -> Iterator[Path]:
    """Yield a file to write that takes its name when the block ends well: readers see the old or the new content whole.

    Of processes that write the same file together, one wins. Without `sync`, a crash of the machine may leave anything.
    """
    temporary = own_name(path)
    try:
        yield temporary
        if sync:
            sync_to_disk(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    if sync:
        sync_to_disk(path.parent)


def own_name(path: Path) -> Path:
    """Return a name beside a file that no other process on any machine takes, for what will be renamed to it."""
    return path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}")


def sync_to_disk(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_if_possible(file: IO[bytes] | int, operation: int) -> bool:
    """Call `fcntl.flock`; return False where the file system has no locks."""
    try:
        fcntl.flock(file, operation)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def existing_parent(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists: the same file system."""
    return next(place for place in (folder, *folder.parents) if place.is_dir())


def make_folder(folder: Path) -> list[Path]:
    """Create a folder and return what was not there before, the innermost first, so that it can be removed again."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def refuse_existing(output: Path) -> None:
    """Raise OutputError if a target is a file, a link, or a folder that is not empty."""
    if output.is_symlink():
        raise OutputError(f"--output {output} is a link, which a folder cannot take the place of; name a new folder.")
    if output.is_file() or (output.is_dir() and any(output.iterdir())):
        raise OutputError(f"--output {output} exists already and is not empty; name a new folder or remove this one.")


@contextmanager
def build_folder(output: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `output` when the block ends well, and is removed when it does not.

    SIGTERM ends the block as Ctrl-C does. What a killed process left at this output is named; a running one may be
    writing it on another machine.

    Raises:
        OutputError: The target exists, or the folder cannot be created.
        SaveError: A file cannot be written, as on a full disk.
    """
    from safetensors import SafetensorError  # most that import this module do without it

    refuse_existing(output)
    for leftover in output.parent.glob(f"{output.name}.unfinished.*"):
        print(f"note: {leftover} may be left of a process that was killed; remove it if none is running")
    temporary = own_name(output.with_name(f"{output.name}.unfinished"))
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise OutputError(f"--output {output}: {temporary} cannot be created ({error.strerror}).") from error
    is_main = threading.current_thread() is threading.main_thread()  # no other may set a handler
    usual = signal.signal(signal.SIGTERM, signal.default_int_handler) if is_main else None
    try:
        yield temporary
        for path in (*temporary.rglob("*"), temporary):
            sync_to_disk(path)
        temporary.rename(output)
    except (OSError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise OutputError(f"--output {output} was created by another program meanwhile; name a new one.") from error
        raise SaveError(
            f"--output {output} cannot be written ({error}); nothing is left of it. Free some space, or name a folder "
            "on another disk."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # gone already if all went well
        if is_main:
            signal.signal(signal.SIGTERM, usual)
    sync_to_disk(output.parent)
