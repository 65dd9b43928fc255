"""A file that is hashed while it is written, and the record of its size and sha256."""

import hashlib
import os
import shutil
from pathlib import Path
from typing import Annotated

import msgspec

from megatron_neobert.runtime.atomic_files import own_name, sync_to_disk


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size and content of a file when it was written."""

    bytes: Annotated[int, msgspec.Meta(ge=0)]
    sha256: str


class NewFile:
    """A file that is hashed while it is written, and takes its name when it is complete.

    As a context manager it removes what was not committed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = own_name(path)
        self._stream = self._temporary.open("wb", buffering=1 << 20)
        self._digest = hashlib.sha256()
        self._bytes = 0
        self._sha256: str | None = None  # of a linked file, which is not hashed again

    def __enter__(self) -> "NewFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        self._temporary.unlink(missing_ok=True)

    def write(self, content: bytes | memoryview) -> None:
        self._stream.write(content)
        self._digest.update(content)
        self._bytes += memoryview(content).nbytes

    def link(self, source: Path, *, sha256: str) -> None:
        """Make this file a hard link to `source`, or a copy where the file system has no links."""
        self._temporary.unlink()
        try:
            os.link(source, self._temporary)
        except OSError:
            shutil.copyfile(source, self._temporary)
        self._bytes, self._sha256 = source.stat().st_size, sha256

    def commit(self, *, sync: bool = True) -> FileRecord:
        """Close the file and give it its name; see `replacing` for `sync`."""
        self._stream.close()
        if sync:
            sync_to_disk(self._temporary)
        self._temporary.replace(self.path)
        if sync:
            sync_to_disk(self.path.parent)
        return FileRecord(self._bytes, self._sha256 or self._digest.hexdigest())
