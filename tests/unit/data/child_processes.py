"""Child processes, for tests that kill some of them."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_CHANGES = {"os.rename", "os.link", "os.mkdir", "os.rmdir", "os.remove", "os.truncate"}


def count_changes(function: Callable[[], Any], *, killed_at: int = 0) -> int:
    """Call `function` in a fork that is killed at its n-th change on disk; return the number of changes, 0 if killed.

    It is killed before a change, such as a call of fsync, and also after a file was opened for writing.
    """
    changes = multiprocessing.Value("i", 0)

    def count(*opened: Any) -> None:
        changes.value += 1
        if changes.value == killed_at:
            if opened:
                os.open(*opened)
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _CHANGES:
            count()
        if event == "open":
            path, _, flags = arguments
            # An opened file becomes a stream by its number.
            if not isinstance(path, int) and flags & (os.O_WRONLY | os.O_RDWR):
                count()
                count(path, flags)

    def run() -> None:
        os.fsync = lambda descriptor: count()
        sys.addaudithook(audit)
        function()

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return 0 if process.exitcode else changes.value


def children_of(process: int) -> list[int]:
    """Return the ids of the worker processes of a process, without multiprocessing's resource tracker."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def has_ended(process: int) -> bool:
    """Return True if a process is gone or is a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Return the first true result of `condition`; fail after this many seconds."""
    end = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.01)
    return result
