"""Files and folders that this project replaces, deletes or locks.

Their names are derived (PREFIX.partial, SAVE/lock, SAVE/.tmp-iter_N), so a file, a folder or a link of the user, or of
the author of downloaded data, can have such a name. Therefore they are opened without following links, and a folder is
deleted only if it carries our record. Everything else is refused with its path, and nothing is changed.
"""

import ctypes
import errno
import os
import shutil
import stat
from pathlib import Path
from typing import IO

from megatron_neobert.errors import OutputError

RECORD = ".megatron-neobert"  # empty file in every folder that may be deleted
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux's fcntl.h
_LOCK_RECORD = b"process "  # first bytes of a lock file that is not empty


def claim_folder(path: Path) -> None:
    """Create a folder that contains our record. An existing folder must be empty or contain our record.

    Raise OutputError if the path is a link, a file or any other folder, or if the folder cannot be created.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(path):
            path.mkdir(exist_ok=True)
        require_own_folder(path)
        _create(path / RECORD, exclusive=False).close()
    except OSError as error:
        raise OutputError(f"{path}: cannot be created ({error.strerror}); write to another folder") from error


def create_folder(path: Path) -> None:
    """Create a folder that contains only our record (see `claim_folder`). Delete an earlier folder with our record."""
    delete_folder(path)
    claim_folder(path)


def is_own_folder(path: Path, record: str = RECORD) -> bool:
    """Return True if the path is a folder, not a link, and the folder is empty or contains our record.

    Args:
        record: Name of a second file that also identifies a folder of this project, besides RECORD.
    """
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        with os.scandir(folder) as entries:
            is_file = {entry.name: entry.is_file(follow_symlinks=False) for entry in entries}
    finally:
        os.close(folder)
    return not is_file or any(is_file.get(name) for name in (RECORD, record))


def require_own_folder(path: Path, record: str = RECORD) -> None:
    """Raise OutputError unless `is_own_folder` returns True for these arguments."""
    if not is_own_folder(path, record):
        raise OutputError(
            f"{path} is in the way: a link, a file, or a folder that this project did not create. It is neither "
            "used nor deleted. Move it away, or choose another output"
        )


def delete_folder(path: Path, record: str = RECORD) -> None:
    """Delete a folder with our record (see `is_own_folder`), if it exists. The record is deleted last, for a retry."""
    if not os.path.lexists(path):
        return
    require_own_folder(path, record)
    empty_folder(path, keep=(RECORD, record))
    for name in {RECORD, record}:
        (path / name).unlink(missing_ok=True)
    path.rmdir()


def empty_folder(path: Path, *, keep: tuple[str, ...]) -> None:
    """Delete the content of a folder, except the names in `keep`. Links are deleted, not followed."""
    for entry in path.iterdir():
        if entry.name in keep:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def exchange(first: Path, second: Path) -> None:
    """Swap the names of two folders on one file system atomically, so that both names always exist.

    If the file system cannot do this, as on NFS, rename three times instead. Raise OSError on failure.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    paths = (_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second))
    if libc.renameat2(*paths, _RENAME_EXCHANGE) == 0:
        return
    if (code := ctypes.get_errno()) not in (errno.EINVAL, errno.ENOSYS):
        raise OSError(code, os.strerror(code), str(second))
    between = first.with_name(f".old-{second.name}")
    second.rename(between)
    first.rename(second)
    between.rename(first)


def open_own(path: Path) -> IO[bytes]:
    """Open a file for reading and appending, and create it if it is missing.

    Raise OutputError if the path is a link, a pipe, a folder or a device.
    """
    try:
        stream = _create(path, exclusive=False)
        if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            return stream
        stream.close()
    except OSError:
        # open raises different errors for links, folders and other kinds of files.
        if not os.path.lexists(path) or stat.S_ISREG(path.lstat().st_mode):
            raise
    raise OutputError(f"{path} is a link, a pipe, a folder or a device, and not a file of this project; move it away")


def open_lock(path: Path) -> IO[bytes]:
    """Open a lock file as `open_own` does. Raise OutputError also if a file exists that is not our lock file."""
    stream = open_own(path)
    stream.seek(0)
    if stream.read(len(_LOCK_RECORD)) not in (b"", _LOCK_RECORD):
        stream.close()
        raise OutputError(f"{path} is not a lock file of this project; move it away")
    return stream


def create_temporary(path: Path) -> IO[bytes]:
    """Create a file for writing. Delete an existing file first, which a killed process with the same id has left.

    Raise OSError if the file cannot be created.
    """
    path.unlink(missing_ok=True)
    return _create(path, exclusive=True)


def _create(path: Path, *, exclusive: bool) -> IO[bytes]:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    flags |= os.O_EXCL if exclusive else os.O_APPEND
    descriptor = os.open(path, flags, 0o666)
    return os.fdopen(descriptor, "w+b" if exclusive else "a+b", buffering=1 << 20)
