"""Resumable jobs: functions that write named files and then a JSON record with their SHA-256.

A job is finished if its record exists, has the job's key, and its hashes match the files. All other jobs are run again
from their beginning, so a run resumes correctly after a kill at any moment.

Jobs run in this process, in worker processes on this machine, or on a Ray cluster (`runtime/executors.py`).
"""

import fcntl
import glob
import json
import os
import queue
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, ClassVar, Generic, Literal, TypeVar

import msgspec

from megatron_neobert.cli import option
from megatron_neobert.errors import ConfigError, OutputError
from megatron_neobert.runtime.atomic_files import lock_if_possible, read_text, replace_file, sha256_of
from megatron_neobert.runtime.executors import RayCluster, WorkerPool
from megatron_neobert.runtime.new_file import FileRecord, NewFile
from megatron_neobert.runtime.own_files import (
    RECORD,
    claim_folder,
    delete_folder,
    empty_folder,
    is_own_folder,
    open_lock,
)
from megatron_neobert.text import parse_json

_SETTINGS = "job.json"

Result = TypeVar("Result")
Outcome = TypeVar("Outcome")


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Options of a command that runs resumable jobs. Raise ConfigError if they contradict each other."""

    workers: int | None = option(None, "processes, one core each (1; with Ray as many as it has CPUs)", minimum=1)
    resume: bool = option(False, "keep what an earlier run of the same command has finished")
    executor: Literal["local", "ray"] = option("local", "where the work runs")
    ray_address: str | None = option(None, "host:port of a cluster (default: RAY_ADDRESS, or else a new cluster)")

    def __post_init__(self) -> None:
        if self.ray_address is not None and self.executor != "ray":
            raise ConfigError(f"--ray-address {self.ray_address} has no effect without --executor ray; add that flag")


@dataclass(frozen=True)
class Job(ABC, Generic[Result]):
    """A unit of work, which writes a file `folder`/`name`.KIND for every kind, and the record `folder`/`name`.done.

    Jobs are pickled for workers, so they must be small and contain absolute paths.
    """

    result_type: ClassVar[Any]  # type that `work` returns; msgspec must be able to encode and decode it
    # Wait until the files are on disk. Without it, `read_finished` detects files that a crash of the machine damaged.
    sync: ClassVar[bool] = False
    unit: ClassVar[str] = "job"  # of `size`

    folder: Path
    name: str

    def __str__(self) -> str:
        """Return the name of the job for messages."""
        return self.name

    @property
    @abstractmethod
    def kinds(self) -> Sequence[str]:
        """Suffixes of the output files."""

    @property
    def key(self) -> str:
        """Inputs that decide the output, besides the folder's settings. A record with a different key is stale."""
        return ""

    @property
    def size(self) -> int:
        """Amount of work, which the progress bar counts."""
        return 1

    @abstractmethod
    def work(self, files: Mapping[str, NewFile]) -> Result:
        """Write the output files, and return the result to store in the record."""

    def file(self, kind: str) -> Path:
        """Return the path of an output file, or of the record (`done`)."""
        return self.folder / f"{self.name}.{kind}"


@dataclass(frozen=True)
class Finished(Generic[Result]):
    """The record of a finished job."""

    key: str
    files: dict[str, FileRecord]  # kind -> record
    result: Result


def run_job(job: Job[Result]) -> Finished[Result]:
    """Run a job: write its files, then its record, and return the record. Earlier files are replaced.

    If `job.work` raises an exception, no file is written, the job stays unfinished, and the exception is not caught.
    """
    job.file("done").unlink(missing_ok=True)
    with ExitStack() as stack:
        files = {kind: stack.enter_context(NewFile(job.file(kind))) for kind in job.kinds}
        result = job.work(files)
        records = {kind: file.commit(sync=job.sync) for kind, file in files.items()}
    finished = Finished(job.key, records, result)
    # Encoded by json, because names of files may contain lone surrogates, which msgspec cannot encode.
    replace_file(job.file("done"), json.dumps(msgspec.to_builtins(finished, str_keys=True)), sync=job.sync)
    return finished


def read_finished(job: Job[Result]) -> Finished[Result] | None:
    """Return a finished job's record; None if it is missing or damaged, or its key or a file's SHA-256 differs."""
    try:
        finished: Finished[Result] = msgspec.convert(
            parse_json(read_text(job.file("done"))),
            Finished[job.result_type],  # type: ignore[name-defined]
            str_keys=True,
        )
        matches = all(sha256_of(job.file(kind)) == finished.files[kind].sha256 for kind in job.kinds)
    except (OSError, ValueError, KeyError, msgspec.ValidationError):
        return None
    return finished if matches and finished.key == job.key else None


AnyJob = TypeVar("AnyJob", bound=Job[Any])


class JobRunner:
    """Runs jobs in this process, in worker processes, or on a Ray cluster; a context manager.

    With one local worker or a single job, the jobs run in this process. Otherwise, the first `run` starts the workers.
    All calls of `run` in the block share them. The end of the block kills them, even in the middle of a job.

    Args:
        options: With Ray, `workers` is the maximum number of concurrent jobs.
    """

    def __init__(self, options: JobOptions) -> None:
        self._options = options
        self._workers: RayCluster | WorkerPool | None = None

    def __enter__(self) -> "JobRunner":
        return self

    def __exit__(self, *_: object) -> None:
        if self._workers is not None:
            self._workers.close()

    def run(
        self, function: Callable[[AnyJob], Outcome], jobs: Sequence[AnyJob]
    ) -> Generator[tuple[AnyJob, Outcome], None, None]:
        """Yield each job and the result of `function(job)`, in the order in which the jobs end.

        The jobs start when the first result is requested.

        Args:
            function: `run_job`, or a function that calls it. Workers import it, so it must be at module level.
        """
        options, count = self._options, self._options.workers or 1
        if not jobs or (options.executor == "local" and min(count, len(jobs)) == 1):
            for job in jobs:
                yield job, function(job)
            return
        if self._workers is None:
            is_ray = options.executor == "ray"
            self._workers = RayCluster(options.ray_address, options.workers) if is_ray else WorkerPool(count)
        ended: queue.SimpleQueue[Future[Outcome]] = queue.SimpleQueue()
        waiting, running = iter(jobs), dict[Future[Outcome], AnyJob]()
        while True:
            for job in islice(waiting, self._workers.most_submitted - len(running)):
                future = self._workers.submit(function, job)
                running[future] = job
                future.add_done_callback(ended.put)
            if not running:
                return
            future = ended.get()
            job = running.pop(future)
            yield job, self._workers.result(future, job)


def finish_jobs(
    jobs: Sequence[Job[Any]], runner: JobRunner, *, label: str, function: Callable[[Any], Any] = run_job
) -> Generator[tuple[Any, Any], None, None]:
    """Run the jobs that are not finished. Yield pairs (job, record), finished jobs first, all other jobs as they end.

    Nothing runs before the first item is requested. A progress bar is drawn on standard error. Raise ChildProcessError
    if a worker dies, ConfigError or ModuleNotFoundError if Ray cannot start, or the exception that a job raised.

    Args:
        function: `run_job`, or a function at module level that calls it. Its result is yielded as the record.
    """
    # Reading a record hashes all files of its job.
    with ThreadPoolExecutor() as threads:
        records = list(zip(jobs, threads.map(read_finished, jobs), strict=True))
    missing = [job for job, record in records if record is None]
    yield from ((job, record) for job, record in records if record is not None)
    total, left, unit = sum(job.size for job in jobs), sum(job.size for job in missing), jobs[0].unit if jobs else ""
    with progress_bar(desc=label, total=total, initial=total - left, unit=unit) as bar:
        for job, outcome in runner.run(function, missing):
            yield job, outcome
            bar.update(job.size)


def progress_bar(*, unit: str, **options: Any) -> Any:
    """Return a tqdm bar of `unit`, such as "B". It is drawn at once and twice a second, or once a minute in a log."""
    from tqdm import tqdm

    rate = (0.5, 0.0) if sys.stderr and sys.stderr.isatty() else (60.0, 60.0)
    drawn = dict(zip(("mininterval", "delay"), rate, strict=True), unit=unit, unit_scale=unit == "B")
    return tqdm(file=_OptionalStderr(), leave=False, miniters=0, **drawn, **options)


class _OptionalStderr:
    """Standard error for the progress bar. Errors are ignored, because a closed terminal must not end a run."""

    def write(self, text: str) -> None:
        # AttributeError: sys.stderr is None if the process was started without standard error.
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(text)
            sys.stderr.flush()

    def flush(self) -> None:
        """Do nothing; `write` has flushed."""


class JobFolder:
    """Folder of the jobs of an unfinished run; a context manager that holds a lock on the folder.

    Entering creates the folder. Leaving removes the folder unless it contains finished jobs. If the block raises an
    OSError without a file name, for example because the disk is full, the folder's name is added to the error.
    Entering raises OutputError if the folder cannot be created, is a link, was not created by this project (see
    `runtime/own_files.py`), or is used by another process.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[bytes]

    def __enter__(self) -> "JobFolder":
        claim_folder(self.path)
        self._lock = open_lock(self.path / "lock")
        try:
            # On a file system without locks, two runs in one folder are not detected.
            locked = lock_if_possible(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OutputError(
                f"{self.path} belongs to a run that is still going; wait for it or choose another prefix"
            ) from error
        # The earlier run may have removed the folder between the opening of the lock file and its locking.
        lock = self.path / "lock"
        if locked and not (lock.exists() and os.path.samestat(os.fstat(self._lock.fileno()), lock.stat())):
            raise OutputError(f"{self.path} belonged to a run that has just ended; start again")
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) and error.errno and not error.filename:
            error.filename = str(self.path)
        if not self.count_finished():
            self.remove()
        self._lock.close()

    def begin(self, settings: dict[str, Any], *, resume: bool, overwrite: bool) -> None:
        """Start or resume a run in this folder. Unless the run resumes, delete the folder's content first.

        Args:
            settings: Everything that decides the output of all jobs, as JSON. Written to the folder.
            resume: Keep the finished jobs of a run with the same settings.
            overwrite: Allow the deletion of an earlier run's finished jobs.

        Raises:
            OutputError: The folder contains finished jobs with equal settings, without `resume` or `overwrite`.
            ConfigError: The folder contains finished jobs with different settings, and `overwrite` is not set.
        """
        try:
            earlier = msgspec.convert(parse_json(read_text(self.path / _SETTINGS)), dict[str, Any])
        except (OSError, ValueError, msgspec.ValidationError):
            earlier = {}  # missing or damaged
        settings = parse_json(json.dumps(settings))
        if earlier == settings and resume:
            return
        finished = self.count_finished()
        if finished and not overwrite:
            if earlier == settings:
                raise OutputError(
                    f"{self.path} holds {finished:,} finished jobs of an earlier run; continue with --resume, or "
                    "start anew with --overwrite"
                )
            # "unknown" is a setting that another version of this project does not have.
            name, old, new = next(
                (name, old, new)
                for name in settings | earlier
                if (old := earlier.get(name, "unknown")) != (new := settings.get(name, "unknown"))
            )
            raise ConfigError(
                f"{self.path} belongs to a run with {name} {old}, and this run has {new}; start with the same value, "
                "or start anew with --overwrite"
            )
        empty_folder(self.path, keep=(RECORD, "lock"))
        replace_file(self.path / _SETTINGS, json.dumps(settings))

    @property
    def has_begun(self) -> bool:
        """True if the folder belongs to a run that has begun and not ended."""
        return (self.path / _SETTINGS).exists()

    def count_finished(self) -> int:
        """Return the number of finished jobs, without checking the hashes of their files."""
        return sum(1 for _ in self.path.glob("*.done"))

    def remove(self) -> None:
        """Delete the folder, if it exists, and the remains of interrupted deletions.

        The folder is renamed first, so that no job counts as finished if the process is killed during the deletion.
        """
        with suppress(FileNotFoundError):
            self.path.rename(self.path.with_name(f"{self.path.name}.removed-{os.getpid()}"))
        self.sweep()

    def sweep(self) -> None:
        """Delete the remains of folders whose deletion was interrupted."""
        for removed in filter(is_own_folder, self.path.parent.glob(f"{glob.escape(self.path.name)}.removed-*")):
            with suppress(OSError):
                delete_folder(removed)
