"""Corpora in object storage, or behind any URL that fsspec can read: all of it passes through a folder on a local disk.

Manifest and indexes are copied there whole, compared with the manifest's checksums, and then mapped like those of a
local corpus; a copy that differs is fetched again when a corpus is opened. Of a .bin come the blocks that batches need,
each into a file of its own; those used longest ago are removed before all together exceed a limit. The processes of a
node share the folder, one fetches what several want, and any file may be removed at any time: it is fetched again.
"""

import fcntl
import hashlib
import os
import random
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from megatron_neobert.data.corpus.format import DAMAGED, CorpusFiles, Manifest, corpus_files, read_manifest
from megatron_neobert.data.corpus.format import Volume as VolumeRecord
from megatron_neobert.data.inputs.find import InputVersion, file_system_of, version_in
from megatron_neobert.data.inputs.stream import is_url, named_errors
from megatron_neobert.errors import ConfigError, DataError, MissingInputError, StorageError
from megatron_neobert.runtime.atomic_files import FileRecord, lock_if_possible, replacing, sha256_of

LIMIT_GB = 100  # unless a run says otherwise
BLOCK_BYTES = 256 << 10  # docs/training.md has what others cost
_CRC_BYTES = 4  # of zlib's checksum behind each block
_COPIED_BYTES = 16 << 20  # of an index, at a time
_THREADS = 32  # of a process: 84 MB/s at 50 ms for each of the two requests of a block
_BLOCKS_IN_MEMORY = 2048  # of a process, 0.5 GB: the windows that a block of documents is spread over touch 1,024
_WAITS_SECONDS = (0.5, 1.0, 2.0, 4.0)  # before another attempt
_TIMEOUT_SECONDS = 60.0  # of an attempt
_LOOKS = 256  # a process adds up what it has written after one part in so many of the limit

_Result = TypeVar("_Result")


class ObjectStorage:
    """What the corpora of a process read through. Threads and connections are made in the process that reads.

    Args:
        folder: The cache, on a local disk.
        limit_bytes: Of all blocks in it together, indexes not counted.
    """

    def __init__(self, folder: Path, *, limit_bytes: int) -> None:
        self.folder, self.limit_bytes = folder, limit_bytes
        self._process_id = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(ObjectStorage, self.folder, limit_bytes=self.limit_bytes), ()

    def open_corpus(self, prefix: str) -> tuple[CorpusFiles, Manifest, "list[RemoteFile]"]:
        """The local copies of manifest and indexes, and the .bin of each volume, of which nothing is read.

        Raises:
            MissingInputError: There is no such manifest.
            DataError: A file is not the one of the manifest.
            StorageError: One cannot be read.
        """
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

        def open_volume(volume: VolumeRecord) -> RemoteFile:
            ids, index = files.volume_files(volume.name)
            _copy(f"{above}/{index.name}", index, volume.idx)
            return RemoteFile(self, f"{above}/{ids.name}", volume.bin)

        if manifest.sources_sha256 is not None:
            record = FileRecord(2 * manifest.documents, manifest.sources_sha256)
            _copy(f"{above}/{files.sources.name}", files.sources, record)
        with ThreadPoolExecutor(_THREADS) as threads:
            volumes = list(threads.map(open_volume, manifest.volumes))
        # No connection may be open when the loader forks its workers: they would share it, and what waits for it.
        type(file_system_of(url)[0]).clear_instance_cache()
        return files, manifest, volumes

    @property
    def threads(self) -> ThreadPoolExecutor:
        self._know_this_process()
        return self._threads

    @property
    def memory(self) -> "OrderedDict[Path, bytes]":
        """The blocks that this process used last, verified."""
        self._know_this_process()
        return self._memory

    @property
    def pending(self) -> "dict[Path, Future[None]]":
        """The blocks that this process has ordered."""
        self._know_this_process()
        return self._pending

    def _know_this_process(self) -> None:
        if self._process_id != os.getpid():  # a fork has the parent's memory, but none of its threads
            self._process_id, self._written, self._has_looked = os.getpid(), 0, False
            self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="object-storage")
            self._memory: OrderedDict[Path, bytes] = OrderedDict()
            self._pending: dict[Path, Future[None]] = {}

    def cancel(self) -> None:
        """Drops what is ordered, which the process would otherwise wait for at its end."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        self._process_id = 0

    def count_written(self, written: int) -> None:
        """Keeps the blocks below the limit, as long as at most 25 processes write at once.

        The folder has a file with the bytes of all blocks, to which each process adds what it has written, one part in
        256 of the limit at a time. Blocks are looked at when they come near the limit, and once by each process, since
        one that was killed has not added its last part.
        """
        self._written += written
        if self._written * _LOOKS < self.limit_bytes:
            return
        with (self.folder / "used").open("a+b") as file:
            try:
                lock_if_possible(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return  # with the next block: another process counts, or removes
            try:
                file.seek(0)
                known, added = file.read(), self._written
                used = added + (int(known) if known.isdigit() else self.limit_bytes)
                if used > 0.9 * self.limit_bytes or not self._has_looked:  # a tenth may not have been added yet
                    used, self._has_looked = self._remove_oldest(), True
                file.truncate(0)
                file.write(str(used).encode())
                file.flush()
                self._written -= added
            finally:
                lock_if_possible(file, fcntl.LOCK_UN)

    def _remove_oldest(self) -> int:
        """Looks at all blocks, and leaves four fifths of the limit where they take more than nine tenths.

        Returns:
            Bytes of those that are left.
        """
        found = []  # 5 us each
        for folder in (self.folder / "blocks").iterdir():
            for entry in os.scandir(folder):
                with suppress(FileNotFoundError):
                    if entry.name.isdigit():
                        status = entry.stat()
                        found.append((status.st_mtime_ns, status.st_size, entry.path))
        used = sum(size for _, size, _ in found)
        if used <= 0.9 * self.limit_bytes:
            return used
        for _, size, path in sorted(found):
            Path(path).unlink(missing_ok=True)
            used -= size
            if used <= 0.8 * self.limit_bytes:
                break
        return used


def storage_for(prefix: str, folder: str | None) -> ObjectStorage | None:
    """What a command opens this corpus with; None: it is local.

    Raises:
        ConfigError: It is remote, and no folder was given.
    """
    if not is_url(prefix):
        return None
    if folder is None:
        raise ConfigError(f"{prefix} is read through a folder on a local disk; name one: --object-storage-cache-path.")
    return ObjectStorage(Path(folder), limit_bytes=LIMIT_GB * 10**9)


class RemoteFile:
    """A .bin, sliced like one in memory. Slicing waits for what is not in the cache; `will_need` orders it before.

    Raises:
        DataError: Its size is not that of the manifest. When a block is fetched: it was replaced since it was opened.
    """

    def __init__(self, storage: ObjectStorage, url: str, recorded: FileRecord) -> None:
        self.url, self._storage = url, storage
        self._version = _version_of(url)
        if self._version.bytes != recorded.bytes:
            raise _wrong_size(url, recorded, self._version)
        identity = hashlib.sha256(f"{url} {recorded.sha256} {self._version} {BLOCK_BYTES}".encode())
        self._folder = storage.folder / "blocks" / identity.hexdigest()

    def __str__(self) -> str:
        return self.url

    def __len__(self) -> int:
        return self._version.bytes

    def __getitem__(self, part: slice) -> bytes | memoryview:
        begin, end, _ = part.indices(len(self))
        if begin >= end:
            return b""
        first, last = begin // BLOCK_BYTES, (end - 1) // BLOCK_BYTES
        if first == last:
            return memoryview(self._block(first))[begin - first * BLOCK_BYTES : end - first * BLOCK_BYTES]
        content = b"".join(map(self._block, range(first, last + 1)))
        return content[begin - first * BLOCK_BYTES : end - first * BLOCK_BYTES]

    def will_need(self, begin: int, end: int) -> None:
        """Has threads fetch the blocks of these bytes."""
        memory, pending = self._storage.memory, self._storage.pending
        for number in range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            path = self._path(number)
            if path not in memory and path not in pending:
                pending[path] = self._storage.threads.submit(self._fetch, number)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}"

    def _block(self, number: int) -> bytes:
        memory, path = self._storage.memory, self._path(number)
        if path in memory:
            memory.move_to_end(path)
            return memory[path]
        try:
            if (ordered := self._storage.pending.pop(path, None)) is not None:
                ordered.result()
            memory[path] = self._verified(number)
        except BaseException:
            self._storage.cancel()
            raise
        if len(memory) > _BLOCKS_IN_MEMORY:
            memory.popitem(last=False)
            for done in [path for path, order in self._storage.pending.items() if order.done()]:
                del self._storage.pending[done]  # announced, and not read
        return memory[path]

    def _verified(self, number: int) -> bytes:
        path = self._path(number)
        for _ in range(5):  # it may be removed as soon as it is there
            self._fetch(number)
            try:
                stored = path.read_bytes()
                os.utime(path)  # used last now
            except FileNotFoundError:
                continue
            content, crc = stored[:-_CRC_BYTES], int.from_bytes(stored[-_CRC_BYTES:], "little")
            if len(content) == self._size(number) and zlib.crc32(content) == crc:
                return content
            path.unlink(missing_ok=True)
        raise StorageError(
            f"{path}: this part of {self.url} was fetched five times, and never stayed there undamaged; check the disk "
            "of --object-storage-cache-path, and that --object-storage-cache-gb is not too small"
        )

    def _size(self, number: int) -> int:
        return min(BLOCK_BYTES, len(self) - number * BLOCK_BYTES)

    def _fetch(self, number: int) -> None:
        """Puts a block into the cache, unless it is there."""

        def write(file: BinaryIO) -> None:
            begin, size = number * BLOCK_BYTES, self._size(number)
            try:
                content = _read(self.url, begin, begin + size)
            except StorageError:
                with suppress(StorageError):
                    self._refuse_replaced()  # which would be the reason
                raise
            self._refuse_replaced()  # afterwards: what was replaced before is not what was opened
            file.write(content + zlib.crc32(content).to_bytes(_CRC_BYTES, "little"))
            self._storage.count_written(size)

        _fill(self._path(number), write)

    def _refuse_replaced(self) -> None:
        if (found := _version_of(self.url)) != self._version:
            raise DataError(
                f"{self.url} was replaced after this run had opened it: expected version {self._version.version} of "
                f"{len(self):,} bytes, found {found.version} of {found.bytes:,}; a corpus must not change while it is "
                "read. Put the old one back, or start a run with the new one"
            )


def _copy(url: str, path: Path, recorded: FileRecord) -> None:
    """Copy a whole file, as the manifest has it, unless the cache has it. The checksum of a copy takes 1 s per GB."""

    def write(file: BinaryIO) -> None:
        if (version := _version_of(url)).bytes != recorded.bytes:
            raise _wrong_size(url, recorded, version)
        digest = hashlib.sha256()
        for begin in range(0, recorded.bytes, _COPIED_BYTES):
            content = _read(url, begin, min(begin + _COPIED_BYTES, recorded.bytes))
            digest.update(content)
            file.write(content)
        if (found := digest.hexdigest()) != recorded.sha256:
            raise DataError(f"{url}: expected sha256 {recorded.sha256} as in the manifest, found {found}; {DAMAGED}")
        file.flush()
        os.fsync(file.fileno())  # before it gets its name

    with suppress(FileNotFoundError):
        if path.stat().st_size != recorded.bytes or sha256_of(path) != recorded.sha256:
            path.unlink()
    _fill(path, write)


def _fill(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """A file of the cache, unless it is there. It gets its name when it is complete; meanwhile others wait for it."""
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        while not path.exists():
            with part.open("ab") as file:
                lock_if_possible(file, fcntl.LOCK_EX)
                try:
                    if not _is_called(file, part):
                        continue  # who had it before has finished it
                    if path.exists():
                        part.unlink()
                        continue
                    file.truncate(0)
                    try:
                        write(file)
                        file.flush()
                    except BaseException:
                        part.unlink()
                        raise
                    part.replace(path)
                finally:
                    lock_if_possible(file, fcntl.LOCK_UN)  # closing does not suffice where a fork has the file too
    except OSError as error:
        raise StorageError(
            f"--object-storage-cache-path: {path} cannot be written ({error}); free some space"
        ) from error


def _is_called(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _read(url: str, begin: int, end: int) -> bytes:
    """Bytes begin to end of an object, all of them."""

    def read(file_system: Any, path: str, limits: dict[str, float]) -> bytes:
        content: bytes = file_system.cat_file(path, start=begin, end=end, **limits)
        if len(content) != end - begin:
            raise OSError(f"{url}: asked for bytes {begin} to {end}, got {len(content)}")
        return content

    return _attempt(url, read)


def _version_of(url: str) -> InputVersion:
    return _attempt(url, lambda file_system, path, limits: version_in(file_system.info(path, **limits), url))


def _attempt(url: str, action: Callable[[Any, str, dict[str, float]], _Result], *, final: bool = False) -> _Result:
    """Calls `action` with file system, path and options of a call, several times where it fails.

    Args:
        final: Whether what is missing will not appear. Of a file that must be there, a server that is overloaded may
            say the same.

    Raises:
        StorageError: It has failed each time.
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
                attempts = len(_WAITS_SECONDS) + 1
                raise StorageError(
                    f"{url} could not be read in {attempts} attempts, the last of which ended with: {error}"
                ) from error
            time.sleep(wait * random.uniform(0.5, 1.5))  # many processes fail together
    raise AssertionError


def _wrong_size(url: str, recorded: FileRecord, found: InputVersion) -> DataError:
    return DataError(f"{url}: expected {recorded.bytes} bytes as in the manifest, found {found.bytes}; {DAMAGED}")
