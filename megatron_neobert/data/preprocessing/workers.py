"""Who works through the parts: processes of this machine, or the workers of a Ray cluster.

Processes neither hang nor survive their parent. Each worker has its own pipe, and nobody else holds the other end: a
worker that is killed is noticed at once, and one whose parent is killed finds its pipe closed at its next report.

All nodes of a Ray cluster must see the shards and PREFIX.partial under the same paths (a network file system, or URLs
for the shards); the package itself travels with the job. A worker or node that dies costs its part another try.
"""

import logging
import multiprocessing
import os
import shlex
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Literal, cast

import megatron_neobert
from megatron_neobert.errors import ConfigError, NeoBERTError, short_reason

Report = Callable[[Any], None]

_RETRIES = 3  # of a part whose Ray worker has died
_CONNECT_SECONDS = 10  # for any answer from the address of a cluster


class Workers:
    """Processes that wait for tasks, until they are closed.

    Args:
        function: Called as function(task, report); importable by its name, since workers are fresh interpreters.
        count: Number of processes.
        prepare: Called first in each of them, while the parent is still busy with what comes before the tasks.
    """

    def __init__(
        self, function: Callable[[Any, Report], Any], *, count: int, prepare: Callable[[], None] | None = None
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
        """Ends all of them, also those at work."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()

    def run(self, tasks: Iterable[Any], *, on_report: Report) -> Generator[Any, None, None]:
        """Results in the order in which they finish. All workers end with the last one, or when this is closed.

        Args:
            tasks: Handed out in order.
            on_report: Called here with each report of a function. A function that reports often ends soon when its
                parent is killed.

        Raises:
            ChildProcessError: A worker died, most often for want of memory.
            NeoBERTError, OSError: As raised by a function; anything else becomes a RuntimeError with the trace.
        """
        waiting = iter(tasks)
        running: dict[Connection, Any] = {}
        idle = list(self._processes)
        try:
            while True:
                for connection, task in zip(idle, waiting, strict=False):
                    running[connection] = task
                    self._exchange(connection, task, connection.send, task)
                if not running:
                    return
                idle = []
                for connection in cast(list[Connection], wait(list(running))):
                    kind, content = self._exchange(connection, running[connection], connection.recv)
                    if kind == "error":
                        raise content
                    if kind == "report":
                        on_report(content)
                        continue
                    del running[connection]
                    idle.append(connection)
                    yield content
        finally:
            self.close()

    def _exchange(self, connection: Connection, task: Any, action: Callable[..., Any], *arguments: Any) -> Any:
        """Sends to or receives from a worker."""
        try:
            return action(*arguments)
        except (EOFError, ConnectionError) as error:
            process = self._processes[connection]
            process.join()
            code = process.exitcode or 0
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            raise ChildProcessError(
                f"worker process {process.pid} {how} at {task}; if memory ran out, use fewer --workers, and "
                "continue with --resume"
            ) from error


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


class _ParentIsGone(BaseException):
    """Nobody reads what this worker reports. No Exception, so that no task can take it for an error of its own."""


def _work(function: Callable[[Any, Report], Any], prepare: Callable[[], None] | None, connection: Connection) -> None:
    if prepare:
        prepare()

    def report(news: Any) -> None:
        try:
            connection.send(("report", news))
        except OSError as error:
            raise _ParentIsGone from error

    try:
        while True:
            task = connection.recv()
            message: tuple[str, Any]
            try:
                message = "result", function(task, report)
            except (NeoBERTError, OSError, ModuleNotFoundError) as error:
                message = "error", error
            except Exception:  # our own bug: it may not be picklable, its trace is
                message = "error", RuntimeError(f"in a worker process:\n{traceback.format_exc()}")
            connection.send(message)
    except (EOFError, ConnectionError, _ParentIsGone):
        return


def run_tasks(
    function: Callable[[Any, Report], Any],
    tasks: Sequence[Any],
    *,
    workers: int | None,
    executor: Literal["local", "ray"] = "local",
    ray_address: str | None = None,
    on_report: Report = lambda _: None,
    started: Workers | None = None,
) -> Generator[Any, None, None]:
    """Results in the order in which they finish: of processes, of a cluster, or of this process if one is enough.

    Arguments and errors are those of `Workers` and `run_on_ray`; `started` are processes that wait for these tasks.
    """
    count = min(workers or 1, len(tasks))
    if executor == "ray" and tasks:
        yield from run_on_ray(function, tasks, workers=workers, address=ray_address)
    elif started or count > 1:
        yield from (started or Workers(function, count=count)).run(tasks, on_report=on_report)
    else:  # nothing to start, nothing to send
        for task in tasks:
            yield function(task, on_report)


def run_on_ray(
    function: Callable[[Any, Report], Any], tasks: Sequence[Any], *, workers: int | None, address: str | None
) -> Generator[Any, None, None]:
    """Results in the order in which they finish; closing the iterator cancels what is left.

    Args:
        function: As of `Workers`; what it reports is lost.
        tasks: Each needs one CPU of the cluster.
        workers: At most so many at once; None: as many as the cluster has room for.
        address: host:port of a cluster, or "local" for a new one on this machine, which ends with the iterator; None:
            what RAY_ADDRESS names, or a new one. "auto" is refused: Ray would look for a cluster in a file of the
            shared temporary folder, which any user may have written.

    Raises:
        ModuleNotFoundError: Ray is not installed.
        ConfigError: Ray does not start, there is no such cluster, or the address is "auto".
        ChildProcessError: A part's worker died again and again.
        NeoBERTError, OSError: As raised by the function.
    """
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    if address == "auto":
        raise ConfigError(
            "--ray-address auto may find the cluster of another user, who could run code here; name host:port of your "
            "cluster (ray status shows it), or local for a new one"
        )
    if address == "local":
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # before Ray is imported: it reads this once
    import ray

    environment: dict[str, Any] = {"py_modules": [str(Path(megatron_neobert.__file__).parent)]}
    if " " in sys.executable:  # Ray starts workers by a shell, and without quotes waits for them for ever
        environment["py_executable"] = shlex.quote(sys.executable)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        # Where nothing listens at host:port, Ray would try for minutes, and then end the process.
        host, separator, port = address.removeprefix("ray://").rpartition(":")
        if separator:
            socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
        ray.init(address, runtime_env=environment, log_to_driver=False, logging_level=logging.WARNING)
    except Exception as error:  # Ray raises anything, Exception itself where a node does not come up
        raise ConfigError(
            f"--ray-address {address}: no Ray cluster answers or starts ({short_reason(error)}); see ray status and "
            "the logs below RAY_TMPDIR, or use --executor local"
        ) from error
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray has put its own in its place
    node = ray.get_runtime_context().gcs_address
    print(f"Ray: {'started a cluster for this command' if address == 'local' else 'joined the cluster'} at {node}")
    remote = ray.remote(num_cpus=1, max_retries=_RETRIES)(_answer)
    waiting = iter(tasks)
    running: dict[Any, Any] = {}
    try:
        while True:
            for task in islice(waiting, (workers or len(tasks)) - len(running)):
                running[remote.remote(function, task)] = task
            if not running:
                return
            (done,), _ = ray.wait(list(running))
            task = running.pop(done)
            try:
                result = ray.get(done)
            except ray.exceptions.RayError as error:
                raise ChildProcessError(
                    f"the Ray worker at {task} died {_RETRIES + 1} times ({type(error).__name__}); if memory ran out, "
                    "use fewer --workers, and continue with --resume"
                ) from error
            if isinstance(result, Exception):
                raise result
            yield result
    finally:
        for reference in running:
            ray.cancel(reference, force=True)
        ray.shutdown()


def _answer(function: Callable[[Any, Report], Any], task: Any) -> Any:
    try:
        return function(task, lambda progress: None)
    except (NeoBERTError, OSError, ModuleNotFoundError) as error:
        return error  # raised here, Ray would wrap it in a class of its own
