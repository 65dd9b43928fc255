"""What all readers of shards share: bytes in, wherever they lie and however they are compressed; batches of texts out.

A record read is kept (its text is in `RecordBatch.texts`), rejected (an error, described), or dropped (by a harmless
rule that has a name), by the same rules for every format. Nothing is lost silently; damage that hides an unknown number
of records raises DamagedStream, after all bytes before it have been read, and `parts.read_part` makes a DataError of
that. Memory: one block of compressed and one of decompressed bytes.
"""

import bz2
import hashlib
import io
import lzma
import os
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, cast

from megatron_neobert.errors import MissingInputError, MissingPackageError, NeoBERTError

MALFORMED_JSON = "malformed JSON"
MISSING_KEY = "missing key"
NULL_TEXT = "null text"
NOT_A_STRING = "text is not a string"
TOO_LONG = "longer than --max-document-bytes"
MALFORMED_RECORD = "malformed web archive record"
FILTER_FAILED = "a filter failed"

EMPTY_TEXT = "empty text"  # dropped, like those below
NOT_A_RESPONSE = "not a response record"
HTTP_STATUS = "HTTP status not 200"
NOT_HTML = "not HTML or text"

BATCH_BYTES = 1 << 20  # of text, in one RecordBatch
PART_BYTES = 256 << 20  # of text, in one part: about a minute for the reference tokenizer
RAW_BYTES = 64 << 10  # of a rejected record that are kept

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SURROGATE = re.compile("[\ud800-\udfff]")

Format = Literal["parquet", "arrow", "jsonl", "json", "text", "warc"]
Compression = Literal["gzip", "zstd", "bzip2", "xz"]

_MAGIC: dict[bytes, Compression] = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
}
_MAGIC_BYTES = 6  # at most
_ZSTD_FRAME_TO_SKIP = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")  # may stand in front of the others
_READ_BYTES = 256 << 10  # of a compressed file at a time
_STEP_BYTES = 128 << 10  # decompressed at a time; what a step has done is lost when it meets damage
_ZSTD_WINDOW_LOG = 31  # archives written with `zstd --long=31` need windows of 2 GiB, as their header declares
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*:(:[a-zA-Z][a-zA-Z0-9+.-]*:)*//")


@dataclass(frozen=True)
class ReadSettings:
    """How the shards are to be read."""

    text_key: str = "content"
    input_format: Literal["auto"] | Format = "auto"
    text_separator: str | None = None  # between the documents of a plain text file; None: the file is one document
    max_document_bytes: int = 16 << 20  # bounds the memory: a text without spaces takes some 100 times its size
    record_keys: tuple[str, ...] | None = None  # what filters see of a record besides its text; None: no filters
    source_key: str | None = None  # by whose values the corpus's documents are counted

    @property
    def field_keys(self) -> tuple[str, ...] | None:
        """What is read of a record besides its text; None: nothing, and texts need no origins."""
        if self.source_key is None:
            return self.record_keys
        return tuple(dict.fromkeys((*(self.record_keys or ()), self.source_key)))


@dataclass(frozen=True)
class ShardPart:
    """What one task reads from beginning to end: a shard, or the range [start, end) of one.

    The range counts rows of a parquet or Arrow shard, bytes of an uncompressed shard of lines or separated texts.
    """

    path: str  # or URL
    format: Format
    compression: Compression | None = None
    start: int = 0
    end: int | None = None  # None: to the end

    @property
    def unit(self) -> str:
        """What its records are called in messages."""
        units = {"parquet": "row", "arrow": "row", "jsonl": "line", "json": "object", "text": "document"}
        return units.get(self.format, "record")

    @property
    def numbers_are_relative(self) -> bool:
        """True where record numbers count from the beginning of the part, since nobody has counted those before."""
        return self.start > 0 and self.format in ("jsonl", "text")


class Origin(NamedTuple):
    """Where a text comes from, for filters and counts by source."""

    number: int  # of the record, as in Rejected
    fields: dict[str, Any]  # by record key; None where the record has no such field


class Rejected(NamedTuple):
    """One record without a usable text."""

    reason: str  # one of the constants above
    number: int  # of the record; rows count from 0 as in pyarrow, everything else from 1 as in editors
    detail: str  # what was found
    raw: bytes  # the record's first RAW_BYTES, as far as the format has such a thing

    def describe(self, part: ShardPart, shard_name: str) -> str:
        """Where it stands and what is wrong with it."""
        after = f" after byte {part.start}" if part.numbers_are_relative else ""
        return f"{shard_name}, {part.unit} {self.number}{after}: {self.reason} ({self.detail})"


@dataclass
class RecordBatch:
    """Some consecutive records of a part. `texts` are not empty, valid Unicode, in the order of the shard."""

    texts: list[str] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)  # of the texts, where filters or sources ask for them
    utf8_bytes: int = 0  # of texts
    repaired: int = 0  # texts in which invalid UTF-8 or lone surrogates became U+FFFD
    rejected: list[Rejected] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)  # records by reason
    numbers: int = 0  # record numbers used up, blank lines included: the next part's first number follows from it
    progress: float = 0.0  # of the part, after this batch: 0 to 1


def decode(raw: bytes) -> tuple[str, bool]:
    """The text, and whether invalid UTF-8 in it became U+FFFD."""
    try:
        return raw.decode(), False
    except UnicodeDecodeError:
        return raw.decode(errors="replace"), True


def add_value(
    batch: RecordBatch,
    value: object,
    number: int,
    *,
    raw: bytes,
    repaired: bool = False,
    origin: Origin | None = None,
) -> None:
    """Adds what a record has under the text key; `raw` is the record, for the case that it is rejected."""
    if value is None:
        reject(batch, NULL_TEXT, number, "null", raw)
    elif not isinstance(value, str):
        reject(batch, NOT_A_STRING, number, f"found {type(value).__name__}", raw)
    else:
        add_text(batch, value, repaired=repaired, origin=origin)


def add_text(batch: RecordBatch, text: str, *, repaired: bool = False, origin: Origin | None = None) -> None:
    """Adds a text; one of white space only is dropped, and lone surrogates become U+FFFD."""
    if not text or text.isspace():
        batch.dropped[EMPTY_TEXT] += 1
        return
    try:
        size = utf8_size(text)
    except UnicodeEncodeError:
        text, repaired = _SURROGATE.sub("\ufffd", text), True
        size = utf8_size(text)
    batch.texts.append(text)
    if origin is not None:
        batch.origins.append(origin)
    batch.utf8_bytes += size
    batch.repaired += repaired


def utf8_size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def reject(batch: RecordBatch, reason: str, number: int, detail: str, raw: bytes) -> None:
    batch.rejected.append(Rejected(reason, number, detail, raw[:RAW_BYTES]))


# --- bytes


class DamagedStream(Exception):
    """Nothing can be read beyond this point, and how much is missing is unknown."""


def is_url(path: str) -> bool:
    return _URL.match(path) is not None


@contextmanager
def named_errors(path: str) -> Iterator[None]:
    """Gives errors the name of the shard, and those of fsspec and its clients the classes of local files' errors."""
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


def open_shard(path: str) -> BinaryIO:
    """The bytes of a file or URL, unbuffered, since it is read in large blocks.

    Raises:
        MissingInputError: The URL has no content.
        MissingPackageError: The package for this kind of URL is not installed.
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


class ShardDigest:
    """The sha256 of a shard, of the bytes that pass by while it is read from its beginning to its end."""

    def __init__(self) -> None:
        self._sha256, self._bytes = hashlib.sha256(), 0

    def update(self, block: bytes) -> None:
        self._sha256.update(block)
        self._bytes += len(block)

    def of_all(self, size: int) -> str | None:
        """Hexadecimal; None where fewer than `size` bytes have passed by, so that the digest is not the shard's."""
        return self._sha256.hexdigest() if self._bytes == size else None


class PartStream(io.RawIOBase):
    """The bytes of one part of a shard, decompressed, without the byte order mark that a text file may begin with.

    `progress` counts the bytes taken from the file, so it is right for compressed parts too.
    """

    _file: BinaryIO = io.BytesIO()  # closed in place of a file that cannot be opened

    def __init__(self, part: ShardPart, digest: ShardDigest | None = None) -> None:
        self._part, self._digest = part, digest
        self._file = open_shard(part.path)
        self._size = part.end or file_size(self._file, part.path)
        self._position = self._file.seek(part.start) if part.start else 0  # a URL may give a stream that cannot seek
        self._blocks = self._file_blocks(BATCH_BYTES) if part.compression is None else self._decompressed()
        self._rest = b""  # read, and not yet given away
        self._has_mark = part.start == 0 and part.format in ("jsonl", "json", "text")
        self._damage: DamagedStream | None = None

    def close(self) -> None:
        self._file.close()
        super().close()

    @property
    def progress(self) -> float:
        length = self._size - self._part.start
        return min(1.0, (self._position - self._part.start) / length) if length > 0 else 1.0

    def read(self, size: int = BATCH_BYTES) -> bytes:
        """At most `size` bytes; fewer only at the end, or before damage, which the next call raises."""
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
        """For io.BufferedReader, which reads lines."""
        content = self.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def _file_blocks(self, size: int) -> Iterator[bytes]:
        end = self._part.end
        while end is None or self._position < end:
            with named_errors(self._part.path):
                block = self._file.read(size if end is None else min(size, end - self._position))
            if not block:
                return
            self._position += len(block)
            if self._digest is not None:
                self._digest.update(block)
            yield block

    def _decompressed(self) -> Iterator[bytes]:
        """Concatenated streams are one, and zeros may fill up the end."""
        compression = cast(Compression, self._part.compression)
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
