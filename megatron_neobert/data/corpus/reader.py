"""Reading of a corpus: its files are mapped into memory, and refused on open where sizes or manifest show them wrong.

Opening reads the ends of every index; a document's place and its ids are checked when it is read. `check_indexes` looks
at all places, `check_content` at all ids and checksums too. Nothing is copied: a corpus of 10^9 documents costs a
process no more memory of its own than one of ten, in one volume or in many.
"""

import resource
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.data.corpus.format import DAMAGED, CorpusFiles, Manifest, corpus_files, read_manifest
from megatron_neobert.data.corpus.object_storage import ObjectStorage, RemoteFile
from megatron_neobert.data.corpus.volumes import AllowedIds, MappedVolume, check_index, damage
from megatron_neobert.errors import DataError, MissingInputError, suggestion
from megatron_neobert.runtime.atomic_files import sha256_of
from megatron_neobert.text import listed

if TYPE_CHECKING:
    from megatron_neobert.data.tokenizer.tokenizer import Tokenizer

_SPARE_OPEN_FILES = 200  # besides those of the volumes


class Lengths(Protocol):
    """Tokens of each document, at least 1; an array, or something that can be asked like one."""

    def __len__(self) -> int: ...

    def __getitem__(self, documents: NDArray[np.int64], /) -> NDArray[np.int32]: ...


class _Places(NamedTuple):
    volumes: NDArray[np.int64]  # by their numbers
    begins: NDArray[np.int64]  # bytes, in the volume
    lengths: NDArray[np.int32]  # tokens


class Corpus:
    """A finished corpus. Documents are numbered through all volumes.

    Args:
        prefix: The path without .bin, .idx and .json; with `storage` a URL.
        storage: What a remote corpus is read through.

    Raises:
        MissingInputError: None of the files exists.
        StorageError: A remote file cannot be read.
        DataError: One is missing, or they are damaged or contradict each other; names file, byte, expected and found.
    """

    def __init__(self, prefix: str | Path, storage: ObjectStorage | None = None) -> None:
        self.prefix, self.storage = Path(prefix) if storage is None else str(prefix), storage
        self.is_remote = storage is not None
        if storage is None:
            self.files = corpus_files(prefix)
            self.manifest = _read_complete(self.files)
            pairs: Sequence[tuple[Path | RemoteFile, Path]] = self.files.volume_files(len(self.manifest.volumes))
        else:
            self.files, self.manifest, pairs = storage.open_corpus(str(prefix))
        _allow_open_files(2 * len(self.manifest.volumes))
        self.volumes = [
            MappedVolume(*pair, volume, dtype=self.manifest.dtype, manifest=self.files.manifest)
            for pair, volume in zip(pairs, self.manifest.volumes, strict=True)
        ]
        self.dtype = self.volumes[0].dtype
        self._ends = np.cumsum([volume.lengths.size for volume in self.volumes], dtype=np.int64)
        self._firsts = np.append(0, self._ends[:-1])  # documents before each volume
        self._contents = [volume.content for volume in self.volumes]
        self.lengths: Lengths = _Lengths(self)
        self.allowed = AllowedIds(
            self.manifest.special_ids, unknown=self.manifest.special_tokens["unk"], vocab_size=self.manifest.vocab_size
        )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __reduce__(self) -> tuple[Any, ...]:
        return Corpus, (self.prefix, self.storage)  # another process maps the files itself

    def document(self, number: int) -> NDArray[Any]:
        """Return the ids of one document, a read-only view."""
        places = self._places(np.array([number]))
        begin, content = int(places.begins[0]), self._contents[places.volumes[0]]
        return np.frombuffer(content[begin : begin + int(places.lengths[0]) * self.dtype.itemsize], self.dtype)

    def gather(
        self, documents: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> NDArray[Any]:
        """Return the ids of lengths[i] tokens from token starts[i] of documents[i], for all i, as one new array.

        Joins one slice per segment, which is faster than a single vectorised index over all tokens.
        """
        item = self.dtype.itemsize
        places = self._places(documents)
        inside = (starts >= 0) & (lengths >= 0) & (starts + lengths <= places.lengths)
        assert inside.all(), f"segment {np.argmin(inside)} does not lie inside its document"
        first = places.begins + starts * item
        if self.is_remote:
            self.will_need(documents)  # all at once what has not been announced
        bounds = zip(places.volumes.tolist(), first.tolist(), (first + lengths * item).tolist(), strict=True)
        slices = [self._contents[number][begin:end] for number, begin, end in bounds]
        ids = np.frombuffer(bytearray().join(slices), dtype=self.dtype)
        if (at := self.allowed.first_wrong(ids)) is not None:
            ends = np.cumsum(lengths)
            segment = int(np.searchsorted(ends, at, side="right"))
            token = int(starts[segment] + at - ends[segment] + lengths[segment])
            raise DataError(
                f"{self.prefix}: token {token} of document {documents[segment]}: expected "
                f"{self.allowed.describe(ids[at])}, found {ids[at]}; {DAMAGED}"
            )
        return ids

    def _places(self, documents: NDArray[np.int64]) -> _Places:
        """Return where documents are. Raise DataError if the index contradicts itself about one of them."""
        if documents.size and not 0 <= documents.min() <= documents.max() < len(self):
            raise IndexError(f"documents {documents.min()} to {documents.max()} of {len(self)}")
        if len(self.volumes) == 1:  # faster, and the usual corpus
            return _Places(np.zeros_like(documents), *self.volumes[0].find(documents))
        volumes = np.searchsorted(self._ends, documents, side="right")
        begins, lengths = np.empty(documents.size, np.int64), np.empty(documents.size, np.int32)
        for number in np.unique(volumes).tolist():
            here = volumes == number
            begins[here], lengths[here] = self.volumes[number].find(documents[here] - self._firsts[number])
        return _Places(volumes, begins, lengths)

    def will_need(self, documents: NDArray[np.int64]) -> None:
        """Have threads fetch these documents, if the corpus is remote, without waiting for them."""
        at = np.searchsorted(self._ends, documents, side="right")
        for number in np.unique(at).tolist():
            self.volumes[number].will_need(documents[at == number] - self._firsts[number])

    def lengths_between(self, first: int, stop: int) -> NDArray[np.int32]:
        """Return the tokens of documents [first, stop), much faster than by `lengths`."""
        numbers = range(int(np.searchsorted(self._ends, first, side="right")), len(self.volumes))
        begins = [(number, int(self._firsts[number])) for number in numbers if self._firsts[number] < stop]
        return np.concatenate(
            [self.volumes[number].lengths[max(first - begin, 0) : stop - begin] for number, begin in begins]
        )

    @cached_property
    def attributes_file(self) -> Path:
        """Path of the attributes, fetched and compared with the manifest once. DataError if they differ."""
        path, recorded = self.files.attributes, self.manifest.attributes
        assert recorded is not None, f"{self.prefix} has no attributes"
        if self.storage is not None:
            self.storage.copy(f"{self.prefix}.attributes.parquet", path, recorded)
        else:
            _compare_sha256(self.files, path, recorded.sha256, sha256_of(path))
        return path

    def check_tokenizer(self, tokenizer: "Tokenizer") -> None:
        """Raise DataError if the corpus was written with another tokenizer than the run uses."""
        manifest = self.manifest
        if tokenizer.fingerprint != manifest.tokenizer_fingerprint:
            raise DataError(
                f"{self.prefix} was written with tokenizer {self.manifest.tokenizer_fingerprint[:12]} "
                f"({self.manifest.vocab_size:,} ids), but --tokenizer-model is {tokenizer.fingerprint[:12]} "
                f"({tokenizer.vocab_size:,} ids); name the tokenizer of the corpus, or preprocess again with this one"
            )
        for name in ("vocab_size", "special_tokens", "special_ids"):  # which the fingerprint covers
            found, expected = getattr(manifest, name), getattr(tokenizer, name)
            if found != (list(expected) if name == "special_ids" else expected):
                raise DataError(
                    f"{self.files.manifest}: expected {name} {expected} of tokenizer {tokenizer.fingerprint[:12]}, "
                    f"found {found}; {DAMAGED}"
                )


class _Lengths:
    """Looked up where they are: 4 bytes per document and process would be 40 GB of copies for 10^10 documents."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus

    def __len__(self) -> int:
        return len(self._corpus)

    def __getitem__(self, documents: NDArray[np.int64]) -> NDArray[np.int32]:
        return self._corpus._places(documents).lengths


def check_indexes(corpus: Corpus) -> None:
    """Read all indexes. Raise DataError with file, byte, expected and found."""
    for volume in corpus.volumes:
        check_index(volume.idx, volume.lengths, volume.after_lengths, volume.dtype)


def check_content(corpus: Corpus) -> None:
    """Read everything: the indexes, checksums against the manifest, every id. Raise DataError with file and byte."""
    from tqdm import tqdm

    check_indexes(corpus)

    if corpus.manifest.attributes is not None:
        _ = corpus.attributes_file  # compared with the manifest
    volumes = list(zip(corpus.volumes, corpus.manifest.volumes, strict=True))
    for volume, recorded in tqdm(volumes, "volumes", unit="volume", leave=False, disable=None):  # on a terminal
        _compare_sha256(corpus.files, volume.bin, recorded.bin.sha256, corpus.allowed.scan(volume))
        _compare_sha256(corpus.files, volume.idx, recorded.idx.sha256, sha256_of(volume.idx))


def _compare_sha256(files: CorpusFiles, path: Path | RemoteFile, expected: str, found: str) -> None:
    if found != expected:
        raise damage(path, 0, f"sha256 {expected} as in {files.manifest.name}", found)


def _read_complete(files: CorpusFiles) -> Manifest:
    """Return the manifest of a corpus, none of whose files is missing."""
    prefix = files.manifest.parent / files.name
    if not files.manifest.is_file():
        if not files.existing():
            others = [path.stem for path in prefix.parent.glob("*.json")]
            rule = "; give the prefix without .bin, as neobert preprocess printed it"
            raise MissingInputError(
                f"no corpus {prefix}: expected {files.bin.name}, {files.idx.name}, {files.manifest.name}"
                f"{suggestion(files.name, others, otherwise=rule)}"
            )
        raise _incomplete(prefix, [files.manifest], of_megatron=not files.partial.exists())
    manifest = read_manifest(files.manifest)
    expected = [path for pair in files.volume_files(len(manifest.volumes)) for path in pair]
    expected += [files.attributes] if manifest.attributes is not None else []
    if missing := [path for path in expected if not path.is_file()]:
        raise _incomplete(prefix, missing)
    if (attributes := manifest.attributes) and (found := files.attributes.stat().st_size) != attributes.bytes:
        raise damage(
            files.attributes, 0, f"{attributes.bytes} bytes as in {files.manifest.name}", f"a file of {found} bytes"
        )
    return manifest


def _incomplete(prefix: Path, missing: Sequence[Path], *, of_megatron: bool = False) -> DataError:
    adopt = (
        f"if Megatron-LM wrote these files, neobert adopt {prefix} --tokenizer-model TOKENIZER makes a corpus of them; "
        "otherwise "
    )
    return DataError(
        f"{prefix}: {listed(path.name for path in missing)} missing beside the rest; {adopt if of_megatron else ''}the "
        "run that wrote it was stopped, or the copy is incomplete. Copy again, or preprocess again with --overwrite"
    )


def _allow_open_files(count: int) -> None:
    """Raise the limit of open files: a mapped file stays open, and 1,024 at a time is a common limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _SPARE_OPEN_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
        )
