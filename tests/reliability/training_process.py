"""One start of the training command with real processes, driven by what they say and by what is seen of them.

Nothing sleeps until something is probably ready. A wait that takes too long kills every process of the start and fails
with all that they said.
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

_PATIENCE_SECONDS = 600  # on an idle machine every wait is over within 20 s
_MARK = "RELIABILITY_TEST_START"  # in the environment of every process of a start, whoever its parent is


class Training:
    """Everything that one command starts; leaving the context kills what is left of it.

    Args:
        command: A command that trains on two ranks.
        variables: More of its environment.
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
        self._news = threading.Condition()
        self._has_ended = False  # nobody holds the other end of the pipe any more
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> "Training":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.kill()

    @property
    def output(self) -> str:
        """What all processes have said so far, both streams."""
        return "".join(self.lines)

    def wait_for(self, text: str) -> str:
        """The first line that holds `text`, as soon as it is said."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        with self._news:
            while True:
                for line in self.lines:
                    if text in line:
                        return line.rstrip("\n")
                if self._has_ended or not self._news.wait(deadline - time.monotonic()):
                    break
        raise self._failure(f"nobody said {text!r}")

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """For what can be seen but is not said, such as a file."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not condition():
            if self._has_ended or time.monotonic() > deadline:
                raise self._failure("what was waited for did not come")
            time.sleep(0.01)

    def finish(self) -> int:
        """The exit code of the command, once it and all processes that it started have ended."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        with self._news:
            while not self._has_ended:
                if not self._news.wait(deadline - time.monotonic()):
                    raise self._failure("it did not end")
        return self.process.wait(timeout=_PATIENCE_SECONDS)

    def pids(self) -> list[int]:
        """All processes of this start that still run, the oldest first."""
        wanted = f"{_MARK}={self._mark}"
        numbers = sorted(int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
        return [pid for pid in numbers if wanted in _variables_of(pid)]

    def rank(self, number: int) -> int:
        """The process of one rank; its own children inherit its number, but are younger."""
        return next(pid for pid in self.pids() if f"RANK={number}" in _variables_of(pid))

    def send_to_all(self, number: int) -> None:
        """A signal to every process of this start."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(pid, number)

    def kill(self) -> None:
        """Ends all processes at once, as a power cut does."""
        while self.pids():
            self.send_to_all(signal.SIGKILL)
        self.process.wait(timeout=_PATIENCE_SECONDS)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in self.process.stdout:
                with self._news:
                    self.lines.append(line)
                    self._news.notify_all()
        with self._news:
            self._has_ended = True
            self._news.notify_all()

    def _failure(self, problem: str) -> AssertionError:
        self.kill()
        return AssertionError(f"{problem}; exit code {self.process.returncode}:\n{self.output}")


def _variables_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # it has ended, or belongs to somebody else
        return []
