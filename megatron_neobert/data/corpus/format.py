"""Files of a corpus, and its manifest, whose types msgspec checks.

A corpus is one or more corpus shards ("volumes" in names and in the manifest), each a pair of Megatron's .bin and .idx.
One is PREFIX.bin and PREFIX.idx, several are PREFIX_00000.bin and so on; the manifest is PREFIX.json. A document
is one sequence, whole, without special tokens. The manifest is written last, so its absence marks an unfinished corpus.
"""

import hashlib
import json
import reprlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from megatron_neobert import __version__
from megatron_neobert.errors import DataError
from megatron_neobert.runtime.atomic_files import read_text, replace_file
from megatron_neobert.runtime.new_file import FileRecord
from megatron_neobert.text import parse_json, percent

if TYPE_CHECKING:
    from megatron_neobert.data.tokenizer.tokenizer import Tokenizer

FORMAT_VERSION = 2  # of the manifest; any other is refused
DTYPES: dict[int, np.dtype[Any]] = {8: np.dtype("<u2"), 4: np.dtype("<i4")}
Count = Annotated[int, msgspec.Meta(ge=0)]  # counts, sizes and ids
DAMAGED = "the file is damaged or not of this corpus: copy it again or preprocess again"
_LARGEST_MANIFEST_BYTES = 1 << 30  # 150 bytes for each of the shards
PERCENTS = (5, 25, 50, 75, 95, 99)
CUTS = (1024, 2048)  # tokens: the sequence lengths that NeoBERT was trained with
NO_TOKENS = "no tokens"  # in Manifest.dropped: a text of control characters only
DUPLICATE = "duplicate"  # in Manifest.dropped: the text of an earlier document once more


class CorpusFiles(NamedTuple):
    """Paths of the files of a corpus; `partial` is the folder of a run that has not finished.

    bin and idx are those of a corpus of one corpus shard.
    """

    bin: Path
    idx: Path
    manifest: Path
    rejects: Path
    partial: Path
    attributes: Path  # a row for each document, if the corpus keeps attributes

    @property
    def name(self) -> str:
        """Last part of the prefix; every file name begins with it."""
        return self.manifest.name.removesuffix(".json")

    def volume_files(self, volumes: int) -> list[tuple[Path, Path]]:
        """Return the .bin and the .idx of each corpus shard of a corpus that has so many."""
        return [(self.bin, self.idx)] if volumes == 1 else list(map(self.numbered, range(volumes)))

    def numbered(self, number: int) -> tuple[Path, Path]:
        """Return the .bin and the .idx of a corpus shard of several."""
        name = f"{self.name}_{number:05d}"
        return self.bin.with_name(f"{name}.bin"), self.bin.with_name(f"{name}.idx")

    def existing(self) -> list[Path]:
        """Return the files of a corpus of this name, besides manifest and rejects.

        PREFIX_00012.bin is among them if the manifest names so many corpus shards or, without a manifest, if all lower
        numbers exist and PREFIX_00012 is no corpus of its own.
        """
        try:
            volumes = len(read_manifest(self.manifest).volumes)
            pairs = [*self.volume_files(volumes)]
        except (OSError, ValueError, DataError):
            pairs = [(self.bin, self.idx)]
            for pair in map(self.numbered, count()):
                if pair[0].with_suffix(".json").exists() or not any(file.exists() for file in pair):
                    break
                pairs.append(pair)
        return [file for file in (*sum(pairs, ()), self.attributes) if file.exists()]


def corpus_files(prefix: str | Path) -> CorpusFiles:
    ends = ("bin", "idx", "json", "rejects.jsonl", "partial", "attributes.parquet")
    return CorpusFiles(*(Path(f"{prefix}.{end}") for end in ends))


def validation_files(files: CorpusFiles) -> CorpusFiles:
    """Return the files of the corpus that --split-validation puts beside the one for training."""
    return corpus_files(files.manifest.with_name(f"{files.name}_validation"))


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return uint16 below 65,500 ids, else int32: the rule that Megatron's own preprocessing follows."""
    return DTYPES[8 if vocab_size < 65500 else 4]


class Statistics(msgspec.Struct, frozen=True):
    """Lengths of documents in tokens, without special tokens."""

    mean: float
    shortest: Count
    percentiles: dict[str, Count]  # by percent: the smallest length that so many percent of the documents do not exceed
    longest: Count
    documents_above: dict[str, float]  # by cut: share of the documents that are longer
    tokens_above: dict[str, float]  # by cut: share of all tokens that would be truncated

    def describe(self) -> dict[str, str]:
        """Return rows of a table: name and value."""
        ranks = ", ".join(f"{rank} % {length:,}" for rank, length in self.percentiles.items())
        lengths = f"mean {self.mean:,.1f}, shortest {self.shortest:,}, {ranks}, longest {self.longest:,}"
        rows = {"tokens/document": lengths}
        for (cut, documents), tokens in zip(self.documents_above.items(), self.tokens_above.values(), strict=False):
            rows[f"over {cut} tokens"] = (
                f"{percent(documents)} of the documents; beyond it {percent(tokens)} of the tokens"
            )
        return rows


def length_statistics(documents_of: Mapping[int, int]) -> Statistics:
    """Return the statistics of at least one document, from the number of documents of each length."""
    lengths, counts = (np.array(column) for column in zip(*sorted(documents_of.items()), strict=True))
    documents, tokens, not_longer = int(counts.sum()), int(lengths @ counts), np.cumsum(counts)
    longest_of = {percent: np.searchsorted(not_longer, -(-percent * documents // 100)) for percent in PERCENTS}
    return Statistics(
        mean=round(tokens / documents, 2),
        shortest=int(lengths[0]),
        percentiles={str(percent): int(lengths[place]) for percent, place in longest_of.items()},
        longest=int(lengths[-1]),
        documents_above={str(cut): round(int(counts[lengths > cut].sum()) / documents, 6) for cut in CUTS},
        tokens_above={str(cut): round(int(np.maximum(lengths - cut, 0) @ counts) / tokens, 6) for cut in CUTS},
    )


def count_lengths(lengths: NDArray[np.int32]) -> dict[int, int]:
    """Return the number of documents of each length that occurs."""
    found, counts = np.unique(lengths, return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))


class InputRecord(msgspec.Struct, frozen=True):
    """An input file as it was when it was read."""

    bytes: Count
    sha256: str | None  # of all its bytes; None: a table, or a file of several chunks at a URL, of which none reads all
    documents: Count = 0  # of it in this corpus, one after the other
    tokens: Count = 0  # in them


class QuarantinedShard(msgspec.Struct, frozen=True):
    """An input file that --quarantine has left out."""

    bytes: Count
    reason: str


class BackendRecord(msgspec.Struct, frozen=True):
    """Documents that one tokenizer back end has tokenized."""

    documents: Count
    compared: Count  # of them with the reference tokenizer, id by id; 0 of the reference itself


class Volume(msgspec.Struct, frozen=True):
    """Consecutive documents of a corpus in one pair of files."""

    documents: Count
    tokens: Count
    bin: FileRecord
    idx: FileRecord


class Manifest(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Everything about a corpus that its .bin and .idx do not hold.

    records, repaired_documents, rejected and dropped are of all that was read; where a part of the documents is held
    out for validation, both corpora have the same.
    """

    format_version: Count
    project_version: str
    inputs: dict[str, InputRecord]  # by path or URL, in the order read
    text_key: str
    tokenizer_fingerprint: str
    vocab_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]  # int32 numbers the ids
    special_tokens: dict[str, Count]  # by role: "cls", "sep", "pad", "mask", "unk"
    special_ids: list[Count]
    dtype: str
    part_of: Literal["all", "training", "validation"]
    filters: dict[str, str | Count | float | None]  # by setting
    records: Count  # = documents + held_out + those rejected + those dropped
    documents: Count
    held_out: Count  # documents in the other corpus of a split
    tokens: Count
    unknown_tokens: Count
    repaired_documents: Count  # with U+FFFD in place of invalid UTF-8 or lone surrogates
    rejected: dict[str, Count]  # records by reason: errors
    dropped: dict[str, Count]  # records by the name of a filter
    statistics: Statistics
    volumes: Annotated[list[Volume], msgspec.Meta(min_length=1)]
    tokenizer_backends: dict[str, BackendRecord] = {}  # by name and version
    quarantined: dict[str, QuarantinedShard] = {}  # by path or URL; not among the inputs
    attributes: FileRecord | None = None  # PREFIX.attributes.parquet; None: no attribute besides length and input

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the .bin, or over those of all corpus shards."""
        hashes = [volume.bin.sha256 for volume in self.volumes]
        return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()

    @cached_property
    def documents_sha256(self) -> str:
        """SHA-256 over token ids and document boundaries: equal for copies of a corpus, and for no other corpus."""
        hashes = [f"{volume.bin.sha256} {volume.idx.sha256}\n" for volume in self.volumes]
        return hashlib.sha256("".join(hashes).encode()).hexdigest()

    def describe(self) -> dict[str, str]:
        """Return rows of a table: name and value."""
        return {
            "records": f"{self.records:,}",
            "documents": f"{self.documents:,}"
            + ("" if self.part_of == "all" else f" for {self.part_of}, {self.held_out:,} in the other corpus"),
            "rejected": describe_reasons(self.rejected),
            "dropped": describe_reasons(self.dropped),
            "quarantined": f"{len(self.quarantined):,} damaged shards left out",
            "repaired": f"{self.repaired_documents:,} with U+FFFD for invalid text",
            "tokens": f"{self.tokens:,}, {percent(self.unknown_tokens / self.tokens, digits=3)} of them unknown",
            **self.statistics.describe(),
            "tokenized by": ", ".join(
                f"{name} ({backend.documents:,} documents, {backend.compared:,} compared with the reference)"
                for name, backend in self.tokenizer_backends.items()
            ),
        }


def describe_reasons(reasons: Mapping[str, int]) -> str:
    """Format counts as "12 malformed JSON, 3 null text", the most frequent first; "none" if there are none."""
    ranked = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count:,} {reason}" for reason, count in ranked) or "none"


def reject_line(entry: dict[str, Any]) -> bytes:
    """Encode an entry as a line of JSON; lone surrogates (of file names, of keys) become JSON's escapes."""
    return json.dumps(entry, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


def read_manifest(path: Path) -> Manifest:
    """Read a manifest. Raise DataError if the file is not one of this version, or contradicts itself."""
    if (size := path.stat().st_size) > _LARGEST_MANIFEST_BYTES:
        raise DataError(f"{path}: {size:,} bytes are more than a manifest has; {DAMAGED}")
    try:
        content = parse_json(read_text(path))
    except ValueError as error:
        raise DataError(f"{path}: not a manifest ({error}); {DAMAGED}") from error
    version = content.get("format_version") if isinstance(content, dict) else None
    if version != FORMAT_VERSION:
        found = reprlib.repr(version)
        raise DataError(f"{path}: expected format_version {FORMAT_VERSION}, found {found}; preprocess again")
    if content.get("eod_id") is not None:
        raise DataError(
            f"{path}: its .bin has end-of-document tokens, which are not read any more; remove "
            f"{path.with_suffix('')}.* and run neobert adopt again"
        )
    try:
        manifest = msgspec.convert(content, Manifest)
    except msgspec.ValidationError as error:
        raise DataError(f"{path}: {error}; {DAMAGED}") from error
    for problem in find_contradictions(manifest):
        raise DataError(f"{path}: {problem}; {DAMAGED}")
    return manifest


def draft_manifest(tokenizer: "Tokenizer", **facts: Any) -> Manifest:
    """Return a manifest with these fields and the tokenizer's; `write_corpus` adds what follows from the documents."""
    return Manifest(
        format_version=FORMAT_VERSION,
        project_version=__version__,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        special_tokens=tokenizer.special_tokens,
        special_ids=list(tokenizer.special_ids),
        dtype=token_dtype(tokenizer.vocab_size).name,
        part_of="all",
        documents=0,
        held_out=0,
        tokens=0,
        unknown_tokens=0,
        statistics=Statistics(0.0, 0, {}, 0, {}, {}),
        volumes=[],
        **facts,
    )


def write_manifest(path: Path, manifest: Manifest) -> None:
    content = msgspec.to_builtins(manifest)
    if manifest.attributes is None:
        del content["attributes"]
    # ASCII, for the names of shards need not be valid UTF-8: what Python makes of other bytes survives as \udcXX.
    replace_file(path, json.dumps(content, indent=1) + "\n")


def find_contradictions(manifest: Manifest) -> Iterator[str]:
    """Yield what is wrong with the manifest by itself, one clause each."""
    special = {*manifest.special_ids, *manifest.special_tokens.values()}
    if "unk" not in manifest.special_tokens or not all(id_ < manifest.vocab_size for id_ in special):
        yield f"special ids {sorted(special)[:10]} are not all below vocab_size {manifest.vocab_size}"
    records = [manifest.documents, manifest.held_out, *manifest.rejected.values(), *manifest.dropped.values()]
    sums = [("records", "documents, held out, rejected and dropped", records)]
    for name in ("documents", "tokens"):
        for parts, pieces in (("volumes", manifest.volumes), ("inputs", manifest.inputs.values())):
            sums.append((name, parts, [getattr(piece, name) for piece in pieces]))
    for name, parts, counts in sums:
        if counts and sum(counts) != (found := getattr(manifest, name)):
            yield f"expected {name} {sum(counts)}, the sum over its {parts}, found {found}"
