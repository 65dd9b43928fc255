"""Streams of the bytes of a chunk: local or remote, compressed or not.

Damage raises DamagedStream after all bytes before it have been read. Memory: one block of compressed and one block of
decompressed bytes.
"""

import bz2
import io
import lzma
import os
import re
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

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
_LONGEST_MAGIC_BYTES = 6
# A zstd stream may begin with frames without content.
_ZSTD_SKIPPABLE_FRAME = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")
_COMPRESSED_READ_BYTES = 256 << 10
# Damage loses the output of the decompression step that finds it, so steps are small.
_STEP_BYTES = 128 << 10
# Archives written with `zstd --long=31` declare windows of 2 GiB, above the default limit.
_ZSTD_WINDOW_LOG = 31
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*:(:[a-zA-Z][a-zA-Z0-9+.-]*:)*//")


@dataclass(frozen=True)
class Chunk:
    """Part of an input file that one task reads: the whole file or its range [start, end).

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
    """Open a file or URL for reading bytes. A local file is unbuffered, because callers read large blocks.

    Raise OSError if it cannot be opened. A URL may also raise MissingInputError, and the errors of `file_system_of`.
    """
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


class _Inflate:
    """zlib's decompressor with the interface of the bz2, lzma and zstd decompressors."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(wbits=31)  # gzip header and trailer; verifies the checksum
        self.needs_input = True

    def decompress(self, data: bytes, max_length: int) -> bytes:
        content = self._zlib.decompress(data or self._zlib.unconsumed_tail, max_length)
        self.needs_input = len(content) < max_length and not self._zlib.unconsumed_tail
        return content

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data


def _new_decoder(compression: Compression) -> tuple[Any, type[Exception]]:
    """Return a decompressor like bz2.BZ2Decompressor, and the exception that it raises for damaged data."""
    if compression == "gzip":
        return _Inflate(), zlib.error
    if compression == "bzip2":
        return bz2.BZ2Decompressor(), OSError
    if compression == "xz":
        return lzma.LZMADecompressor(lzma.FORMAT_XZ), lzma.LZMAError
    from backports import zstd

    options = {int(zstd.DecompressionParameter.window_log_max): _ZSTD_WINDOW_LOG}
    return zstd.ZstdDecompressor(options=options), zstd.ZstdError


class ChunkStream(io.RawIOBase):
    """Decompressed bytes of one chunk, without the byte order mark of a text file."""

    # `close` is called even if the constructor cannot open the file.
    _file: BinaryIO = io.BytesIO()

    def __init__(self, chunk: Chunk) -> None:
        self._chunk = chunk
        self._file = open_input(chunk.path)
        self._size = chunk.end or file_size(self._file, chunk.path)
        # The stream of a URL may not support seeking.
        self._position = self._file.seek(chunk.start) if chunk.start else 0
        self._blocks = self._file_blocks(BATCH_BYTES) if chunk.compression is None else self._decompressed()
        self._rest = b""  # end of the latest block, not yet returned
        self._may_have_mark = chunk.start == 0 and chunk.format in ("jsonl", "text")
        self._damage: DamagedStream | None = None

    def close(self) -> None:
        self._file.close()
        super().close()

    @property
    def progress(self) -> float:
        """Share of the chunk's bytes in the file that is read, 0 to 1; counts compressed bytes."""
        length = self._size - self._chunk.start
        return min(1.0, (self._position - self._chunk.start) / length) if length > 0 else 1.0

    def read(self, size: int = BATCH_BYTES) -> bytes:
        """Return the next `size` decompressed bytes, or b"" after the end of the chunk.

        Fewer bytes are returned only before damage, at the end, and if a byte-order mark was removed at the beginning.

        Raises:
            DamagedStream: The stream is damaged here. Earlier calls have returned all bytes before the damage.
            OSError: The file or server cannot be read.
        """
        if self._damage is not None:
            raise self._damage
        blocks: list[bytes] = []
        missing = size
        try:
            while missing and (block := self._rest or next(self._blocks, b"")):
                blocks.append(block[:missing])
                self._rest = block[missing:]
                missing -= len(blocks[-1])
        except DamagedStream as damage:
            if not blocks:
                raise
            self._damage = damage
        # A single block is not copied.
        content = blocks[0] if len(blocks) == 1 else b"".join(blocks)
        if self._may_have_mark:
            content, self._may_have_mark = content.removeprefix(BYTE_ORDER_MARK), False
        return content

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer, for io.BufferedReader."""
        content = self.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def _file_blocks(self, size: int) -> Iterator[bytes]:
        end = self._chunk.end
        while end is None or self._position < end:
            with named_errors(self._chunk.path):
                block = self._file.read(size if end is None else min(size, end - self._position))
            if not block:
                return
            self._position += len(block)
            yield block

    def _decompressed(self) -> Iterator[bytes]:
        """Yield the decompressed bytes of all streams. Skip zero bytes around them. Raise DamagedStream at damage."""
        compression = cast(Compression, self._chunk.compression)
        blocks, unread = self._file_blocks(_COMPRESSED_READ_BYTES), b""
        while True:
            unread = unread.lstrip(b"\0")
            while len(unread) < _LONGEST_MAGIC_BYTES and (block := next(blocks, b"")):
                unread = (unread + block).lstrip(b"\0")
            if not unread:
                return
            if compression_of(unread) != compression:
                raise DamagedStream(f"the data after a complete stream is not {compression}")
            decoder, damage_error = _new_decoder(compression)
            while not decoder.eof:
                data = b""
                if decoder.needs_input:
                    data, unread = unread or next(blocks, b""), b""
                    if not data:
                        raise DamagedStream("it ends in the middle")
                try:
                    content = decoder.decompress(data, _STEP_BYTES)
                except damage_error as error:
                    raise DamagedStream(str(error)) from error
                if content:
                    yield content
            unread = decoder.unused_data
