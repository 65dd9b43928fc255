"""Bytes of a shard, wherever it lies and however it is compressed.

What breaks off or is damaged raises DamagedStream, after all bytes before the damage have been read; `parts.read_part`
makes a DataError of it. Memory: one block of compressed and one of decompressed bytes.
"""

import bz2
import lzma
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from megatron_neobert.data.shards.records import BATCH_BYTES, Compression, ShardPart
from megatron_neobert.errors import ConfigError, MissingInputError, NeoBERTError

_MAGIC: dict[bytes, Compression] = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
}
_MAGIC_BYTES = 6  # at most
_ZSTD_FRAME_TO_SKIP = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")  # may stand in front of the others
_READ_BYTES = 256 << 10
_STEP_BYTES = 128 << 10  # decompressed at a time; what a step has done is lost when it meets damage
_ZSTD_WINDOW_LOG = 31  # archives written with `zstd --long=31` need windows of 2 GiB, as their header declares
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*:(:[a-zA-Z][a-zA-Z0-9+.-]*:)*//")


class DamagedStream(Exception):
    """Nothing can be read beyond this point, and how much is missing is unknown."""


def is_url(path: str) -> bool:
    return _URL.match(path) is not None


@contextmanager
def named_errors(path: str) -> Iterator[None]:
    """Gives errors the name of the shard, and those of fsspec and its clients the classes of local files' errors."""
    try:
        if is_url(path):
            with _remote_errors(path):
                yield
        else:
            yield
    except OSError as error:
        if error.errno is not None and error.filename is None:  # as of a failing disk or network drive
            error.filename = path
        raise


@contextmanager
def _remote_errors(url: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise MissingInputError(f"{url}: no such file ({error}); check the address") from error
    except ImportError as error:
        raise ConfigError(f"{url}: {error}; install the package that this kind of address needs") from error
    except (OSError, NeoBERTError, DamagedStream):
        raise
    except Exception as error:  # every store's client has exception classes of its own
        problem = f"{url}: {type(error).__name__}: {error}; check the address, the network and the credentials"
        raise OSError(problem) from error


def open_shard(path: str) -> BinaryIO:
    """The bytes of a file or URL, unbuffered, since it is read in large blocks.

    Raises:
        MissingInputError: The URL has no content.
        ConfigError: The package for this kind of URL is not installed.
    """
    if not is_url(path):
        return Path(path).open("rb", buffering=0)
    with named_errors(path):
        import fsspec

        return cast(BinaryIO, fsspec.open(path, "rb").open())


def compression_of(head: bytes) -> Compression | None:
    """The compression that the first bytes of a file show."""
    if _ZSTD_FRAME_TO_SKIP.match(head):
        return "zstd"
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), None)


def file_size(file: Any, path: str) -> int:
    """Bytes in an open file; 0 where a server does not report it."""
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


class PartStream:
    """The bytes of one part of a shard, decompressed.

    `progress` counts the bytes taken from the file, so it is right for compressed parts too.
    """

    def __init__(self, part: ShardPart) -> None:
        self._part = part
        self._file = open_shard(part.path)
        self._size = part.end or file_size(self._file, part.path)
        self._position = self._file.seek(part.start) if part.start else 0  # a URL may give a stream that cannot seek
        self._file_ended = False
        self._decoder: Any = None
        self._damage: type[Exception] = DamagedStream
        self._ahead = b""  # compressed bytes read but not yet given to a decoder
        self._broken: DamagedStream | None = None

    def __enter__(self) -> "PartStream":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    @property
    def progress(self) -> float:
        length = self._size - self._part.start
        return min(1.0, (self._position - self._part.start) / length) if length > 0 else 1.0

    def read(self, size: int = BATCH_BYTES) -> bytes:
        """At most `size` bytes; fewer only at the end, or before damage, which the next call raises."""
        if self._broken is not None:
            raise self._broken
        if self._part.compression is None:
            return self._read_file(size)
        pieces = []
        try:
            while size > 0 and (content := self._decompress(min(size, _STEP_BYTES))):
                pieces.append(content)
                size -= len(content)
        except DamagedStream as damage:
            if not pieces:
                raise
            self._broken = damage
        return b"".join(pieces)

    def _read_file(self, size: int) -> bytes:
        pieces = []
        left = size if self._part.end is None else min(size, self._part.end - self._position)
        with named_errors(self._part.path):
            while left > 0 and (content := self._file.read(left)):
                pieces.append(content)
                left -= len(content)
                self._position += len(content)
        self._file_ended = left > 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _decompress(self, size: int) -> bytes:
        """Some decompressed bytes, none at the end."""
        while True:
            if self._decoder is None and not self._begin_member():
                return b""
            decoder = self._decoder
            content = self._step(decoder, size)
            if decoder.eof:
                self._ahead, self._decoder = decoder.unused_data, None
            elif not content and decoder.needs_input and not self._ahead and self._file_ended:
                raise DamagedStream("it ends in the middle")
            if content:
                return content

    def _step(self, decoder: Any, size: int) -> bytes:
        data = b""
        if decoder.needs_input:
            data, self._ahead = self._ahead or self._read_file(_READ_BYTES), b""
        try:
            return decoder.decompress(data, size)
        except self._damage as error:
            raise DamagedStream(str(error)) from error

    def _begin_member(self) -> bool:
        """Whether another member follows: concatenated streams are one, and zeros may fill up the end."""
        self._ahead = self._ahead.lstrip(b"\0")
        while len(self._ahead) < _MAGIC_BYTES and (more := self._read_file(_READ_BYTES)):
            self._ahead = (self._ahead + more).lstrip(b"\0")
        if not self._ahead:
            return False
        compression = cast(Any, self._part.compression)
        if compression_of(self._ahead) != compression:
            raise DamagedStream(f"what follows is not {compression}")
        self._decoder, self._damage = _new_decoder(compression)
        return True
