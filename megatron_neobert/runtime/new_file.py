"""`NewFile`, which hashes a file while it is written, and `FileRecord`, the size and SHA-256 of a written file."""

import hashlib
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import msgspec

from megatron_neobert.runtime.atomic_files import sync_to_disk, temporary_path
from megatron_neobert.runtime.own_files import create_temporary

_BLOCK_BYTES = 4 << 20  # that `NewFile.append` reads at once


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size and hexadecimal SHA-256 of a file at the time it was written."""

    bytes: Annotated[int, msgspec.Meta(ge=0)]
    sha256: str


class NewFile:
    """A file that is hashed while it is written to a temporary path; `commit` renames it to `path`.

    Use it as a context manager: leaving the block without `commit` removes the temporary file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = temporary_path(path)
        self._stream = create_temporary(self._temporary)
        self._digest = hashlib.sha256()
        self._bytes = 0
        self._sha256: str | None = None  # set for a linked file, which is not hashed again

    def __enter__(self) -> "NewFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        self._temporary.unlink(missing_ok=True)

    def write(self, content: bytes | memoryview) -> None:
        self._stream.write(content)
        self._digest.update(content)
        self._bytes += memoryview(content).nbytes

    def append(self, source: Path) -> None:
        """Append the content of a file. A thread hashes each block while the block is written."""
        with source.open("rb", buffering=0) as stream, ThreadPoolExecutor(1) as thread:
            while block := stream.read(_BLOCK_BYTES):
                hashing = thread.submit(self._digest.update, block)
                self._stream.write(block)
                hashing.result()
                self._bytes += len(block)

    def link(self, source: Path, *, sha256: str) -> None:
        """Replace the content by a hard link to `source`, or by a copy. `source` is not compared with `sha256`."""
        self._temporary.unlink()
        try:
            os.link(source, self._temporary)
        except OSError:
            shutil.copyfile(source, self._temporary)
        self._bytes, self._sha256 = source.stat().st_size, sha256

    def commit(self, *, sync: bool = True) -> FileRecord:
        """Close the file, rename it to `path`, and return its record. If `sync`, wait until the file is on disk."""
        self._stream.close()
        if sync:
            sync_to_disk(self._temporary)
        self._temporary.replace(self.path)
        if sync:
            sync_to_disk(self.path.parent)
        return FileRecord(self._bytes, self._sha256 or self._digest.hexdigest())
