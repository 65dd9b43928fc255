"""What a run knows of its parts, and PREFIX.partial, where finished ones wait for a restart and for the join.

The record KEY.done is written last, when a part's other files are complete; a part without it is done again from its
beginning, and so is one whose shard has changed. Nothing waits for the disk, which would cost small parts more than
their work: the record has the checksum of each file, by which what a crash of the machine has damaged is found.

A run takes over the parts of an earlier one only where they would come out the same: job.json has the settings that
decide their bytes, and each part's own record names the range of which version of a shard it holds. So shards may be
added, repaired and left out between two runs. Several tasks of one array share the folder, each with its own parts.
"""

import fcntl
import glob
import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Literal, get_args

from megatron_neobert import __version__
from megatron_neobert.data.corpus.format import describe_reasons
from megatron_neobert.data.inputs.find import InputVersion, input_label
from megatron_neobert.data.inputs.records import FILTER_FAILED, ReadSettings
from megatron_neobert.data.inputs.stream import Chunk
from megatron_neobert.data.preprocessing.filters import FilterSource
from megatron_neobert.errors import ConfigError, DataError, OutputError
from megatron_neobert.runtime.atomic_files import lock_if_possible, replace_file, sha256_of
from megatron_neobert.text import percent

Kind = Literal["ids", "lengths", "hashes", "rejects", "sources"]
_JOB = "job.json"
_MISMATCH = "mismatch"
_PARTS = "parts.json"


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

    def __post_init__(self) -> None:
        self.rejected, self.dropped = Counter(self.rejected), Counter(self.dropped)  # of a record, plain dictionaries

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


def check_error_rate(
    counts: Counts, max_error_rate: float, first_error: str | None, *, records: float | None = None
) -> None:
    """Raises DataError where more of the records are in error than may be.

    Args:
        first_error: An example: the record's place and what is wrong with it.
        records: That the rate is of; None: those counted.
    """
    if counts.errors > max_error_rate * (counts.records if records is None else records):
        remedy = "Fix the shards, check --text-key"
        if max(counts.rejected, key=counts.rejected.__getitem__) == FILTER_FAILED:
            remedy = "Correct the filter, name every field that it reads by --record-key"
        raise DataError(
            f"{counts.errors:,} of {counts.records:,} records have no usable text "
            f"({percent(counts.errors / counts.records, digits=2)}), more than --max-error-rate {max_error_rate} "
            f"allows ({describe_reasons(counts.rejected)}); for example: {first_error}. "
            f"{remedy}, or allow more"
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
    filters: tuple[FilterSource, ...]
    with_hashes: bool
    on_error: Literal["skip", "fail"]
    folder: Path

    @property
    def decisive(self) -> dict[str, Any]:
        """Those that decide the content of a part's files."""
        return {
            "tokenizer": self.fingerprint,
            **asdict(self.read),
            "record_keys": list(self.read.record_keys or ()),  # lists, as JSON has them
            "filters": [list(source) for source in self.filters],
            "min_tokens": self.min_tokens,
            "max_tokens": self.max_tokens,
            "deduplicate or split_validation": self.with_hashes,
            "version": __version__,
        }


@dataclass(frozen=True)
class PartTask:
    """One part of a shard, and all that a worker must know to tokenise it."""

    number: int
    part: Chunk
    shard: InputVersion
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
        left_out = {"hashes": not self.settings.with_hashes, "sources": self.settings.read.source_key is None}
        return [kind for kind in get_args(Kind) if not left_out.get(kind)]

    def file(self, kind: Kind) -> Path:
        return self.settings.folder / f"{self.key}.{kind}"

    def record(self, end: Literal["done", "damaged"]) -> Path:
        """Present when the part is finished, or when it cannot be read to its end."""
        return self.settings.folder / f"{self.key}.{end}"


@dataclass(frozen=True)
class PartResult:
    """What became of a part; its ids, lengths, hashes, rejects and sources wait in the task's files."""

    number: int  # of the part in this run
    shard: InputVersion
    damage: str | None = None  # why it cannot be read to its end; then nothing of what follows is known
    counts: Counts = field(default_factory=Counts)
    sha256: dict[str, str] = field(default_factory=dict)  # of its files, by kind
    input_sha256: str | None = None  # of the whole shard, with its first part; None for some URLs too
    numbers: int = 0  # record numbers used up
    encoder: str = ""
    is_reference: bool = False
    compared: int = 0  # documents whose ids a fast back end had to have in common with the reference
    first_error: str | None = None
    sources: list[str] = field(default_factory=list)  # the values of --source-key, in the order of their numbers


@dataclass(frozen=True)
class PartProgress:
    """How far a part has come, from its beginning."""

    number: int
    counts: Counts
    fraction: float
    first_error: str | None


def write_result(task: PartTask, result: PartResult) -> None:
    content = vars(result) | {"counts": vars(result.counts)}
    replace_file(task.record("damaged" if result.damage else "done"), json.dumps(content), sync=False)


def read_result(task: PartTask, end: Literal["done", "damaged"] = "done") -> PartResult | None:
    """What an earlier run has made of a part; None where it must be done, or done again."""
    try:
        content: dict[str, Any] = json.loads(task.record(end).read_bytes())
    except (FileNotFoundError, ValueError):  # ValueError: it was not yet on disk when the machine crashed
        return None
    if InputVersion(*content["shard"]) != task.shard:
        return None
    for kind, sha256 in content["sha256"].items():
        if not task.file(kind).exists() or sha256_of(task.file(kind)) != sha256:
            return None
    known = {"number": task.number, "shard": task.shard, "counts": Counts(**content["counts"])}
    return PartResult(**{**content, **known})


class KnownParts:
    """How an earlier run or another task of the array has cut the shards: unchanged ones need not be opened for it.

    Args:
        folder: PREFIX.partial, which may not be there.
    """

    def __init__(self, folder: Path, read: ReadSettings) -> None:
        self._read: dict[str, Any] = json.loads(json.dumps(asdict(read) | {"version": __version__}))
        self._parts: dict[tuple[str, InputVersion], list[Chunk]] = {}
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError):  # without it, shards are opened
            content = json.loads((folder / _PARTS).read_bytes())
            if content["read"] == self._read:
                self._parts = {
                    (label, InputVersion(*version)): [Chunk(label, *part) for part in parts]
                    for label, version, parts in content["shards"]
                }

    def find(self, path: str, version: InputVersion) -> list[Chunk] | None:
        parts = self._parts.get((input_label(path), version))
        return parts and [replace(part, path=path) for part in parts]

    def write(self, folder: Path, parts: Sequence[Chunk], versions: Mapping[str, InputVersion]) -> None:
        """Keeps these for others, unless they are there."""
        by_path: dict[str, list[Chunk]] = {}
        for part in parts:
            by_path.setdefault(part.path, []).append(part)
        if (folder / _PARTS).exists() and all(self.find(path, versions[path]) for path in by_path):
            return
        shards = [
            (input_label(path), versions[path], [(part.format, part.compression, part.start, part.end) for part in own])
            for path, own in by_path.items()
        ]
        replace_file(folder / _PARTS, json.dumps({"read": self._read, "shards": shards}), sync=False)


class JobFolder:
    """The folder of one corpus in the making; a context manager that holds it for one run, or one task of an array.

    On leaving, the folder stays if there is something worth resuming in it, and disappears otherwise.

    Args:
        path: PREFIX.partial; created.
        task: Number of the array's task, which shares the folder with the other tasks; None: nobody else may use it.

    Raises:
        OutputError: The folder cannot be created, or another process uses it.
    """

    def __init__(self, path: Path, *, task: int | None = None) -> None:
        self.path = path
        self.task = task
        self.standard_input = path / "standard_input"  # its copy, complete
        self._locks: list[IO[bytes]] = []

    def __enter__(self) -> "JobFolder":
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock("lock", exclusive=self.task is None)
            if self.task is not None:
                self._lock(f"lock.{self.task}", exclusive=True)
        except OSError as error:
            raise OutputError(f"{self.path}: cannot be created ({error.strerror}); write to another folder") from error
        return self

    def __exit__(self, *_: object) -> None:
        if self.task is None and not self.finished_parts() and not self.standard_input.exists():
            self.remove()
        for lock in self._locks:
            lock.close()

    def begin(self, settings: dict[str, Any], *, resume: bool, overwrite: bool, merge: bool = False) -> None:
        """Makes the folder that of a run with these settings.

        Args:
            settings: All that decide the content of a part; must survive JSON.
            resume: Take over finished parts; a task of an array and a merge always do.
            overwrite: Throw away the parts of an earlier run, unless they can be taken over. Tasks and merges never do.

        Raises:
            OutputError: Finished parts are there, and neither resume nor overwrite is set.
            ConfigError: The folder belongs to a run with other settings.
        """
        settings = json.loads(json.dumps(settings))
        may_clear = self.task is None and not merge
        with (self.path / "lock.begin").open("wb") as turn:  # tasks of an array begin one after the other
            lock_if_possible(turn, fcntl.LOCK_EX)
            earlier = json.loads((self.path / _JOB).read_bytes()) if self.has_begun else None
            finished = self.finished_parts()
            if earlier == settings and (resume or not may_clear):
                return
            if earlier == settings and finished and not overwrite:
                raise OutputError(
                    f"{self.path} holds {finished:,} finished parts of an earlier run; continue with --resume, or "
                    "start anew with --overwrite"
                )
            if earlier not in (None, settings) and (not may_clear or (finished and not overwrite)):
                # A name that one of the two does not know is of another version of this project.
                either = {
                    name: [one.get(name, "unknown") for one in (earlier, settings)] for name in settings | earlier
                }
                name, (before, now) = next((name, both) for name, both in either.items() if both[0] != both[1])
                remedy = "start anew with --overwrite" if may_clear else f"delete {self.path.name}"
                raise ConfigError(
                    f"{self.path} belongs to a run with {name} {before} where this one has {now}; start with the same, "
                    f"or {remedy}"
                )
            for leftover in self.path.iterdir() if may_clear else ():
                if leftover.is_dir():
                    shutil.rmtree(leftover)
                elif not leftover.name.startswith("lock") and leftover != self.standard_input:
                    leftover.unlink()
            replace_file(self.path / _JOB, json.dumps(settings))

    @property
    def has_begun(self) -> bool:
        """Whether a run has been here that is not over."""
        return (self.path / _JOB).exists()

    @property
    def mismatch(self) -> str | None:
        """Where a fast back end was found wrong, in this run or before a restart, here or by another task of the array.

        From then on the whole corpus is the reference tokenizer's.
        """
        file = self.path / _MISMATCH
        return file.read_text(encoding="utf-8") if file.exists() else None

    def note_mismatch(self, description: str) -> None:
        replace_file(self.path / _MISMATCH, description)

    def finished_parts(self) -> int:
        return sum(1 for file in self.path.glob("*.done"))

    def remove(self) -> None:
        """Deletes the folder; a kill in the middle leaves nothing that would be taken for finished parts."""
        with suppress(FileNotFoundError):
            self.path.rename(self.path.with_name(f"{self.path.name}.removed-{os.getpid()}"))
        self.sweep()

    def sweep(self) -> None:
        """Deletes what is left of folders whose removal was killed."""
        for removed in self.path.parent.glob(f"{glob.escape(self.path.name)}.removed-*"):
            shutil.rmtree(removed, ignore_errors=True)

    def _lock(self, name: str, *, exclusive: bool) -> None:
        lock = (self.path / name).open("w+b")  # NFS wants it readable for a shared lock
        self._locks.append(lock)
        try:
            locked = lock_if_possible(lock, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            whose = "a run" if self.task is None or name == "lock" else f"a run with --shard-index {self.task}"
            raise OutputError(
                f"{self.path} belongs to {whose} that is still going; wait for it or choose another prefix"
            ) from error
        if not locked:
            return  # two runs with one prefix are then not told apart
        if not (self.path / name).exists() or os.fstat(lock.fileno()).st_ino != (self.path / name).stat().st_ino:
            raise OutputError(f"{self.path} belonged to a run that has just ended; start again")
