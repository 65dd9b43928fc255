"""What a run knows of its parts: the task, what became of it and of its records, and how that is kept for a restart.

The record KEY.done is written last, when a part's other files are on disk; a part without it is done again from its
beginning, and so is one whose shard has changed. Small parts do not wait for the disk, since that costs more than they
do: their record has a checksum instead, by which a part that a crash of the machine has damaged is found and redone.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from megatron_neobert import __version__
from megatron_neobert.data.corpus.format import describe_reasons
from megatron_neobert.data.shards.find import ShardVersion
from megatron_neobert.data.shards.records import ReadSettings, ShardPart
from megatron_neobert.errors import DataError

Kind = Literal["ids", "lengths", "hashes", "rejects"]
_UNSYNCED_BYTES = 4 << 20  # of a part's files; of 0.15 s of work. Five waits for the disk cost 5 ms


@dataclass
class Counts:
    """What became of the records read so far: records = documents + rejected + dropped."""

    documents: int = 0
    tokens: int = 0
    unknown_tokens: int = 0
    repaired_documents: int = 0
    utf8_bytes: int = 0  # of the texts that were tokenised
    rejected: Counter[str] = field(default_factory=Counter)  # records by reason: errors
    dropped: Counter[str] = field(default_factory=Counter)  # records by the name of the filter

    def add(self, other: "Counts") -> None:
        self.documents += other.documents
        self.tokens += other.tokens
        self.unknown_tokens += other.unknown_tokens
        self.repaired_documents += other.repaired_documents
        self.utf8_bytes += other.utf8_bytes
        self.rejected.update(other.rejected)
        self.dropped.update(other.dropped)

    @property
    def errors(self) -> int:
        return self.rejected.total()

    @property
    def records(self) -> int:
        return self.documents + self.errors + self.dropped.total()


def check_error_rate(counts: Counts, max_error_rate: float, first_error: str | None) -> None:
    """Raises DataError where more of the records are in error than may be.

    Args:
        first_error: An example: the record's place and what is wrong with it.
    """
    if counts.errors > max_error_rate * counts.records:
        raise too_many_errors(counts, max_error_rate, first_error)


def too_many_errors(counts: Counts, max_error_rate: float, first_error: str | None) -> DataError:
    return DataError(
        f"{counts.errors:,} of {counts.records:,} records have no usable text "
        f"({counts.errors / counts.records:.2%}), more than --max-error-rate {max_error_rate} allows "
        f"({describe_reasons(counts.rejected)}); for example: {first_error}. "
        "Fix the shards, check --text-key, or allow more"
    )


def error_record(first_error: str) -> DataError:
    """What ends a run that is to fail on errors."""
    return DataError(f"{first_error}; correct the record, or leave such records out with --on-error skip")


@dataclass(frozen=True)
class TaskSettings:
    """What is the same for all parts of a run."""

    read: ReadSettings
    tokenizer_model: str
    tokenizer_type: str
    fingerprint: str  # of the tokenizer that the run has planned with
    backend: Literal["auto", "fast", "reference"]
    min_tokens: int
    max_tokens: int | None
    with_hashes: bool
    on_error: Literal["skip", "fail"]
    folder: Path

    @property
    def decisive(self) -> dict[str, Any]:
        """Those that decide the content of a part's files."""
        return {
            "tokenizer": self.fingerprint,
            **asdict(self.read),
            "min_tokens": self.min_tokens,
            "max_tokens": self.max_tokens,
            "deduplicate or split_validation": self.with_hashes,
            "version": __version__,
        }


@dataclass(frozen=True)
class PartTask:
    """One part of a shard, and all that a worker must know to tokenise it."""

    number: int
    part: ShardPart
    shard: ShardVersion
    shard_name: str  # for people: "-" for standard input, else the part's path
    starts_shard: bool
    settings: TaskSettings

    def __str__(self) -> str:
        return self.shard_name

    @cached_property
    def key(self) -> str:
        """Name of the part's files: the same in a run that reads other shards as well."""
        return hashlib.blake2b(json.dumps(asdict(self.part)).encode(), digest_size=12).hexdigest()

    @property
    def kinds(self) -> list[Kind]:
        return [kind for kind in get_args(Kind) if kind != "hashes" or self.settings.with_hashes]

    def file(self, kind: Kind) -> Path:
        return self.settings.folder / f"{self.key}.{kind}"

    @property
    def record(self) -> Path:
        """Present when the part is finished."""
        return self.settings.folder / f"{self.key}.done"

    @property
    def damage_record(self) -> Path:
        """Present when the part could not be read: what a merge knows of it."""
        return self.settings.folder / f"{self.key}.damaged"


@dataclass(frozen=True)
class PartResult:
    """A finished part; its ids, lengths, hashes and rejects wait in the task's files."""

    number: int  # of the part in this run
    shard: ShardVersion
    counts: Counts
    ids_sha256: str
    file_bytes: dict[str, int]  # by kind
    shard_sha256: str | None  # of the whole shard, with its first part; None for URLs too
    numbers: int  # record numbers used up
    encoder: str
    is_reference: bool
    compared: int  # documents whose ids a fast back end had to have in common with the reference
    mismatch: str | None  # why a fast back end was given up
    first_error: str | None
    files_sha256: str | None  # of all files one after the other; None: they are on disk for certain


@dataclass(frozen=True)
class PartDamage:
    """A part that cannot be read to its end."""

    number: int  # of the part in this run
    shard: ShardVersion
    reason: str


@dataclass(frozen=True)
class PartProgress:
    """How far a part has come, from its beginning."""

    number: int
    counts: Counts
    fraction: float
    first_error: str | None


def read_damage(task: PartTask) -> PartDamage | None:
    """What an earlier run has found wrong with a part, unless its shard has changed since."""
    content = _read_record(task.damage_record)
    return (
        PartDamage(**{**content, "number": task.number, "shard": task.shard})
        if (content and ShardVersion(*content["shard"]) == task.shard)
        else None
    )


def _read_record(path: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):  # ValueError: it was not yet on disk when the machine crashed
        return None
    return content


def read_result(task: PartTask) -> PartResult | None:
    """The result of a part that an earlier run has finished; None where it must be done, or done again."""
    content = _read_record(task.record)
    if content is None:
        return None
    counts = {**content["counts"]}
    counts |= {name: Counter(counts[name]) for name in ("rejected", "dropped")}
    result = PartResult(
        **{**content, "number": task.number, "counts": Counts(**counts), "shard": ShardVersion(*content["shard"])}
    )
    files = {str(kind): task.file(kind) for kind in task.kinds if task.file(kind).exists()}
    sizes = {kind: file.stat().st_size for kind, file in files.items()}
    if (result.shard, result.file_bytes) != (task.shard, sizes):
        return None
    return result if result.files_sha256 in (None, files_sha256(files)) else None


def files_sha256(files: Mapping[str, Path]) -> str | None:
    """None of what is so large that it waits for the disk instead."""
    if sum(file.stat().st_size for file in files.values()) > _UNSYNCED_BYTES:
        return None
    return hashlib.sha256(b"".join(file.read_bytes() for file in files.values())).hexdigest()
