"""Names of the files of a corpus, and its manifest, which msgspec validates.

A corpus has one or more corpus shards, each a pair of .bin and .idx in Megatron's format.
A single shard is PREFIX.bin and PREFIX.idx; several shards are PREFIX_00000.bin, PREFIX_00000.idx and so on. The
manifest is PREFIX.json. It is written last, so a corpus without a manifest is unfinished. Each document is one sequence
of the index: not truncated, and without special tokens.
"""

import glob
import hashlib
import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from megatron_neobert.errors import DataError
from megatron_neobert.runtime.atomic_files import read_text, replace_file
from megatron_neobert.runtime.new_file import FileRecord
from megatron_neobert.text import parse_json, percent

FORMAT_VERSION = 1
# Dtypes of token ids by their code in the .idx.
DTYPES: dict[int, np.dtype[Any]] = {8: np.dtype("<u2"), 4: np.dtype("<i4")}
Count = Annotated[int, msgspec.Meta(ge=0)]
DAMAGED = "the file is damaged or belongs to another corpus; copy it again or preprocess again"
# An input file takes about 150 bytes, so this is enough for 7 million of them.
_LARGEST_MANIFEST_BYTES = 1 << 30
NO_TOKENS = "no tokens"  # key of Manifest.dropped: texts that tokenize to nothing (control characters only)
_MOST_REASONS = 1000  # reasons of dropped records that are counted one by one
OTHER_REASONS = "other reasons of filters"  # key of Counts.dropped for the records with other reasons


class CorpusFiles(NamedTuple):
    """Paths of the files of a corpus."""

    bin: Path  # only if the corpus has a single shard; otherwise see `shard_files`
    idx: Path
    manifest: Path
    rejects: Path
    partial: Path  # folder of an unfinished run
    attributes: Path  # exists only if preprocessing kept attributes; see `attribute_files`

    def shard_files(self, shards: int) -> list[tuple[Path, Path]]:
        """Return the .bin and .idx paths of each corpus shard, for a corpus with `shards` shards."""
        return [(self.bin, self.idx)] if shards == 1 else list(map(self.numbered_shard, range(shards)))

    def numbered_shard(self, number: int) -> tuple[Path, Path]:
        """Return the .bin and .idx paths of corpus shard `number`, for a corpus with several shards."""
        name = f"{self.manifest.stem}_{number:05d}"
        return self.bin.with_name(f"{name}.bin"), self.bin.with_name(f"{name}.idx")

    def attribute_files(self, manifest: "Manifest") -> list[tuple[Path, FileRecord]]:
        """Return (path, record) for each file of document attributes that the manifest lists."""
        added = [(self.added_attributes(n), file) for n, file in enumerate(manifest.added_attributes.values())]
        return added if manifest.attributes is None else [(self.attributes, manifest.attributes), *added]

    def added_attributes(self, number: int) -> Path:
        """Return the path of file `number` (from 0) among the attribute files added to the finished corpus."""
        return self.attributes.with_name(f"{self.manifest.stem}.attributes_{number:05d}.parquet")

    def existing_files(self) -> list[Path]:
        """Return the existing .bin, .idx and attributes files of the corpus with this prefix, without the manifest.

        A readable manifest gives the number of shards. Otherwise, shards are counted from 0 up to the first number
        without files, or with a manifest PREFIX_NUMBER.json, which belongs to another corpus.
        """
        try:
            pairs = self.shard_files(len(read_manifest(self.manifest).shards))
        except (OSError, ValueError, DataError):
            pairs = [(self.bin, self.idx)]
            for pair in map(self.numbered_shard, count()):
                if pair[0].with_suffix(".json").exists() or not any(file.exists() for file in pair):
                    break
                pairs.append(pair)
        added = self.attributes.parent.glob(f"{glob.escape(self.manifest.stem)}.attributes_*.parquet")
        return [file for file in (*sum(pairs, ()), self.attributes, *sorted(added)) if file.exists()]


def corpus_files(prefix: str | Path) -> CorpusFiles:
    """Return the paths of the files of the corpus with this prefix."""
    suffixes = ("bin", "idx", "json", "rejects.jsonl", "partial", "attributes.parquet")
    return CorpusFiles(*(Path(f"{prefix}.{suffix}") for suffix in suffixes))


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return uint16 for vocabularies below 65,500 ids, otherwise int32, as Megatron's preprocessing does."""
    return DTYPES[8 if vocab_size < 65500 else 4]


@dataclass
class Counts:
    """Numbers of records and tokens: records = documents + rejected + dropped."""

    documents: int = 0
    tokens: int = 0
    unknown_tokens: int = 0
    utf8_bytes: int = 0  # size of the texts of the documents
    sampled_characters: int = 0  # in a sample of the documents, see Encoder
    unknown_characters: int = 0  # characters of the sample that unknown tokens replace
    rejected: dict[str, int] = field(default_factory=dict)  # records in error, by reason
    dropped: dict[str, int] = field(default_factory=dict)  # records dropped without an error, by reason

    def add(self, counts: "Counts") -> None:
        """Add `counts`. After 1,000 different reasons, records with new reasons of filters count as OTHER_REASONS.

        The limit is needed because a filter may give each record a different reason, such as a formatted score.
        """
        for name, value in vars(counts).items():
            if isinstance(value, int):
                setattr(self, name, getattr(self, name) + value)
        for by_reason, added in ((self.rejected, counts.rejected), (self.dropped, counts.dropped)):
            for reason, records in added.items():
                # A filter's reason follows its label and ": ", which the fixed reasons lack.
                if reason not in by_reason and len(by_reason) >= _MOST_REASONS and ": " in reason:
                    reason = OTHER_REASONS
                by_reason[reason] = by_reason.get(reason, 0) + records

    @property
    def errors(self) -> int:
        return sum(self.rejected.values())

    @property
    def records(self) -> int:
        return self.documents + self.errors + sum(self.dropped.values())


class InputRecord(msgspec.Struct, frozen=True):
    """An input file at the time when it was read, and its documents in this corpus."""

    bytes: Count
    sha256: str | None  # None for a URL
    documents: Count = 0  # these documents are consecutive in the corpus
    tokens: Count = 0


class QuarantinedInput(msgspec.Struct, frozen=True):
    """A damaged input file that --quarantine left out."""

    bytes: Count
    reason: str


class BackendRecord(msgspec.Struct, frozen=True):
    """Number of documents that one tokenizer back end tokenized."""

    documents: Count
    compared: Count  # documents whose ids were compared with the reference's; 0 for the reference itself


class CorpusShard(msgspec.Struct, frozen=True):
    """One .bin/.idx pair, which contains consecutive documents of the corpus."""

    documents: Annotated[int, msgspec.Meta(ge=1)]
    tokens: Annotated[int, msgspec.Meta(ge=1)]
    bin: FileRecord
    idx: FileRecord


class Manifest(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Content of PREFIX.json: all facts about a corpus besides its token ids and document lengths."""

    format_version: Count
    project_version: str
    inputs: dict[str, InputRecord]  # by path or URL, in the order in which they were read
    text_key: str
    tokenizer_fingerprint: str
    vocab_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]  # ids are stored as int32 or smaller
    special_tokens: dict[str, Count]  # by role: "cls", "sep", "pad", "mask", "unk"
    special_ids: list[Count]
    dtype: str
    filters: dict[str, str | Count | float | None]  # settings that decide which documents are kept
    records: Count  # equals documents + sum(rejected) + sum(dropped)
    documents: Count
    tokens: Count
    unknown_tokens: Count
    rejected: dict[str, Count]  # number of records by error
    dropped: dict[str, Count]  # records by the filter that dropped them, or by the reason, such as NO_TOKENS
    shards: Annotated[list[CorpusShard], msgspec.Meta(min_length=1)]
    bytes_per_token: float | None = None  # UTF-8 bytes of text per token; None in corpora of other software
    tokenizer_backends: dict[str, BackendRecord] = {}  # by name and version of the back end
    quarantined: dict[str, QuarantinedInput] = {}  # by path or URL; these files are not among the inputs
    attributes: FileRecord | None = None  # PREFIX.attributes.parquet; None if there is only length and input
    added_attributes: dict[str, FileRecord] = {}  # PREFIX.attributes_00000.parquet ..., by what computed them

    @cached_property
    def documents_sha256(self) -> str:
        """SHA-256 over the checksums of all .bin and .idx files. All copies of a corpus have the same value."""
        hashes = [f"{shard.bin.sha256} {shard.idx.sha256}\n" for shard in self.shards]
        return hashlib.sha256("".join(hashes).encode()).hexdigest()

    def describe(self) -> dict[str, str]:
        """Return table rows about records, documents and tokens, as {label: formatted values}."""
        return {
            "records": f"{self.records:,}",
            "documents": f"{self.documents:,}",
            "rejected": describe_reasons(self.rejected),
            "dropped": describe_reasons(self.dropped),
            "quarantined": f"{len(self.quarantined):,} damaged input files left out",
            "tokens": f"{self.tokens:,}, {percent(self.unknown_tokens / self.tokens, digits=3)} of them unknown"
            + ("" if self.bytes_per_token is None else f", {self.bytes_per_token:.2f} bytes of text each"),
            "tokenized by": ", ".join(
                name + (f" ({backend.compared:,} documents compared with the reference)" if backend.compared else "")
                for name, backend in self.tokenizer_backends.items()
            )
            or "another program",
        }


def describe_reasons(reasons: Mapping[str, int]) -> str:
    """Format counts by reason as "12 malformed JSON, 3 null text", the most frequent first; "none" if empty."""
    ranked = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count:,} {reason}" for reason, count in ranked) or "none"


def read_manifest(path: Path) -> Manifest:
    """Read a manifest. Raise DataError if the file is not a manifest of this format version or contradicts itself."""
    if (size := path.stat().st_size) > _LARGEST_MANIFEST_BYTES:
        raise DataError(f"{path}: {size:,} bytes are more than a manifest has; {DAMAGED}")
    try:
        content = parse_json(read_text(path))
    except ValueError as error:
        raise DataError(f"{path}: not a manifest ({error}); {DAMAGED}") from error
    version = content.get("format_version") if isinstance(content, dict) else None
    if version != FORMAT_VERSION:
        raise DataError(
            f"{path}: expected format_version {FORMAT_VERSION}, found {reprlib.repr(version)}; preprocess again"
        )
    try:
        manifest = msgspec.convert(content, Manifest)
    except msgspec.ValidationError as error:
        raise DataError(f"{path}: {error}; {DAMAGED}") from error
    special = {*manifest.special_ids, *manifest.special_tokens.values()}
    problems = []
    if "unk" not in manifest.special_tokens:
        problems.append(f"special_tokens has no unk, but only {', '.join(manifest.special_tokens) or 'nothing'}")
    if not all(id_ < manifest.vocab_size for id_ in special):
        problems.append(f"special ids {sorted(special)[:10]} are not all below vocab_size {manifest.vocab_size}")
    records = [manifest.documents, *manifest.rejected.values(), *manifest.dropped.values()]
    sums = [("records", "documents, rejected and dropped", records)]
    for name in ("documents", "tokens"):
        for parts, entries in (("shards", manifest.shards), ("inputs", manifest.inputs.values())):
            sums.append((name, parts, [getattr(entry, name) for entry in entries]))
    for name, parts, counts in sums:
        found = getattr(manifest, name)
        if counts and sum(counts) != found:
            problems.append(f"expected {name} {sum(counts)}, the sum over its {parts}, found {found}")
    if problems:
        raise DataError(f"{path}: {problems[0]}; {DAMAGED}")
    return manifest


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write a manifest as JSON, replacing an existing file atomically."""
    content = msgspec.to_builtins(manifest)
    if manifest.attributes is None:
        del content["attributes"]
    if not manifest.added_attributes:
        del content["added_attributes"]
    # Written as ASCII: a path that is not valid UTF-8 has surrogates (\udcXX), which JSON can only escape.
    replace_file(path, json.dumps(content, indent=1) + "\n")
