"""Watching processes of other processes, for tests that kill some of them."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")


def children_of(process: int) -> list[int]:
    """Worker processes; multiprocessing's resource tracker is a child too."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def has_ended(process: int) -> bool:
    """True for a process that is gone, or dead and only waiting for its parent to notice."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.01)
    return found
