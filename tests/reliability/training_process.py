"""One start of the training command with real processes.

Tests wait for output or files of the processes, never for a fixed time. A wait that takes too long kills all processes
of the start and fails with their output.
"""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable
from types import TracebackType

import psutil
from distributed.training_command import BASH, environment

_TIMEOUT_SECONDS = 600  # on an idle machine every wait ends within 20 s
_MARK = "RELIABILITY_TEST_START"  # variable in the environment of every process of a start


class Training:
    """The processes of one start; the end of the context kills them.

    Args:
        flags: Flags of the training command, which trains on two ranks.
    """

    def __init__(self, flags: list[str]) -> None:
        self._mark = uuid.uuid4().hex
        self._output = tempfile.TemporaryFile()  # noqa: SIM115, it is read until the test ends
        self.process = subprocess.Popen(
            [*BASH, *flags],
            env=environment(2, **{_MARK: self._mark}),
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def __enter__(self) -> "Training":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.kill()

    @property
    def output(self) -> str:
        """Output of all processes so far, both streams."""
        # pread, because the processes share the offset of this file.
        return os.pread(self._output.fileno(), 1 << 24, 0).decode(errors="replace")

    @property
    def lines(self) -> list[str]:
        """Lines of the output that are complete."""
        return self.output.rpartition("\n")[0].splitlines()

    def wait_for(self, text: str) -> str:
        """Wait for a line that contains `text`, and return the first one."""
        self.wait_until(lambda: any(text in line for line in self.lines), f"no output contains {text!r}")
        return next(line for line in self.lines if text in line)

    def wait_until(self, condition: Callable[[], bool], problem: str = "the condition did not become true") -> None:
        """Wait for a condition while a process of this start runs."""
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while not condition():
            has_ended = self.process.poll() is not None and not self.processes()
            if time.monotonic() > deadline or (has_ended and not condition()):
                self.kill()
                raise AssertionError(f"{problem}; exit code {self.process.returncode}:\n{self.output}")
            time.sleep(0.01)

    def finish(self) -> int:
        """Wait until all processes have ended, and return the exit code of the command."""
        self.wait_until(lambda: self.process.poll() is not None and not self.processes(), "it did not end")
        return self.process.returncode

    def processes(self) -> list[psutil.Process]:
        """Return the running processes of this start, oldest first."""
        return sorted(
            (process for process in psutil.process_iter() if _variables_of(process).get(_MARK) == self._mark),
            key=lambda process: process.pid,
        )

    def rank(self, number: int) -> int:
        """Return the process of one rank. Its children have the same RANK, but are younger."""
        return next(process.pid for process in self.processes() if _variables_of(process).get("RANK") == str(number))

    def send_to_all(self, number: int) -> None:
        """Send a signal to every process of this start."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # the process has already ended
                process.send_signal(number)

    def kill(self) -> None:
        """Kill all processes at once, as a power failure does."""
        while self.processes():
            self.send_to_all(signal.SIGKILL)
        self.process.wait(timeout=_TIMEOUT_SECONDS)


def _variables_of(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:  # the process has ended, or belongs to another user
        return {}
