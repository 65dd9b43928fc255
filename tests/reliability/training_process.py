"""One start of the training command with real processes.

Tests wait for output or files of the processes, never for a fixed time. A wait that takes too long kills all processes
of the start and fails with their output.
"""

import contextlib
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from distributed.training_command import environment

_TIMEOUT_SECONDS = 600  # on an idle machine every wait ends within 20 s
_MARK = "RELIABILITY_TEST_START"  # variable in the environment of every process of a start


class Training:
    """The processes of one command; the end of the context kills them.

    Args:
        command: Command that trains on two ranks.
        variables: Additional environment variables.
    """

    def __init__(self, command: list[str], **variables: object) -> None:
        self._mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            command,
            env=environment(2, **{_MARK: self._mark}, **variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._has_ended = False  # all processes have closed their output
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> "Training":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.kill()

    @property
    def output(self) -> str:
        """Output of all processes so far, both streams."""
        return "".join(self.lines)

    def wait_for(self, text: str) -> str:
        """Wait for a line that contains `text`, and return the first one."""
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        with self._changed:
            while True:
                for line in self.lines:
                    if text in line:
                        return line.rstrip("\n")
                if self._has_ended or not self._changed.wait(deadline - time.monotonic()):
                    break
        raise self._failure(f"no output contains {text!r}")

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition that is not visible in the output, such as a file."""
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while not condition():
            if self._has_ended or time.monotonic() > deadline:
                raise self._failure("the condition did not become true")
            time.sleep(0.01)

    def finish(self) -> int:
        """Wait until all processes have ended, and return the exit code of the command."""
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        with self._changed:
            while not self._has_ended:
                if not self._changed.wait(deadline - time.monotonic()):
                    raise self._failure("it did not end")
        return self.process.wait(timeout=_TIMEOUT_SECONDS)

    def pids(self) -> list[int]:
        """Return the running processes of this start, oldest first."""
        mark = f"{_MARK}={self._mark}"
        pids = sorted(int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
        return [pid for pid in pids if mark in _variables_of(pid)]

    def rank(self, number: int) -> int:
        """Return the process of one rank. Its children have the same RANK, but are younger."""
        return next(pid for pid in self.pids() if f"RANK={number}" in _variables_of(pid))

    def send_to_all(self, number: int) -> None:
        """Send a signal to every process of this start."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):  # has ended meanwhile
                os.kill(pid, number)

    def kill(self) -> None:
        """Kill all processes at once, as a power failure does."""
        while self.pids():
            self.send_to_all(signal.SIGKILL)
        self.process.wait(timeout=_TIMEOUT_SECONDS)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in self.process.stdout:
                with self._changed:
                    self.lines.append(line)
                    self._changed.notify_all()
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def _failure(self, problem: str) -> AssertionError:
        self.kill()
        return AssertionError(f"{problem}; exit code {self.process.returncode}:\n{self.output}")


def _variables_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # the process has ended, or belongs to another user
        return []
