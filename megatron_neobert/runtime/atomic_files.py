"""Files that are whole or absent: checksums, and writing that survives a crash at any instant."""

import errno
import fcntl
import hashlib
import os
import socket
from pathlib import Path
from typing import IO

from megatron_neobert.errors import MissingInputError

_CHUNK_BYTES = 1 << 20
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}  # of a file system that has none


def require_folder(flag: str, folder: Path, *, holding: str = "", remedy: str = "check the path") -> None:
    """Looks whether an input is there, before the seconds that importing torch takes.

    Raises:
        MissingInputError: There is no such folder, or not the file in it.
    """
    if not (folder / holding).exists():
        without = f", or one without {holding}" if holding else ""
        raise MissingInputError(f"{flag} {folder}: no such folder{without}; {remedy}.")


def sha256_of(path: Path) -> str:
    """Hexadecimal sha256 of a file's content, read in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def replace_file(path: Path, content: str, *, sync: bool = True) -> None:
    """Writes a small file so that a reader sees the old or the new content and nothing between.

    Of processes that write the same file together, one wins. Without `sync` this holds as long as the machine lives;
    after its crash the file may have any content.
    """
    temporary = own_name(path)
    try:
        temporary.write_text(content, encoding="utf-8")
        if sync:
            sync_to_disk(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    if sync:
        sync_to_disk(path.parent)


def own_name(path: Path) -> Path:
    """A name beside a file that no other process takes, on whichever machine: for what will be renamed to it."""
    return path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}")


def sync_to_disk(path: Path) -> None:
    """Waits until a file's content, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_if_possible(file: IO[bytes] | int, operation: int) -> bool:
    """`fcntl.flock`, or False where the file system has no locks.

    Raises:
        BlockingIOError: Another process has it, and `operation` does not wait.
    """
    try:
        fcntl.flock(file, operation)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True
