"""The bytes of a chunk of an input file: local or remote, compressed or not.

Damage raises DamagedStream after all bytes before it have been read. Memory: one block of compressed and one of
decompressed bytes.
"""

import bz2
import hashlib
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

from megatron_neobert.errors import MissingInputError, MissingPackageError, NeoBERTError

BATCH_BYTES = 1 << 20  # of text, in one RecordBatch
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

Format = Literal["parquet", "arrow", "jsonl", "text", "warc"]
Compression = Literal["gzip", "zstd", "bzip2", "xz"]

_MAGIC: dict[bytes, Compression] = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
}
_MAGIC_BYTES = 6  # at most
_ZSTD_FRAME_TO_SKIP = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")  # may come before the other frames
_READ_BYTES = 256 << 10  # of a compressed file at a time
_STEP_BYTES = 128 << 10  # decompressed at a time; what a step has done is lost when it meets damage
_ZSTD_WINDOW_LOG = 31  # archives written with `zstd --long=31` need windows of 2 GiB, as their header declares
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*:(:[a-zA-Z][a-zA-Z0-9+.-]*:)*//")


@dataclass(frozen=True)
class Chunk:
    """Piece of an input file that one task reads: the whole file, or its range [start, end).

    The range counts rows of a parquet file, bytes of an uncompressed file of lines.
    """

    path: str  # or URL
    format: Format
    compression: Compression | None = None
    start: int = 0
    end: int | None = None  # None: to the end

    @property
    def unit(self) -> str:
        """Word for its records in messages."""
        units = {"parquet": "row", "arrow": "row", "jsonl": "line", "text": "document"}
        return units.get(self.format, "record")

    @property
    def numbers_are_relative(self) -> bool:
        """True if record numbers count from the beginning of the chunk."""
        return self.start > 0 and self.format in ("jsonl", "text")


class DamagedStream(Exception):
    """Nothing can be read beyond this point, and how much is missing is unknown."""


def is_url(path: str) -> bool:
    return _URL.match(path) is not None


@contextmanager
def named_errors(path: str) -> Iterator[None]:
    """Name the input file in errors, and raise errors of fsspec and its clients as those of local files."""
    try:
        yield
    except (NeoBERTError, DamagedStream):
        raise
    except Exception as error:
        if isinstance(error, OSError) and not (is_url(path) and isinstance(error, FileNotFoundError)):
            if error.errno is not None and error.filename is None:  # as of a failing disk or network drive
                error.filename = path
            raise
        if not is_url(path):
            raise
        if isinstance(error, FileNotFoundError):
            raise MissingInputError(f"{path}: no such file ({error}); check the address") from error
        if isinstance(error, ImportError):  # fsspec raises it anew, without the name of the module
            package = getattr(error.__cause__, "name", None) or error.name or "PACKAGE"
            raise MissingPackageError(
                f"{path}: {error}; this kind of address needs it: {sys.executable} -m pip install {package}"
            ) from error
        # Every store's client has exception classes of its own.
        problem = f"{path}: {type(error).__name__}: {error}; check the address, the network and the credentials"
        raise OSError(problem) from error


def open_input(path: str) -> BinaryIO:
    """Open a file or URL, unbuffered, since it is read in large blocks."""
    if not is_url(path):
        return Path(path).open("rb", buffering=0)
    with named_errors(path):
        import fsspec

        return cast(BinaryIO, fsspec.open(path, "rb").open())


def compression_of(head: bytes) -> Compression | None:
    """Return the compression that the first bytes of a file show."""
    if _ZSTD_FRAME_TO_SKIP.match(head):
        return "zstd"
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), None)


def file_size(file: Any, path: str) -> int:
    """Return the bytes in an open file; 0 if a server does not report it."""
    return file.size or 0 if is_url(path) else os.fstat(file.fileno()).st_size


class _Inflate:
    """zlib's decompressor with the interface that those of bz2, lzma and zstd share."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(wbits=31)  # 31: gzip header and trailer, checksum verified
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
    """A decompressor for one member of a stream, and the exception that damage raises in it."""
    if compression == "gzip":
        return _Inflate(), zlib.error
    if compression == "bzip2":
        return bz2.BZ2Decompressor(), OSError
    if compression == "xz":
        return lzma.LZMADecompressor(lzma.FORMAT_XZ), lzma.LZMAError
    from backports import zstd

    options = {int(zstd.DecompressionParameter.window_log_max): _ZSTD_WINDOW_LOG}
    return zstd.ZstdDecompressor(options=options), zstd.ZstdError


class InputDigest:
    """SHA-256 of an input file, computed while the file is read from its beginning to its end."""

    def __init__(self) -> None:
        self._sha256, self._bytes = hashlib.sha256(), 0

    def update(self, block: bytes) -> None:
        self._sha256.update(block)
        self._bytes += len(block)

    def of_all(self, size: int) -> str | None:
        """Return the hexadecimal digest; None if fewer than `size` bytes were read."""
        return self._sha256.hexdigest() if self._bytes == size else None


class ChunkStream(io.RawIOBase):
    """The bytes of one chunk, decompressed, without the byte order mark that a text file may begin with.

    `progress` counts the bytes taken from the file, so it is right for compressed chunks too.
    """

    _file: BinaryIO = io.BytesIO()  # closed in place of a file that cannot be opened

    def __init__(self, chunk: Chunk, digest: InputDigest | None = None) -> None:
        self._chunk, self._digest = chunk, digest
        self._file = open_input(chunk.path)
        self._size = chunk.end or file_size(self._file, chunk.path)
        self._position = self._file.seek(chunk.start) if chunk.start else 0  # a URL may give a stream that cannot seek
        self._blocks = self._file_blocks(BATCH_BYTES) if chunk.compression is None else self._decompressed()
        self._rest = b""  # read, and not yet given away
        self._has_mark = chunk.start == 0 and chunk.format in ("jsonl", "text")
        self._damage: DamagedStream | None = None

    def close(self) -> None:
        self._file.close()
        super().close()

    @property
    def progress(self) -> float:
        length = self._size - self._chunk.start
        return min(1.0, (self._position - self._chunk.start) / length) if length > 0 else 1.0

    def read(self, size: int = BATCH_BYTES) -> bytes:
        """Return at most `size` bytes; fewer only at the end, or before damage, which the next call raises."""
        if self._damage is not None:
            raise self._damage
        pieces, held = [], 0
        try:
            while held < size and (block := self._rest or next(self._blocks, b"")):
                pieces.append(block[: size - held])
                self._rest = block[size - held :]
                held += len(pieces[-1])
        except DamagedStream as damage:
            if not held:
                raise
            self._damage = damage
        content = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if self._has_mark:
            content, self._has_mark = content.removeprefix(BYTE_ORDER_MARK), False
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
            if self._digest is not None:
                self._digest.update(block)
            yield block

    def _decompressed(self) -> Iterator[bytes]:
        """Yield decompressed bytes. Concatenated streams are one, and zeros may fill up the end."""
        compression = cast(Compression, self._chunk.compression)
        blocks, ahead = self._file_blocks(_READ_BYTES), b""
        while True:
            ahead = ahead.lstrip(b"\0")
            while len(ahead) < _MAGIC_BYTES and (block := next(blocks, b"")):
                ahead = (ahead + block).lstrip(b"\0")
            if not ahead:
                return
            if compression_of(ahead) != compression:
                raise DamagedStream(f"what follows is not {compression}")
            decoder, damage = _new_decoder(compression)
            while not decoder.eof:
                data = b""
                if decoder.needs_input:
                    data, ahead = ahead or next(blocks, b""), b""
                    if not data:
                        raise DamagedStream("it ends in the middle")
                try:
                    content = decoder.decompress(data, _STEP_BYTES)
                except damage as error:
                    raise DamagedStream(str(error)) from error
                if content:
                    yield content
            ahead = decoder.unused_data
