"""Reading of a corpus: its files are mapped into memory, and refused on open where the index shows them to be wrong.

Opening reads the index once and no tokens; ids and checksums take a full read, `check_content`.
"""

import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.data.corpus_format import DAMAGED, DTYPES, HEADER, MAGIC, CorpusFiles, corpus_files, read_manifest
from megatron_neobert.errors import DataError, MissingInputError
from megatron_neobert.files import sha256_of

if TYPE_CHECKING:
    from megatron_neobert.data.tokenizer import Tokenizer

_CHUNK = 1 << 20  # documents or tokens checked at a time


class Corpus:
    """A finished corpus, mapped into memory; opening reads the index once, no tokens.

    Args:
        prefix: The path without .bin, .idx and .json.

    Raises:
        MissingInputError: None of the three files exists.
        DataError: One is missing, or they are damaged or contradict each other; names file, byte, expected and found.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = Path(prefix)
        self.files = corpus_files(prefix)
        _check_presence(self.files)
        self.manifest = read_manifest(self.files.manifest)
        self.dtype, self.lengths, self.pointers = _read_index(self.files.idx, self.files.bin)
        _check_manifest(self)
        self._bytes = memoryview(_map(self.files.bin))
        self.tokens = np.frombuffer(self._bytes, dtype=self.dtype)

    def __len__(self) -> int:
        return len(self.lengths)

    def __reduce__(self) -> tuple[Any, ...]:
        return Corpus, (self.prefix,)  # another process maps the files itself

    def document(self, number: int) -> NDArray[Any]:
        """The ids of one document, a read-only view."""
        if not 0 <= number < len(self):
            raise IndexError(f"document {number} of {len(self)}")
        start = int(self.pointers[number]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.lengths[number])]

    def gather(
        self, documents: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> NDArray[Any]:
        """The ids of lengths[i] tokens from token starts[i] of documents[i], for all i end to end, as a new array.

        Joins one slice per segment: 1.6 G tokens/s for segments of 465 tokens, 0.4 G for 63; a single vectorised index
        over all tokens reaches 0.3 G for both (one core, in the page cache).
        """
        inside = (starts >= 0) & (lengths >= 0) & (starts + lengths <= self.lengths[documents])
        assert inside.all(), f"segment {np.argmin(inside)} does not lie inside its document"
        first = self.pointers[documents] + starts * self.dtype.itemsize
        bounds = zip(first.tolist(), (first + lengths * self.dtype.itemsize).tolist(), strict=True)
        content = bytearray().join([self._bytes[begin:end] for begin, end in bounds])
        return np.frombuffer(content, dtype=self.dtype)

    def check_tokenizer(self, tokenizer: "Tokenizer") -> None:
        """Raises DataError where the corpus was written with another tokenizer than the run uses."""
        if tokenizer.fingerprint != self.manifest.tokenizer_fingerprint:
            raise DataError(
                f"{self.prefix} was written with tokenizer {self.manifest.tokenizer_fingerprint[:12]} "
                f"({self.manifest.vocab_size:,} ids), but --tokenizer-model is {tokenizer.fingerprint[:12]} "
                f"({tokenizer.vocab_size:,} ids); name the tokenizer of the corpus, or preprocess again with this one"
            )


def check_content(corpus: Corpus) -> None:
    """Reads everything: checksums against the manifest, every id inside the vocabulary, no special id but [UNK].

    Raises:
        DataError: With the file, and for an id its byte, document and position.
    """
    manifest = corpus.manifest
    refused = np.zeros(manifest.vocab_size, dtype=np.bool_)
    refused[manifest.special_ids] = True
    refused[manifest.special_tokens["unk"]] = False
    for first in range(0, corpus.tokens.size, _CHUNK):
        ids = corpus.tokens[first : first + _CHUNK].astype(np.int64)
        outside = (ids < 0) | (ids >= manifest.vocab_size)
        wrong = outside | refused[np.where(outside, 0, ids)]
        if wrong.any():
            token = first + int(np.argmax(wrong))
            offset = token * corpus.dtype.itemsize
            document = int(np.searchsorted(corpus.pointers, offset, side="right")) - 1
            position = (offset - int(corpus.pointers[document])) // corpus.dtype.itemsize
            id_ = int(corpus.tokens[token])
            expected = "no special token" if 0 <= id_ < manifest.vocab_size else f"an id below {manifest.vocab_size}"
            raise _bad(corpus.files.bin, offset, expected, f"{id_} (token {position} of document {document})")
    for path, record in ((corpus.files.bin, manifest.bin), (corpus.files.idx, manifest.idx)):
        found = sha256_of(path)
        if found != record.sha256:
            raise _bad(path, 0, f"sha256 {record.sha256} as in {corpus.files.manifest.name}", found)


def _bad(path: Path, offset: int, expected: object, found: object, remedy: str = DAMAGED) -> DataError:
    return DataError(f"{path}, byte {offset}: expected {expected}, found {found}; {remedy}")


def _check_presence(files: CorpusFiles) -> None:
    missing = [file.name for file in (files.bin, files.idx, files.manifest) if not file.is_file()]
    if len(missing) == 3:
        raise MissingInputError(
            f"no corpus {files.bin.with_suffix('')}: expected {', '.join(missing)}; give the prefix without .bin, as "
            "tools/preprocess_data.py printed it"
        )
    if missing:
        raise DataError(
            f"{files.bin.with_suffix('')}: {' and '.join(missing)} missing beside the rest; the run that wrote it was "
            "stopped, or the copy is incomplete. Copy again, or preprocess again with --overwrite"
        )


def _read_header(path: Path) -> "tuple[np.dtype[Any], int]":
    """Item type and number of documents, where the file's size agrees with them."""
    size = path.stat().st_size
    if size < HEADER.size:
        raise _bad(path, size, f"at least {HEADER.size} bytes of header", f"a file of {size} bytes")
    with path.open("rb") as stream:
        magic, version, code, sequences, boundaries = HEADER.unpack(stream.read(HEADER.size))
    if magic != MAGIC:
        raise _bad(path, 0, f"magic {MAGIC!r}", f"{magic!r}")
    if version != 1:
        raise _bad(path, 9, "version 1", version)
    if code not in DTYPES:
        raise _bad(path, 17, "dtype code 8 (uint16) or 4 (int32)", code)
    if sequences == 0:
        raise _bad(path, 18, "at least one document", "0")
    if boundaries != sequences + 1:
        found = f"{sequences} sequences and {boundaries} boundaries"
        raise _bad(path, 18, "one boundary more than sequences, for a document is one sequence", found)
    expected = HEADER.size + 12 * sequences + 8 * boundaries
    if size != expected:
        raise _bad(path, 18, f"{expected} bytes for {sequences} documents", f"a file of {size} bytes")
    return DTYPES[code], sequences


def _read_index(path: Path, bin_path: Path) -> "tuple[np.dtype[Any], NDArray[np.int32], NDArray[np.int64]]":
    """Item type, lengths in tokens and pointers in bytes, checked against each other and against both files' sizes."""
    dtype, count = _read_header(path)
    index = _map(path)
    at_pointers, at_boundaries = HEADER.size + 4 * count, HEADER.size + 12 * count
    lengths = np.frombuffer(index, "<i4", count, HEADER.size)
    pointers = np.frombuffer(index, "<i8", count, at_pointers)
    boundaries = np.frombuffer(index, "<i8", count + 1, at_boundaries)
    end = 0
    for first in range(0, count, _CHUNK):
        some = lengths[first : first + _CHUNK]
        if some.min() < 1:
            at = int(np.argmax(some < 1))
            raise _bad(path, HEADER.size + 4 * (first + at), f"a length above 0 of document {first + at}", some[at])
        ends = end + np.cumsum(some, dtype=np.int64) * dtype.itemsize
        starts = np.concatenate([[end], ends[:-1]])
        wanted = f"pointer of document {{}} to be {{}} bytes, the {dtype} tokens before it"
        _check_equal(path, at_pointers, first, pointers[first : first + _CHUNK], starts, wanted)
        end = int(ends[-1])
    bin_size = bin_path.stat().st_size
    if bin_size != end:
        expected = f"{end} bytes for {end // dtype.itemsize} tokens of {dtype}, as {path.name} says"
        raise _bad(bin_path, min(end, bin_size), expected, f"a file of {bin_size} bytes")
    for first in range(0, count + 1, _CHUNK):
        found = boundaries[first : first + _CHUNK]
        numbers = np.arange(first, first + found.size)
        _check_equal(path, at_boundaries, first, found, numbers, "boundary {} to be {}")
    return dtype, lengths, pointers


def _check_equal(
    path: Path, offset: int, first: int, found: NDArray[np.int64], expected: NDArray[np.int64], wanted: str
) -> None:
    if not np.array_equal(found, expected):
        at = int(np.argmax(found != expected))
        raise _bad(path, offset + 8 * (first + at), wanted.format(first + at, expected[at]), found[at])


def _check_manifest(corpus: Corpus) -> None:
    tokens = int(corpus.lengths.sum(dtype=np.int64))
    for name, value in {"documents": len(corpus), "tokens": tokens, "dtype": corpus.dtype.name}.items():
        found = getattr(corpus.manifest, name)
        if found != value:
            raise DataError(
                f"{corpus.files.manifest}: expected {name} {value} as in the index, found {found}; {DAMAGED}"
            )


def _map(path: Path) -> mmap.mmap:
    with path.open("rb") as stream:
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
