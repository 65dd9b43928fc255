"""Corpora in object storage, or behind any URL that fsspec can read: all of it passes through a folder on a local disk.

Manifest and indexes are copied there whole, compared with the manifest's checksums, and then mapped like those of a
local corpus; a copy that differs is fetched again when a corpus is opened. A .bin is fetched in blocks as batches need
them, each block into a file of its own; the blocks used longest ago are removed when all together exceed a limit. The
processes of a node share the folder, and a block that several need is fetched once. Any file may be removed at any
time: it is fetched again.
"""

import fcntl
import hashlib
import os
import random
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.data.corpus.format import DAMAGED, CorpusFiles, Manifest, Volume, corpus_files, read_manifest
from megatron_neobert.data.inputs.find import InputVersion, file_system_of, version_from_info
from megatron_neobert.data.inputs.stream import named_errors
from megatron_neobert.errors import DataError, MissingInputError, StorageError
from megatron_neobert.runtime.atomic_files import lock_if_possible, replacing, sha256_of
from megatron_neobert.runtime.new_file import FileRecord

LIMIT_BYTES = 100 * 10**9  # of the blocks of a folder
BLOCK_BYTES = 256 << 10  # docs/recipes.md has the cost of other sizes
_LOOKS = 32  # a process looks at the size of all blocks once for each such part of the limit that it writes
_CRC_BYTES = 4  # of zlib's checksum at the end of each block
_COPIED_BYTES = 16 << 20  # of an index, at a time
_THREADS = 32  # of a process: 84 MB/s at 50 ms for each of the two requests of a block
_LOCKS = 1024  # files, one for every so many blocks
_BLOCKS_IN_MEMORY = 2048  # of a process, 0.5 GB: the windows that a block of documents is spread over touch 1,024
_WAITS_SECONDS = (0.5, 1.0, 2.0, 4.0)  # before another attempt
_TIMEOUT_SECONDS = 60.0  # of an attempt

_Result = TypeVar("_Result")


@dataclass
class Fetching:
    """Threads of one process and the blocks that they were asked for; a forked process begins with new ones."""

    process_id: int = field(default_factory=os.getpid)
    threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(_THREADS, thread_name_prefix="object-storage")
    )
    ordered: dict[Path, Future[bytes]] = field(default_factory=dict)
    written_bytes: int = LIMIT_BYTES  # since this process last looked at all blocks


class ObjectStorage:
    """Cache folder on a local disk, through which the corpora of a process are read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._fetching: Fetching | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectStorage, (self.folder,)

    @property
    def fetching(self) -> Fetching:
        """Threads and blocks of this process."""
        if self._fetching is None or self._fetching.process_id != os.getpid():
            self._fetching = Fetching()
        return self._fetching

    def cancel(self) -> None:
        """Drop the ordered blocks, which the process would otherwise wait for at its end."""
        self.fetching.threads.shutdown(wait=False, cancel_futures=True)
        self._fetching = None

    def open_corpus(self, prefix: str) -> "tuple[CorpusFiles, Manifest, list[tuple[RemoteFile, Path]]]":
        """Return manifest, and of each corpus shard the .bin, unread, and the copy of the index."""
        above, _, name = prefix.rpartition("/")
        url = f"{prefix}.json"
        try:
            content = _attempt(url, lambda file_system, path, limits: file_system.cat_file(path, **limits), final=True)
        except MissingInputError as error:
            raise MissingInputError(
                f"no corpus {prefix}: there is no {url}; give the prefix without .bin, as neobert preprocess printed it"
            ) from error
        files = corpus_files(self.folder / "indexes" / hashlib.sha256(content).hexdigest() / name)
        if not files.manifest.exists() or files.manifest.read_bytes() != content:
            files.manifest.parent.mkdir(parents=True, exist_ok=True)
            with replacing(files.manifest) as temporary:
                temporary.write_bytes(content)
        manifest = read_manifest(files.manifest)

        def open_pair(pair: tuple[Path, Path], volume: Volume) -> tuple[RemoteFile, Path]:
            self.copy(f"{above}/{pair[1].name}", pair[1], volume.idx)
            return RemoteFile(self, f"{above}/{pair[0].name}", volume.bin), pair[1]

        with ThreadPoolExecutor(_THREADS) as threads:
            pairs = list(threads.map(open_pair, files.volume_files(len(manifest.volumes)), manifest.volumes))
        # No connection may be open when the loader forks its workers: they would share the connection.
        type(file_system_of(url)[0]).clear_instance_cache()
        return files, manifest, pairs

    @contextmanager
    def locked(self, path: Path) -> Iterator[None]:
        """Write a file of the cache inside this block; threads and processes that need the same file wait."""
        lock = self.folder / "locks" / str(zlib.crc32(os.fsencode(path)) % _LOCKS)
        try:
            for folder in (path.parent, lock.parent):
                folder.mkdir(parents=True, exist_ok=True)
            with lock.open("ab") as file:
                lock_if_possible(file, fcntl.LOCK_EX)
                try:
                    yield
                finally:
                    lock_if_possible(file, fcntl.LOCK_UN)  # closing does not suffice if a fork has the file too
        except OSError as error:
            raise StorageError(
                f"--object-storage-cache-path: {path} cannot be written ({error}); free some space"
            ) from error

    def copy(self, url: str, path: Path, recorded: FileRecord) -> None:
        """Copy a whole file as the manifest has it, unless the cache has it. The checksum takes 1 s per GB."""
        with self.locked(path):
            if path.exists() and path.stat().st_size == recorded.bytes and sha256_of(path) == recorded.sha256:
                return
            _check_size(url, recorded, _version_of(url))
            with replacing(path) as temporary:
                with temporary.open("wb") as file:
                    for begin in range(0, recorded.bytes, _COPIED_BYTES):
                        file.write(_read(url, begin, min(begin + _COPIED_BYTES, recorded.bytes)))
                if (found := sha256_of(temporary)) != recorded.sha256:
                    raise DataError(
                        f"{url}: expected sha256 {recorded.sha256} as in the manifest, found {found}; {DAMAGED}"
                    )

    def count_written(self, size: int) -> None:
        """Keep the blocks of the folder at about LIMIT_BYTES: remove those used longest ago, down to 80 %.

        A process looks at all blocks (5 us each) after its first block and then after every 32nd part of the limit.
        """
        fetching = self.fetching
        fetching.written_bytes += size
        if fetching.written_bytes < LIMIT_BYTES // _LOOKS:
            return
        fetching.written_bytes, found = 0, []
        for path in (self.folder / "blocks").glob("*/*"):
            with suppress(FileNotFoundError):
                if path.name.isdigit():  # a block, not a file that is being written
                    found.append((path.stat().st_mtime_ns, path.stat().st_size, path))
        excess = sum(size for _, size, _ in found) - LIMIT_BYTES
        excess += LIMIT_BYTES // 5 if excess > 0 else 0
        for _, size, path in sorted(found):
            if excess <= 0:
                break
            path.unlink(missing_ok=True)
            excess -= size


class RemoteFile:
    """A .bin, sliced like bytes in memory. Slicing waits for blocks outside the cache; `will_need` orders them before.

    DataError if its size is not that of the manifest, or if it was replaced since it was opened.
    """

    def __init__(self, storage: ObjectStorage, url: str, recorded: FileRecord) -> None:
        self.url, self.storage = url, storage
        self._version = _version_of(url)
        _check_size(url, recorded, self._version)
        identity = hashlib.sha256(f"{url} {recorded.sha256} {self._version} {BLOCK_BYTES}".encode())
        self._folder = storage.folder / "blocks" / identity.hexdigest()

    def __str__(self) -> str:
        return self.url

    def __len__(self) -> int:
        return self._version.bytes

    def __getitem__(self, part: slice) -> memoryview:
        begin, end, _ = part.indices(len(self))
        first = begin // BLOCK_BYTES
        blocks = [_used_block(self, number) for number in range(first, -(-end // BLOCK_BYTES))] if begin < end else []
        content = blocks[0] if len(blocks) == 1 else b"".join(blocks)
        return memoryview(content)[begin - first * BLOCK_BYTES : end - first * BLOCK_BYTES]

    def will_need(self, positions: NDArray[np.int64]) -> None:
        """Have threads fetch the blocks of the bytes at these positions."""
        fetching = self.storage.fetching
        for number in np.unique(positions // BLOCK_BYTES).tolist():
            path = self.path(number)
            if path not in fetching.ordered and not path.exists():
                fetching.ordered[path] = fetching.threads.submit(self.load, number)

    def path(self, number: int) -> Path:
        """File of the cache that holds a block, or will hold it."""
        return self._folder / str(number)

    def load(self, number: int) -> bytes:
        """Return a block from the cache; fetch it into the cache if it is missing or damaged there."""
        if (cached := self._cached(number)) is not None:
            return cached
        path, begin = self.path(number), number * BLOCK_BYTES
        with self.storage.locked(path):
            if (cached := self._cached(number)) is not None:
                return cached
            content = _read(self.url, begin, min(begin + BLOCK_BYTES, len(self)))
            self._refuse_replaced()  # after the read: an object replaced before it is not the one that was opened
            with replacing(path, sync=False) as temporary:
                temporary.write_bytes(content + zlib.crc32(content).to_bytes(_CRC_BYTES, "little"))
        self.storage.count_written(len(content))
        return content

    def _cached(self, number: int) -> bytes | None:
        try:  # another process may remove the block at any time
            stored = self.path(number).read_bytes()
            os.utime(self.path(number))  # the time of its last use
        except (FileNotFoundError, NotADirectoryError):
            return None
        content, crc = stored[:-_CRC_BYTES], int.from_bytes(stored[-_CRC_BYTES:], "little")
        is_whole = len(content) == min(BLOCK_BYTES, len(self) - number * BLOCK_BYTES)
        return content if is_whole and zlib.crc32(content) == crc else None

    def _refuse_replaced(self) -> None:
        if (found := _version_of(self.url)) != self._version:
            raise DataError(
                f"{self.url} was replaced after this run had opened it: expected version {self._version.version} of "
                f"{len(self):,} bytes, found {found.version} of {found.bytes:,}; a corpus must not change while it is "
                "read. Put the old one back, or start a run with the new one"
            )


@lru_cache(maxsize=_BLOCKS_IN_MEMORY)
def _used_block(file: RemoteFile, number: int) -> bytes:
    try:
        if (ordered := file.storage.fetching.ordered.pop(file.path(number), None)) is not None:
            ordered.result()
        return file.load(number)
    except BaseException:
        file.storage.cancel()
        raise


def _read(url: str, begin: int, end: int) -> bytes:
    """Read bytes begin to end of an object, all of them."""

    def read(file_system: Any, path: str, limits: dict[str, float]) -> bytes:
        content: bytes = file_system.cat_file(path, start=begin, end=end, **limits)
        if len(content) != end - begin:
            raise OSError(f"{url}: asked for bytes {begin} to {end}, got {len(content)}")
        return content

    return _attempt(url, read)


def _version_of(url: str) -> InputVersion:
    return _attempt(url, lambda file_system, path, limits: version_from_info(file_system.info(path, **limits), url))


def _attempt(url: str, action: Callable[[Any, str, dict[str, float]], _Result], *, final: bool = False) -> _Result:
    """Call `action` with file system, path and options of a call; after several failures raise StorageError.

    `final`: a missing object ends the attempts. An overloaded server may report existing objects as missing.
    """
    for wait in (*_WAITS_SECONDS, None):
        try:
            with named_errors(url):
                file_system, path = file_system_of(url)
                limits = {"timeout": _TIMEOUT_SECONDS} if file_system.async_impl else {}
                return action(file_system, path, limits)
        except (OSError, MissingInputError) as error:
            if final and isinstance(error, MissingInputError):
                raise
            if wait is None:
                raise StorageError(
                    f"{url} could not be read in {len(_WAITS_SECONDS) + 1} attempts, the last of which ended with: "
                    f"{error}"
                ) from error
            time.sleep(wait * random.uniform(0.5, 1.5))  # many processes fail together
    raise AssertionError


def _check_size(url: str, recorded: FileRecord, found: InputVersion) -> None:
    if found.bytes != recorded.bytes:
        raise DataError(f"{url}: expected {recorded.bytes} bytes as in the manifest, found {found.bytes}; {DAMAGED}")
