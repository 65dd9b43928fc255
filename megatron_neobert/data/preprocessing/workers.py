"""Processes that work through a list of tasks, and that neither hang nor survive their parent.

Each worker has its own pipe, and nobody else holds the other end: a worker that is killed is noticed at once, and a
worker whose parent is killed finds its pipe closed at its next report and ends.
"""

import multiprocessing
import signal
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Generic, TypeVar

from megatron_neobert.errors import NeoBERTError

Task = TypeVar("Task")
Result = TypeVar("Result")
Report = Callable[[Any], None]


@dataclass(frozen=True)
class _Finished(Generic[Result]):
    result: Result


@dataclass(frozen=True)
class _Failed:
    error: Exception


class Workers(Generic[Task, Result]):
    """Processes that wait for tasks, until they are closed.

    Args:
        function: Called as function(task, report); importable by its name, since workers are fresh interpreters.
        count: Number of processes.
        prepare: Called first in each of them, while the parent is still busy with what comes before the tasks.
    """

    def __init__(
        self,
        function: Callable[[Task, Report], Result],
        *,
        count: int,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self._processes: dict[Connection, SpawnProcess] = {}
        context = multiprocessing.get_context("spawn")  # fork would copy the locks of other threads in any state
        try:
            for _ in range(count):
                connection, far_end = context.Pipe()
                process = context.Process(target=_work, args=(function, prepare, far_end), daemon=True)
                with _signals_held_back():
                    process.start()
                    self._processes[connection] = process
                far_end.close()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends all of them, whatever they are at."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()

    def run(self, tasks: Iterable[Task], *, on_report: Report) -> Generator[Result, None, None]:
        """Results in the order in which they finish. All workers end with the last one, or when this is closed.

        Args:
            tasks: Handed out in order.
            on_report: Called here with whatever a function reports. A function that reports often ends soon when its
                parent is killed.

        Raises:
            ChildProcessError: A worker died, most often for want of memory.
            NeoBERTError, OSError: As raised by a function; anything else becomes a RuntimeError with the trace.
        """
        try:
            yield from self._results(tasks, on_report)
        finally:
            self.close()

    def _results(self, tasks: Iterable[Task], on_report: Report) -> Iterator[Result]:
        waiting = iter(tasks)
        running: dict[Connection, Task] = {}
        for connection, task in zip(self._processes, waiting, strict=False):
            self._send(connection, task, running)
        while running:
            for connection in [end for end in wait(list(running)) if isinstance(end, Connection)]:
                message = _exchange(self._processes[connection], running[connection], connection.recv)
                if isinstance(message, _Failed):
                    raise message.error
                if not isinstance(message, _Finished):
                    on_report(message)
                    continue
                del running[connection]
                for task in islice(waiting, 1):
                    self._send(connection, task, running)
                yield message.result

    def _send(self, connection: Connection, task: Task, running: dict[Connection, Task]) -> None:
        running[connection] = task
        _exchange(self._processes[connection], task, connection.send, task)


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Ctrl-C and a scheduler's SIGTERM go to all processes, but the parent decides: workers started inside see none.

    They inherit the blocked signal, which ignoring it in the worker could not replace: it would come too late for the
    worker's imports. The parent gets its interrupt on leaving, when the worker is known and can be ended.
    """
    resource_tracker.ensure_running()  # multiprocessing would start it now, and unblock the signal in doing so
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _exchange(process: SpawnProcess, task: Any, action: Callable[..., Any], *arguments: Any) -> Any:
    """Sends to or receives from a worker."""
    try:
        return action(*arguments)
    except (EOFError, ConnectionError) as error:
        process.join()
        code = process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise ChildProcessError(
            f"worker process {process.pid} {how} at {task}; if memory ran out, use fewer --workers, and go "
            "on with --resume"
        ) from error


class _ParentIsGone(BaseException):
    """Nobody reads what this worker reports. No Exception, so that no task can take it for an error of its own."""


def _work(
    function: Callable[[Task, Report], Result], prepare: Callable[[], None] | None, connection: Connection
) -> None:
    if prepare:
        prepare()

    def report(news: Any) -> None:
        try:
            connection.send(news)
        except OSError as error:
            raise _ParentIsGone from error

    try:
        while True:
            task = connection.recv()
            try:
                message: Any = _Finished(function(task, report))
            except (NeoBERTError, OSError) as error:
                message = _Failed(error)
            except Exception:  # our own bug: it may not be picklable, its trace is
                message = _Failed(RuntimeError(f"in a worker process:\n{traceback.format_exc()}"))
            connection.send(message)
    except (EOFError, ConnectionError, _ParentIsGone):
        return
