"""PREFIX.partial, where an unfinished run keeps its finished parts: who may work there, and what may be taken over.

A run takes over the parts of an earlier one only where they would come out the same: job.json has the settings that
decide their bytes, and each part's own record names the range of which version of a shard it holds. So shards may be
added, repaired and left out between two runs. Several tasks of one array share the folder, each with its own parts.
"""

import fcntl
import glob
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from megatron_neobert.errors import ConfigError, OutputError
from megatron_neobert.runtime.atomic_files import lock_if_possible, replace_file

_JOB = "job.json"
_MISMATCH = "mismatch"


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
            raise OutputError(
                f"{self.path}: cannot be created ({error.strerror}); choose another --output-prefix"
            ) from error
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
            if not self._takes_over(settings, resume=resume, overwrite=overwrite, may_clear=may_clear):
                if may_clear:
                    self._clear()
                replace_file(self.path / _JOB, json.dumps(settings))

    def _takes_over(self, settings: dict[str, Any], *, resume: bool, overwrite: bool, may_clear: bool) -> bool:
        earlier = json.loads((self.path / _JOB).read_bytes()) if self.has_begun else None
        finished = self.finished_parts()
        if earlier == settings:
            if finished and may_clear and not resume and not overwrite:
                raise OutputError(
                    f"{self.path} holds {finished:,} finished parts of an earlier run; continue with --resume, or "
                    "start anew with --overwrite"
                )
            return resume or not may_clear
        if earlier is not None and (not may_clear or (finished and not overwrite)):
            name = next(name for name in [*settings, *earlier] if earlier.get(name) != settings.get(name))
            remedy = "start anew with --overwrite" if may_clear else f"delete {self.path.name}"
            raise ConfigError(
                f"{self.path} belongs to a run with {name} {earlier.get(name)} where this one has "
                f"{settings.get(name)}; start with the same, or {remedy}"
            )
        return False

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

    def _clear(self) -> None:
        """Removes what an earlier run has left, but not the copy of standard input that this one has made."""
        for leftover in self.path.iterdir():
            if leftover.is_dir():
                shutil.rmtree(leftover)
            elif not leftover.name.startswith("lock") and leftover != self.standard_input:
                leftover.unlink()
