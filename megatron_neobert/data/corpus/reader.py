"""Reading of a corpus, whose files are mapped into memory.

Opening checks the manifest, the sizes of all files and the ends of every index. The index entries and the ids of a
document are checked when it is read. `check_indexes` checks all index entries, `check_content` also all ids and
checksums. No file is copied into memory: a corpus of 10^9 documents takes no more memory per process than one of ten.
"""

import glob
import re
import resource
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.data.corpus.format import DAMAGED, CorpusFiles, Manifest, corpus_files, read_manifest
from megatron_neobert.data.corpus.object_storage import ObjectStorage, RemoteFile
from megatron_neobert.data.corpus.shard_files import AllowedIds, MappedShard, damage_error
from megatron_neobert.data.inputs.input_reader import is_url
from megatron_neobert.errors import ConfigError, DataError, MissingInputError
from megatron_neobert.runtime.atomic_files import sha256_of
from megatron_neobert.runtime.jobs import progress_bar
from megatron_neobert.text import listed, percent

if TYPE_CHECKING:
    from megatron_neobert.data.tokenizer.tokenizer import Tokenizer

# Percentages of documents for which `Corpus.describe` states the largest length.
_PERCENTAGES = (5, 25, 50, 75, 95, 99)
_TRUNCATION_LENGTHS = (1024, 2048)  # the sequence lengths, in tokens, that NeoBERT was trained with
_LENGTHS_STEP = 1 << 20
_SPARE_OPEN_FILES = 200  # files that the process may open besides the corpus shards


class Corpus:
    """A finished corpus, opened for reading. Documents are numbered from 0 across all corpus shards.

    `prefix` is the path of the corpus without .bin, .idx or .json, or a URL if `storage` is given. `storage` reads a
    remote corpus through a local cache folder. Raise ConfigError for a URL without `storage`, MissingInputError if
    there is no corpus, DataError if the files are damaged, and StorageError if a remote file cannot be read.
    """

    def __init__(self, prefix: str | Path, storage: ObjectStorage | None = None) -> None:
        if storage is None and is_url(str(prefix)):
            raise ConfigError(
                f"{prefix} is a URL, which only neobert train, validate and inspect data read, with "
                "--object-storage-cache-path; give that flag, or copy the corpus to a local disk"
            )
        self.prefix, self.storage = Path(prefix) if storage is None else str(prefix), storage
        self.is_remote = storage is not None
        if storage is None:
            self.files = corpus_files(prefix)
            self.manifest = _read_complete(self.files)
            pairs: Sequence[tuple[Path | RemoteFile, Path]] = self.files.shard_files(len(self.manifest.shards))
        else:
            self.files, self.manifest, pairs = storage.open_corpus(str(prefix))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = 2 * len(self.manifest.shards) + _SPARE_OPEN_FILES
        if soft != resource.RLIM_INFINITY and soft < needed:
            limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        self.shards = [MappedShard(*pair) for pair in pairs]
        for shard, recorded in zip(self.shards, self.manifest.shards, strict=True):
            shard.check_manifest(recorded, dtype=self.manifest.dtype, manifest=self.files.manifest)
        self.dtype = self.shards[0].dtype
        # Number of the first document of each shard, and of the first document after it.
        self._ends = np.cumsum([shard.lengths.size for shard in self.shards], dtype=np.int64)
        self._firsts = np.append(0, self._ends[:-1])
        self.allowed = AllowedIds(
            self.manifest.special_ids, unknown=self.manifest.special_tokens["unk"], vocab_size=self.manifest.vocab_size
        )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __reduce__(self) -> tuple[Any, ...]:
        # The process that unpickles a corpus opens and maps the files itself.
        return Corpus, (self.prefix, self.storage)

    def document(self, number: int) -> NDArray[Any]:
        """Return the token ids of one document as a read-only view. The ids are not checked."""
        (shard,), (begin,), (length,) = (column.tolist() for column in self._locate(np.array([number])))
        return np.frombuffer(self.shards[shard].content[begin : begin + length * self.dtype.itemsize], self.dtype)

    def gather(
        self, documents: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> NDArray[Any]:
        """Return the token ids of document segments, concatenated in a new array of the corpus's dtype.

        Segment i has lengths[i] tokens of documents[i], starting at token starts[i], and must be within the document.
        Raise DataError if the index is inconsistent for a document, or a segment contains an id that documents must not
        contain.
        """
        item = self.dtype.itemsize
        shards, document_begins, document_lengths = self._locate(documents)
        is_inside = (starts >= 0) & (lengths >= 0) & (starts + lengths <= document_lengths)
        assert is_inside.all(), f"segment {np.argmin(is_inside)} exceeds its document"
        begins = document_begins + starts * item
        # Without this, the slices below would fetch the remaining blocks one after another.
        self.prefetch(documents)
        bounds = zip(shards.tolist(), begins.tolist(), (begins + lengths * item).tolist(), strict=True)
        # One slice per segment is faster than one vectorised index over all tokens.
        slices = [self.shards[shard].content[begin:end] for shard, begin, end in bounds]
        ids = np.frombuffer(bytearray().join(slices), dtype=self.dtype)
        if (at := self.allowed.first_forbidden(ids)) is not None:
            ends = np.cumsum(lengths)
            segment = int(np.searchsorted(ends, at, side="right"))
            token = int(starts[segment] + at - ends[segment] + lengths[segment])
            raise DataError(
                f"{self.prefix}: token {token} of document {documents[segment]}: expected "
                f"{self.allowed.rule_for(ids[at])}, found {ids[at]}; {DAMAGED}"
            )
        return ids

    def lengths_of(self, documents: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the number of tokens of each document, at least 1.

        The lengths are looked up in the mapped indexes. A copy would take 40 GB per process for 10^10 documents.
        """
        _, _, lengths = self._locate(documents)
        return lengths

    def lengths_between(self, first: int, stop: int) -> NDArray[np.int32]:
        """Return the number of tokens of each document in [first, stop), a range of at least one document.

        The lengths are not checked, so this is much faster than `lengths_of`.
        """
        bounds = zip(self.shards, self._firsts.tolist(), self._ends.tolist(), strict=True)
        return np.concatenate(
            [
                shard.lengths[max(first - begin, 0) : stop - begin]
                for shard, begin, end in bounds
                if begin < stop and end > first
            ]
        )

    def prefetch(self, documents: NDArray[np.int64]) -> None:
        """Start fetching documents of a remote corpus in threads. Does nothing for a local corpus."""
        if self.is_remote:
            shards = np.searchsorted(self._ends, documents, side="right")
            for shard in np.unique(shards).tolist():
                self.shards[shard].prefetch(documents[shards == shard] - self._firsts[shard])

    @cached_property
    def attribute_files(self) -> list[Path]:
        """Local paths of all files of document attributes. Remote files are downloaded first."""
        files = self.files.attribute_files(self.manifest)
        for path, recorded in files:
            if self.storage is not None:
                self.storage.copy(f"{self.prefix}{path.name.removeprefix(self.files.manifest.stem)}", path, recorded)
            else:
                _compare_sha256(self.files, path, recorded.sha256, sha256_of(path))
        return [path for path, _ in files]

    def describe(self) -> dict[str, str]:
        """Return table rows about records, tokens and document lengths, as {label: formatted values}."""
        longest = max(int(shard.lengths.max()) for shard in self.shards)
        counts = np.zeros(longest + 1, dtype=np.int64)
        for first in range(0, len(self), _LENGTHS_STEP):
            lengths = self.lengths_between(first, min(first + _LENGTHS_STEP, len(self)))
            counts += np.bincount(lengths, minlength=longest + 1)
        ranks = [-(-percentage * len(self) // 100) for percentage in _PERCENTAGES]
        at_ranks = np.searchsorted(np.cumsum(counts), ranks)
        percentiles = ", ".join(f"{p} % {length:,}" for p, length in zip(_PERCENTAGES, at_ranks.tolist(), strict=True))
        mean, shortest = self.manifest.tokens / len(self), int(np.flatnonzero(counts)[0])
        rows = {"tokens/document": f"mean {mean:,.1f}, shortest {shortest:,}, {percentiles}, longest {longest:,}"}
        for limit in _TRUNCATION_LENGTHS:
            above = counts[limit + 1 :]
            dropped = percent(int(above @ np.arange(1, len(above) + 1)) / self.manifest.tokens)
            rows[f"over {limit:,} tokens"] = (
                f"{percent(int(above.sum()) / len(self))} of the documents; cutting them there drops {dropped} of all "
                "tokens"
            )
        return self.manifest.describe() | rows

    def check_tokenizer(self, tokenizer: "Tokenizer") -> None:
        """Raise DataError if the corpus was written with another tokenizer, or the manifest was edited."""
        manifest = self.manifest
        if tokenizer.fingerprint != manifest.tokenizer_fingerprint:
            raise DataError(
                f"{self.prefix} was written with tokenizer {manifest.tokenizer_fingerprint[:12]} "
                f"({manifest.vocab_size:,} ids), but --tokenizer-model is {tokenizer.fingerprint[:12]} "
                f"({tokenizer.vocab_size:,} ids); name the tokenizer of the corpus, or preprocess again with this one"
            )
        # The fingerprint covers these fields, so a difference means that the manifest was changed.
        for name in ("vocab_size", "special_tokens", "special_ids"):
            found, expected = getattr(manifest, name), getattr(tokenizer, name)
            if found != (list(expected) if name == "special_ids" else expected):
                raise DataError(
                    f"{self.files.manifest}: expected {name} {expected} of tokenizer {tokenizer.fingerprint[:12]}, "
                    f"found {found}; {DAMAGED}"
                )

    def _locate(self, documents: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
        """Return the corpus shard of each document, its byte offset in the shard's .bin, and its length in tokens.

        Raise IndexError for a number out of range, and DataError if the index is damaged.
        """
        if documents.size and not 0 <= documents.min() <= documents.max() < len(self):
            raise IndexError(f"documents {documents.min()} to {documents.max()} of {len(self)}")
        # A faster path for the usual corpus.
        if len(self.shards) == 1:
            return np.zeros_like(documents), *self.shards[0].locate(documents)
        shards = np.searchsorted(self._ends, documents, side="right")
        begins, lengths = np.empty(documents.size, np.int64), np.empty(documents.size, np.int32)
        for shard in np.unique(shards).tolist():
            in_shard = shards == shard
            begins[in_shard], lengths[in_shard] = self.shards[shard].locate(documents[in_shard] - self._firsts[shard])
        return shards, begins, lengths


def open_corpus(prefix: str, *, cache: str | None) -> Corpus:
    """Open a local corpus, or a remote corpus through the cache folder `cache`. See `Corpus` for errors."""
    return Corpus(prefix, ObjectStorage(Path(cache)) if cache and is_url(prefix) else None)


def check_indexes(corpus: Corpus) -> None:
    """Read all indexes; raise DataError with the file and the byte offset if an entry is wrong."""
    for shard in corpus.shards:
        shard.check_index(shard.pointers_and_boundaries)


def check_content(corpus: Corpus) -> None:
    """Read all files of a corpus, with a progress bar.

    Raise DataError if an index entry, a token id or a checksum is wrong, and StorageError if a remote read fails.
    """
    check_indexes(corpus)
    # Reading this property compares the checksums.
    _ = corpus.attribute_files
    shards = list(zip(corpus.shards, corpus.manifest.shards, strict=True))
    for shard, recorded in progress_bar(iterable=shards, desc="corpus shards", unit="shard"):
        _compare_sha256(corpus.files, shard.bin, recorded.bin.sha256, corpus.allowed.scan(shard))
        _compare_sha256(corpus.files, shard.idx, recorded.idx.sha256, sha256_of(shard.idx))


def _compare_sha256(files: CorpusFiles, path: Path | RemoteFile, expected: str, found: str) -> None:
    if found != expected:
        raise damage_error(path, 0, f"sha256 {expected} as in {files.manifest.name}", found)


def _read_complete(files: CorpusFiles) -> Manifest:
    """Read a manifest. Raise MissingInputError if no corpus file exists, DataError if some are missing or damaged."""
    prefix = files.manifest.with_suffix("")
    if files.manifest.is_file():
        manifest = read_manifest(files.manifest)
        attributes = files.attribute_files(manifest)
        pairs = files.shard_files(len(manifest.shards))
        missing = [path for path in (*sum(pairs, ()), *(path for path, _ in attributes)) if not path.is_file()]
    elif files.existing_files():
        missing = [files.manifest]
    else:
        name = prefix.stem if prefix.suffix in (".bin", ".idx", ".json") else prefix.name
        # In Megatron-LM, too, a name ends in the key of the text, but often in another one.
        output_prefix = glob.escape(re.sub(r"(_[^_]+)?_document$", "", name))
        similar = [path for path in [prefix.with_name(f"{name}.json")] if path.is_file()]
        similar = similar or sorted(prefix.parent.glob(f"{output_prefix}_*_document.json"))
        raise MissingInputError(
            f"no corpus {prefix}: expected {files.bin.name}, {files.idx.name}, {files.manifest.name}; "
            + (
                f"did you mean {listed(str(path.with_suffix('')) for path in similar)}?"
                if similar
                else "give the prefix that neobert preprocess printed, without .bin"
            )
        )
    if missing:
        adopt = f"If Megatron-LM wrote it, run neobert adopt {prefix} --tokenizer-model TOKENIZER. Otherwise copy"
        may_be_megatrons = missing == [files.manifest] and not files.partial.exists()
        raise DataError(
            f"{prefix}: {listed(path.name for path in missing)} missing: the corpus is unfinished or its copy is "
            f"incomplete. {adopt if may_be_megatrons else 'Copy'} again, or preprocess again with --overwrite"
        )
    for path, recorded in attributes:
        if (size := path.stat().st_size) != recorded.bytes:
            rule = f"{recorded.bytes} bytes as in {files.manifest.name}"
            raise damage_error(path, 0, rule, f"a file of {size} bytes")
    return manifest
