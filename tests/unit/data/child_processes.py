"""Child processes of other processes, for tests that kill some of them."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")


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
