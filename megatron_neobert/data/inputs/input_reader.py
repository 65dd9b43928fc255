"""The bytes of a chunk: local or remote, compressed or not. Memory: one block of them."""

import bz2
import gzip
import io
import lzma
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from backports import zstd

from megatron_neobert.errors import ConfigError, MissingInputError, MissingPackageError, NeoBERTError

BATCH_BYTES = 1 << 20  # text in one RecordBatch
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

Format = Literal["parquet", "arrow", "jsonl", "text", "warc"]
Compression = Literal["gzip", "zstd", "bzip2", "xz"]

_MAGIC: dict[bytes, Compression] = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
}
# A zstd stream may begin with frames without content.
_ZSTD_SKIPPABLE_FRAME = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")
# Archives written with `zstd --long=31` declare windows of 2 GiB, above the default limit.
_ZSTD_WINDOW_LOG = 31
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*:(:[a-zA-Z][a-zA-Z0-9+.-]*:)*//")


@dataclass(frozen=True)
class Chunk:
    """Part of an input file that one task reads: the whole file or a range [start, end).

    The unit of the range is a row of a Parquet file, or a byte of an uncompressed file of lines.
    """

    path: str  # or URL
    format: Format
    compression: Compression | None = None
    start: int = 0
    end: int | None = None  # None: the end of the file

    @property
    def unit(self) -> str:
        """Word for a record of this format in messages."""
        units = {"parquet": "row", "arrow": "row", "jsonl": "line", "text": "document"}
        return units.get(self.format, "record")

    @property
    def numbers_are_relative(self) -> bool:
        """True if record numbers count from the beginning of the chunk, not of the file."""
        return self.start > 0 and self.format in ("jsonl", "text")


class DamagedStream(Exception):
    """The stream cannot be read beyond this point. The size of the missing rest is unknown."""


def is_url(path: str) -> bool:
    return _URL.match(path) is not None


@contextmanager
def named_errors(path: str) -> Iterator[None]:
    """Context manager: add the input file's name to OSErrors, and convert errors of fsspec and its clients.

    Raises:
        MissingInputError: A URL does not exist.
        MissingPackageError: The file system of a URL needs a package that is not installed.
        OSError: A local file does not exist or cannot be read, or a URL has any other error.
    """
    try:
        yield
    except (NeoBERTError, DamagedStream):
        raise
    except Exception as error:
        if is_url(path) and isinstance(error, FileNotFoundError):
            raise MissingInputError(f"{path}: no such file ({error}); check the address") from error
        if isinstance(error, OSError):
            # Errors of a failing disk or network drive have no file name.
            if error.errno is not None and error.filename is None:
                error.filename = path
            raise
        if not is_url(path):
            raise
        if isinstance(error, ImportError):
            # fsspec raises a new ImportError without the module's name.
            package = getattr(error.__cause__, "name", None) or error.name or "PACKAGE"
            raise MissingPackageError(
                f"{path}: {error}; install the package for this address: {sys.executable} -m pip install {package}"
            ) from error
        # Each client of an object store has its own exception classes.
        problem = f"{path}: {type(error).__name__}: {error}; check the address, the network and the credentials"
        raise ConnectionError(problem) from error  # pyarrow reports damage as plain OSError


def file_system_of(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, shared by all threads of the process, and the URL's path in it.

    Raise ConfigError if fsspec does not support the address, and MissingPackageError if a package is not installed.
    """
    with named_errors(url):
        import fsspec

        try:
            file_system, path = fsspec.core.url_to_fs(url)
        except ValueError as error:
            raise ConfigError(f"{url} cannot be opened ({error}); check how the address begins") from error
        return file_system, path


def open_input(path: str) -> BinaryIO:
    """Open a file or URL for reading bytes. A local file is unbuffered, because callers read large blocks."""
    if not is_url(path):
        return Path(path).open("rb", buffering=0)
    file_system, path_in_file_system = file_system_of(path)
    with named_errors(path):
        return cast(BinaryIO, file_system.open(path_in_file_system, "rb"))


def compression_of(head: bytes) -> Compression | None:
    """Return the compression of a file that begins with `head`, or None."""
    if _ZSTD_SKIPPABLE_FRAME.match(head):
        return "zstd"
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), None)


def file_size(file: Any, path: str) -> int:
    """Return the size of an open file in bytes, or 0 if a server does not report it."""
    return file.size or 0 if is_url(path) else os.fstat(file.fileno()).st_size


class _FilePart:
    """A chunk's bytes as stored in the file, before decompression. Decompressors read from this object."""

    def __init__(self, chunk: Chunk) -> None:
        self._file = open_input(chunk.path)
        if chunk.start:  # the stream of a URL may not support seeking
            self._file.seek(chunk.start)
        self.length = (chunk.end or file_size(self._file, chunk.path)) - chunk.start
        self._limit = self.length if chunk.end else sys.maxsize
        self.bytes_read = 0
        self.has_ended = False  # a read has found the end

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes, fewer only at the end."""
        size = min(size, self._limit - self.bytes_read)
        blocks: list[bytes] = []
        # A server may send fewer bytes than asked for.
        while size and (block := self._file.read(size)):
            blocks.append(block)
            size -= len(block)
            self.bytes_read += len(block)
        self.has_ended = not blocks
        # A single block is not copied.
        return blocks[0] if len(blocks) == 1 else b"".join(blocks)

    def close(self) -> None:
        self._file.close()


# By compression: opens a file object that reads the decompressed bytes of all members of a _FilePart.
_DECOMPRESSORS: dict[Compression, Callable[[Any], Any]] = {
    "gzip": lambda part: gzip.GzipFile(fileobj=part),
    "zstd": lambda part: zstd.ZstdFile(part, options={zstd.DecompressionParameter.window_log_max: _ZSTD_WINDOW_LOG}),
    "bzip2": bz2.BZ2File,
    "xz": lzma.LZMAFile,
}


class InputReader(io.RawIOBase):
    """Decompressed bytes of one chunk, without the byte order mark of a text file."""

    def __init__(self, chunk: Chunk) -> None:
        self._path, self._part = chunk.path, _FilePart(chunk)
        self._content: Any = _DECOMPRESSORS[chunk.compression](self._part) if chunk.compression else self._part
        self._may_have_mark = chunk.start == 0 and chunk.format in ("jsonl", "text")

    def close(self) -> None:
        if hasattr(self, "_part"):  # called even if the constructor cannot open the file
            self._part.close()
        super().close()

    @property
    def progress(self) -> float:
        """Share of the chunk that has been read, 0 to 1, measured in bytes of the file (compressed if the file is)."""
        return min(1.0, self._part.bytes_read / self._part.length) if self._part.length > 0 else 1.0

    def read(self, size: int = BATCH_BYTES) -> bytes:
        """Return the next `size` decompressed bytes, or b"" after the end of the chunk.

        Fewer bytes are returned only at the end, or if a byte-order mark was removed at the beginning. Raise
        DamagedStream if the stream is damaged within these bytes.
        """
        with named_errors(self._path):
            try:
                content: bytes = self._content.read(size)
            except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError, zstd.ZstdError) as error:
                raise DamagedStream(str(error)) from error
            except OSError as error:
                # bz2 raises a plain OSError for damage. Errors of disks have a number, errors of servers a subclass.
                if type(error) is not OSError or error.errno is not None:
                    raise
                raise DamagedStream(str(error)) from error
        # bz2 and lzma take damage at the beginning of any later member for the end.
        if not content and not self._part.has_ended:
            raise DamagedStream("the data after a complete stream is damaged or of another kind")
        if self._may_have_mark:
            content, self._may_have_mark = content.removeprefix(BYTE_ORDER_MARK), False
        return content

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into `buffer`, and return the number of bytes. io.BufferedReader calls this method."""
        content = self.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)
