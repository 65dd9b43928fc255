"""Reading of corpora in object storage, or behind any URL that fsspec can read, through a cache folder on a local disk.

Opening a corpus copies its manifest and indexes to the cache and compares them with the checksums in the manifest. The
indexes are then mapped like a local corpus's. A damaged copy is fetched again the next time. A .bin is fetched in
blocks when batches need them. Each block is one file of the cache; above a size limit, the blocks used longest ago are
removed. All processes of a node share the cache, and a block that several of them need is fetched once. Every file of
the cache may be deleted at any time.
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

from megatron_neobert.data.corpus.format import DAMAGED, CorpusFiles, CorpusShard, Manifest, corpus_files, read_manifest
from megatron_neobert.data.inputs.find import InputVersion, version_from_info
from megatron_neobert.data.inputs.input_reader import file_system_of, named_errors
from megatron_neobert.errors import DataError, MissingInputError, StorageError
from megatron_neobert.runtime.atomic_files import lock_if_possible, replacing, sha256_of
from megatron_neobert.runtime.new_file import FileRecord
from megatron_neobert.runtime.own_files import claim_folder, open_lock

LIMIT_BYTES = 100 * 10**9  # limit for all blocks of a cache folder
BLOCK_BYTES = 256 << 10  # size of a request; docs/preprocessing.md has its cost for single documents
# A process measures the size of all blocks each time it has written this fraction of the limit.
_MEASUREMENTS_PER_LIMIT = 32
_CRC_BYTES = 4  # each block ends with its zlib.crc32
_COPY_STEP_BYTES = 16 << 20
# Threads per process. A block takes two requests; at 50 ms for each request, 32 threads reach 84 MB/s.
_THREADS = 32
_LOCKS = 1024  # number of lock files that all blocks of a cache folder share
# Blocks in memory per process, 0.5 GB. The windows that share a block of documents (--document-block-size) read from
# 1,024 blocks together.
_BLOCKS_IN_MEMORY = 2048
_WAITS_SECONDS = (0.5, 1.0, 2.0, 4.0)  # waiting times before the second and each further attempt
_TIMEOUT_SECONDS = 60.0  # limit for one attempt

_Result = TypeVar("_Result")


@dataclass
class FetchState:
    """Threads of one process, and the blocks that they fetch. Threads do not survive a fork."""

    process_id: int = field(default_factory=os.getpid)
    threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(_THREADS, thread_name_prefix="object-storage")
    )
    prefetched: dict[Path, Future[bytes]] = field(default_factory=dict)
    # Since the size of all blocks was last measured. It starts at the limit: the first block causes a measurement.
    written_bytes: int = LIMIT_BYTES


class ObjectStorage:
    """Reads remote corpora through a cache folder on a local disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._fetching: FetchState | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectStorage, (self.folder,)

    @property
    def fetching(self) -> FetchState:
        """This process's threads, and the blocks that they fetch. A forked process gets new threads."""
        if self._fetching is None or self._fetching.process_id != os.getpid():
            self._fetching = FetchState()
        return self._fetching

    def cancel(self) -> None:
        """Cancel all prefetching, so that the process does not wait for fetches when it exits."""
        self.fetching.threads.shutdown(wait=False, cancel_futures=True)
        self._fetching = None

    def open_corpus(self, prefix: str) -> "tuple[CorpusFiles, Manifest, list[tuple[RemoteFile, Path]]]":
        """Copy a remote corpus's manifest and indexes to the cache, except indexes that are cached already.

        Return the local files of the corpus, its manifest, and for each corpus shard the remote .bin and the local
        .idx. Raise MissingInputError if there is no manifest at this URL.
        """
        parent, _, name = prefix.rpartition("/")
        url = f"{prefix}.json"
        try:
            content = _retry(
                url, lambda file_system, path, limits: file_system.cat_file(path, **limits), retry_missing=False
            )
        except MissingInputError as error:
            raise MissingInputError(
                f"no corpus {prefix}: there is no {url}; give the prefix without .bin, as neobert preprocess printed it"
            ) from error
        files = corpus_files(self.folder / "indexes" / hashlib.sha256(content).hexdigest() / name)
        with self.locked(files.manifest), replacing(files.manifest) as temporary:
            temporary.write_bytes(content)
        manifest = read_manifest(files.manifest)

        def open_shard(local: tuple[Path, Path], shard: CorpusShard) -> tuple[RemoteFile, Path]:
            bin_, idx = local
            self.copy(f"{parent}/{idx.name}", idx, shard.idx)
            return RemoteFile(self, f"{parent}/{bin_.name}", shard.bin), idx

        with ThreadPoolExecutor(_THREADS) as threads:
            pairs = list(threads.map(open_shard, files.shard_files(len(manifest.shards)), manifest.shards))
        # Close all connections: workers that the loader forks would share them.
        type(file_system_of(url)[0]).clear_instance_cache()
        return files, manifest, pairs

    @contextmanager
    def locked(self, path: Path) -> Iterator[None]:
        """Context manager: create the folder of a cache file, and hold the file's lock if the file system has locks.

        Other processes and threads wait for the lock. Any OSError, also from inside the block, becomes a StorageError.
        """
        lock = self.folder / "locks" / str(zlib.crc32(os.fsencode(path)) % _LOCKS)
        claim_folder(self.folder)
        try:
            for folder in (path.parent, lock.parent):
                folder.mkdir(parents=True, exist_ok=True)
            with open_lock(lock) as file:
                lock_if_possible(file, fcntl.LOCK_EX)
                try:
                    yield
                finally:
                    # Closing the file does not unlock it while a forked process has it open.
                    lock_if_possible(file, fcntl.LOCK_UN)
        except OSError as error:
            raise StorageError(
                f"--object-storage-cache-path: {path} cannot be read or written ({error}); free some space, or "
                "name another folder"
            ) from error

    def copy(self, url: str, path: Path, recorded: FileRecord) -> None:
        """Copy a remote file to `path`, unless `path` has the recorded size and checksum. Hashing takes 1 s per GB.

        Raise DataError if the size or checksum of the remote file differs from the manifest.
        """
        with self.locked(path):
            if path.exists() and path.stat().st_size == recorded.bytes and sha256_of(path) == recorded.sha256:
                return
            _checked_version(url, recorded)
            with replacing(path) as temporary:
                with temporary.open("wb") as file:
                    for begin in range(0, recorded.bytes, _COPY_STEP_BYTES):
                        file.write(_read(url, begin, min(begin + _COPY_STEP_BYTES, recorded.bytes)))
                if (found := sha256_of(temporary)) != recorded.sha256:
                    raise DataError(
                        f"{url}: expected sha256 {recorded.sha256} as in the manifest, found {found}; {DAMAGED}"
                    )

    def add_written(self, size: int) -> None:
        """Count `size` bytes of a new block, and remove old blocks if the cache exceeds LIMIT_BYTES.

        The blocks used longest ago are removed until 80 % of the limit is in use. A process measures the cache after
        its first block, and then each time it has written 1/32 of the limit. This takes 5 us per block.
        """
        fetching = self.fetching
        fetching.written_bytes += size
        if fetching.written_bytes < LIMIT_BYTES // _MEASUREMENTS_PER_LIMIT:
            return
        fetching.written_bytes, blocks = 0, []
        for path in (self.folder / "blocks").glob("*/*"):
            with suppress(FileNotFoundError):
                # Files that are being written have other names.
                if path.name.isdigit() and not (path.is_symlink() or path.parent.is_symlink()):
                    blocks.append((path.stat().st_mtime_ns, path.stat().st_size, path))
        excess = sum(size for _, size, _ in blocks) - LIMIT_BYTES
        excess += LIMIT_BYTES // 5 if excess > 0 else 0
        for _, size, path in sorted(blocks):
            if excess <= 0:
                break
            path.unlink(missing_ok=True)
            excess -= size


class RemoteFile:
    """A remote .bin that is sliced like `bytes`. Slicing waits for blocks that are not in the cache."""

    def __init__(self, storage: ObjectStorage, url: str, recorded: FileRecord) -> None:
        self.url, self.storage = url, storage
        self._version = _checked_version(url, recorded)
        identity = hashlib.sha256(f"{url} {recorded.sha256} {self._version} {BLOCK_BYTES}".encode())
        self._folder = storage.folder / "blocks" / identity.hexdigest()

    def __str__(self) -> str:
        return self.url

    def __len__(self) -> int:
        return self._version.bytes

    def __getitem__(self, bounds: slice) -> memoryview:
        begin, end, _ = bounds.indices(len(self))
        first = begin // BLOCK_BYTES
        blocks = [_load_block(self, number) for number in range(first, -(-end // BLOCK_BYTES))] if begin < end else []
        content = blocks[0] if len(blocks) == 1 else b"".join(blocks)
        return memoryview(content)[begin - first * BLOCK_BYTES : end - first * BLOCK_BYTES]

    def prefetch(self, offsets: NDArray[np.int64]) -> None:
        """Start threads that fetch the blocks that contain these byte offsets, unless cached. Return at once.

        A thread's error is raised later, when the block is read.
        """
        fetching = self.storage.fetching
        for number in np.unique(offsets // BLOCK_BYTES).tolist():
            path = self.path(number)
            if path not in fetching.prefetched and not path.exists():
                fetching.prefetched[path] = fetching.threads.submit(self.load, number)

    def path(self, number: int) -> Path:
        """Return the path of a block in the cache."""
        return self._folder / str(number)

    def load(self, number: int) -> bytes:
        """Return block `number` from the cache. If the block is missing or damaged there, fetch the block first.

        Raise DataError if the remote file was replaced after this object had been created.
        """
        if (cached := self._read_cached(number)) is not None:
            return cached
        path, begin = self.path(number), number * BLOCK_BYTES
        with self.storage.locked(path):
            if (cached := self._read_cached(number)) is not None:
                return cached
            content = _read(self.url, begin, min(begin + BLOCK_BYTES, len(self)))
            # Compared after the read: an unchanged version proves that these bytes belong to the opened file.
            if (found := _version_of(self.url)) != self._version:
                raise DataError(
                    f"{self.url} was replaced after this run had opened it: expected version {self._version.version} "
                    f"of {len(self):,} bytes, found {found.version} of {found.bytes:,}. Restore the old file, or start "
                    "a new run"
                )
            with replacing(path, sync=False) as temporary:
                temporary.write_bytes(content + zlib.crc32(content).to_bytes(_CRC_BYTES, "little"))
        self.storage.add_written(len(content))
        return content

    def _read_cached(self, number: int) -> bytes | None:
        """Return a cached block, and mark the block as used now. Return None if the block is missing or damaged."""
        # Another process may remove the block at any time.
        try:
            stored = self.path(number).read_bytes()
            # The modification time serves as the time of the last use.
            os.utime(self.path(number))
        except (FileNotFoundError, NotADirectoryError):
            return None
        content, crc = stored[:-_CRC_BYTES], int.from_bytes(stored[-_CRC_BYTES:], "little")
        is_whole = len(content) == min(BLOCK_BYTES, len(self) - number * BLOCK_BYTES)
        return content if is_whole and zlib.crc32(content) == crc else None


@lru_cache(maxsize=_BLOCKS_IN_MEMORY)
def _load_block(file: RemoteFile, number: int) -> bytes:
    """Return a block from memory, cache or remote file. On an error, cancel all prefetching and raise the error."""
    try:
        if (prefetched := file.storage.fetching.prefetched.pop(file.path(number), None)) is not None:
            prefetched.result()
        return file.load(number)
    except BaseException:
        file.storage.cancel()
        raise


def _read(url: str, begin: int, end: int) -> bytes:
    def read(file_system: Any, path: str, limits: dict[str, float]) -> bytes:
        content: bytes = file_system.cat_file(path, start=begin, end=end, **limits)
        if len(content) != end - begin:
            raise OSError(f"{url}: expected bytes {begin} to {end}, got {len(content)} bytes")
        return content

    return _retry(url, read)


def _version_of(url: str) -> InputVersion:
    return _retry(url, lambda file_system, path, limits: version_from_info(file_system.info(path, **limits), url))


def _retry(url: str, action: Callable[[Any, str, dict[str, float]], _Result], *, retry_missing: bool = True) -> _Result:
    """Call `action` with the fsspec file system of `url`, the path in it and a timeout, and return the result.

    After an OSError, wait and call `action` again; raise StorageError after five failed calls. A missing file is
    retried too, because an overloaded server may report an existing file as missing; if `retry_missing` is False, raise
    MissingInputError instead.
    """
    waits = list(_WAITS_SECONDS)
    while True:
        try:
            with named_errors(url):
                file_system, path = file_system_of(url)
                limits = {"timeout": _TIMEOUT_SECONDS} if file_system.async_impl else {}
                return action(file_system, path, limits)
        except (OSError, MissingInputError) as error:
            if isinstance(error, MissingInputError) and not retry_missing:
                raise
            if not waits:
                raise StorageError(
                    f"{url} could not be read in {len(_WAITS_SECONDS) + 1} attempts, the last of which ended with: "
                    f"{error}"
                ) from error
        # The random factor spreads the attempts of many processes that failed together.
        time.sleep(waits.pop(0) * random.uniform(0.5, 1.5))


def _checked_version(url: str, recorded: FileRecord) -> InputVersion:
    """Return the version of a remote file; raise DataError if its size differs from the manifest."""
    version = _version_of(url)
    if version.bytes != recorded.bytes:
        raise DataError(f"{url}: expected {recorded.bytes} bytes as in the manifest, found {version.bytes}; {DAMAGED}")
    return version
