"""Resumable jobs: a function that writes named files, and a JSON record with their sha256 that is written last.

A job is finished if its record exists, was written for the job's key, and the hashes match. Any other job is done
again from its beginning, so a run that was killed at any moment resumes with what is sound. Files do not wait for the
disk one by one, unless a job asks for that: the hashes find what a crash of the machine has damaged.

Jobs run in this process, in worker processes of this machine, or on a Ray cluster (`runtime/executors.py`).
"""

import fcntl
import glob
import json
import os
import queue
import shutil
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, ClassVar, Generic, Literal, TypeVar, get_args

import msgspec

from megatron_neobert.errors import ConfigError, OutputError
from megatron_neobert.runtime.atomic_files import lock_if_possible, open_regular, replace_file, sha256_of
from megatron_neobert.runtime.executors import RayCluster, WorkerPool
from megatron_neobert.runtime.new_file import FileRecord, NewFile
from megatron_neobert.text import parse_json

_SETTINGS = "job.json"

Result = TypeVar("Result")
Outcome = TypeVar("Outcome")


@dataclass(frozen=True)
class Job(ABC, Generic[Result]):
    """One unit of work. Its files are `folder`/`name`.KIND, its record is `folder`/`name`.done.

    Jobs are pickled for workers, so they hold absolute paths and stay small.
    """

    result_type: ClassVar[Any]  # what `work` returns: a type that msgspec can encode and decode
    sync: ClassVar[bool] = False  # wait until the files are on disk

    folder: Path
    name: str

    @property
    @abstractmethod
    def kinds(self) -> Sequence[str]:
        """Suffixes of the output files."""

    @property
    def key(self) -> str:
        """Everything outside the folder's settings that decides the output. A record with another key is stale."""
        return ""

    @abstractmethod
    def work(self, files: Mapping[str, NewFile]) -> Result:
        """Write the output files, and return what the record keeps besides their hashes."""

    def file(self, kind: str) -> Path:
        return self.folder / f"{self.name}.{kind}"


@dataclass(frozen=True)
class Finished(Generic[Result]):
    """The record of a finished job."""

    key: str
    files: dict[str, FileRecord]  # by kind
    result: Result


def run_job(job: Job[Result]) -> Finished[Result]:
    """Do a job: write its files, then its record."""
    job.file("done").unlink(missing_ok=True)
    with ExitStack() as stack:
        files = {kind: stack.enter_context(NewFile(job.file(kind))) for kind in job.kinds}
        result = job.work(files)
        records = {kind: file.commit(sync=job.sync) for kind, file in files.items()}
    finished = Finished(job.key, records, result)
    # Escaped by json, since names of files may hold lone surrogates, which msgspec does not encode.
    replace_file(job.file("done"), json.dumps(msgspec.to_builtins(finished, str_keys=True)), sync=job.sync)
    return finished


def read_finished(job: Job[Result]) -> Finished[Result] | None:
    """Return the record of a job that is finished, or None if it has to be done."""
    try:
        with open_regular(job.file("done")) as stream:
            content = parse_json(stream.read())
        finished: Finished[Result] = msgspec.convert(
            content,
            Finished[job.result_type],  # type: ignore[name-defined]
            str_keys=True,
            dec_hook=_decode_counter,
        )
        matches = all(sha256_of(job.file(kind)) == finished.files[kind].sha256 for kind in job.kinds)
    except (OSError, ValueError, KeyError, msgspec.ValidationError):
        return None
    return finished if matches and finished.key == job.key else None


def _decode_counter(kind: Any, value: Any) -> Any:
    """Decode the one type of results that msgspec does not know, `Counter[...]`."""
    (key,) = get_args(kind)
    return Counter(msgspec.convert(value, dict[key, int], str_keys=True))  # type: ignore[valid-type]


AnyJob = TypeVar("AnyJob", bound=Job[Any])


def run_jobs(
    function: Callable[[AnyJob], Outcome],
    jobs: Sequence[AnyJob],
    *,
    workers: int | None,
    executor: Literal["local", "ray"] = "local",
    ray_address: str | None = None,
) -> Generator[tuple[AnyJob, Outcome], None, None]:
    """Yield each job and what the function returned for it, in the order in which they finish.

    Closing the generator ends all workers, also those at work.

    Args:
        function: `run_job`, or a function that calls it. Workers import it by its name.
        workers: Number of processes; with Ray the most jobs at a time. None: one; with Ray as many as it has CPUs.

    Raises:
        ChildProcessError: A worker died; most often memory ran out.
        ConfigError: There is no such Ray cluster.
        Exception: The function raised it.
    """
    count = min(workers or 1, len(jobs))
    if not jobs or (executor == "local" and count == 1):  # nothing to start, nothing to send
        for job in jobs:
            yield job, function(job)
        return
    runner = RayCluster(ray_address, workers) if executor == "ray" else WorkerPool(count)
    finished: queue.SimpleQueue[Future[Outcome]] = queue.SimpleQueue()
    waiting, running = iter(jobs), dict[Future[Outcome], AnyJob]()
    try:
        while True:
            for job in islice(waiting, runner.most_submitted - len(running)):
                future = runner.submit(function, job)
                running[future] = job
                future.add_done_callback(finished.put)
            if not running:
                return
            done = finished.get()
            job = running.pop(done)
            yield job, runner.result(done, job)
    finally:
        runner.close()


def finish_jobs(
    jobs: Sequence[Job[Any]], *, label: str, function: Callable[[Any], Any] = run_job, **where: Any
) -> Generator[tuple[Any, Any], None, None]:
    """Yield each job and its record: first of the jobs that are finished, then of the others as they are done.

    Args:
        label: Name of the jobs on the progress bar, which is drawn on standard error.
        function: Does a job, as in `run_jobs`.
        where: Workers and executor, as in `run_jobs`.
    """
    with ThreadPoolExecutor() as threads:  # all files are hashed
        records = list(zip(jobs, threads.map(read_finished, jobs), strict=True))
    missing = [job for job, record in records if record is None]
    yield from ((job, record) for job, record in records if record is not None)
    with (
        closing(run_jobs(function, missing, **where)) as results,
        _progress_bar(desc=label, total=len(jobs), initial=len(jobs) - len(missing)) as bar,
    ):
        for job, outcome in results:
            yield job, outcome
            bar.update()


def _progress_bar(**options: Any) -> Any:
    """Return a bar of tqdm: drawn twice a second on a terminal, and once a minute in a log."""
    from tqdm import tqdm

    seconds = 0.5 if sys.stderr and sys.stderr.isatty() else 60.0
    return tqdm(file=_Screen(), leave=False, miniters=0, mininterval=seconds, delay=seconds, **options)


class _Screen:
    """Standard error, which may be closed while a bar is drawn: that is no reason to end a run."""

    def write(self, text: str) -> None:
        with suppress(OSError, ValueError, AttributeError):  # None where the process has started without one
            sys.stderr.write(text)
            sys.stderr.flush()

    def flush(self) -> None:
        """Do nothing: `write` has flushed."""


class JobFolder:
    """The folder of an unfinished run, used by one process at a time; a context manager that holds its lock.

    Entering creates the folder. On leaving, it stays if a job in it is finished, and is removed otherwise.

    Raises:
        OutputError: The folder cannot be created, or another process uses it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[bytes]

    def __enter__(self) -> "JobFolder":
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / "lock").open("wb")
        except OSError as error:
            raise OutputError(f"{self.path}: cannot be created ({error.strerror}); write to another folder") from error
        try:
            locked = lock_if_possible(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OutputError(
                f"{self.path} belongs to a run that is still going; wait for it or choose another prefix"
            ) from error
        lock = self.path / "lock"  # without locks, two runs in one folder are not told apart
        if locked and not (lock.exists() and os.path.samestat(os.fstat(self._lock.fileno()), lock.stat())):
            raise OutputError(f"{self.path} belonged to a run that has just ended; start again")
        return self

    def __exit__(self, *_: object) -> None:
        if not self.count_finished():
            self.remove()
        self._lock.close()

    def begin(self, settings: dict[str, Any], *, resume: bool, overwrite: bool) -> None:
        """Make this the folder of a run with these settings, and empty it unless it already is and `resume` is set.

        Args:
            settings: Everything that decides the content of all jobs, as JSON.
            resume: Keep finished jobs.
            overwrite: Remove the finished jobs of another run.

        Raises:
            OutputError: Jobs are finished, and neither resume nor overwrite is set.
            ConfigError: Jobs are finished that belong to a run with other settings.
        """
        settings = parse_json(json.dumps(settings))
        earlier = self._read_settings()
        if earlier == settings and resume:
            return
        finished = self.count_finished()
        if finished and not overwrite:
            if earlier == settings:
                raise OutputError(
                    f"{self.path} holds {finished:,} finished chunks of an earlier run; continue with --resume, or "
                    "start anew with --overwrite"
                )
            # "unknown": a setting that one of two versions of this project does not have.
            name, before, now = next(
                (name, *both)
                for name in settings | earlier
                if (both := [some.get(name, "unknown") for some in (earlier, settings)])[0] != both[1]
            )
            raise ConfigError(
                f"{self.path} belongs to a run with {name} {before} where this one has {now}; start with the same, or "
                "start anew with --overwrite"
            )
        for path in self.path.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != "lock":
                path.unlink()
        replace_file(self.path / _SETTINGS, json.dumps(settings))

    @property
    def has_begun(self) -> bool:
        """True if a run has begun here that is not over."""
        return (self.path / _SETTINGS).exists()

    def count_finished(self) -> int:
        return sum(1 for _ in self.path.glob("*.done"))

    def remove(self) -> None:
        """Delete the folder. A kill during the deletion leaves nothing that would be taken for finished jobs."""
        with suppress(FileNotFoundError):
            self.path.rename(self.path.with_name(f"{self.path.name}.removed-{os.getpid()}"))
        self.sweep()

    def sweep(self) -> None:
        """Delete the remains of folders whose deletion was killed."""
        for removed in self.path.parent.glob(f"{glob.escape(self.path.name)}.removed-*"):
            shutil.rmtree(removed, ignore_errors=True)

    def _read_settings(self) -> dict[str, Any]:
        """Return the settings of the run that began here, or {} if there is none or its file is damaged."""
        try:
            with open_regular(self.path / _SETTINGS) as stream:
                return msgspec.convert(parse_json(stream.read()), dict[str, Any])
        except (OSError, ValueError, msgspec.ValidationError):
            return {}
