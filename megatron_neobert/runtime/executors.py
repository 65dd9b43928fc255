"""Executors of jobs: worker processes on this machine, and Ray clusters. Both return `concurrent.futures.Future`."""

import logging
import multiprocessing
import os
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any

import megatron_neobert
from megatron_neobert.errors import ConfigError, NeoBERTError, short_reason

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_RETRIES = 3  # retries of a job whose Ray worker died
_CONNECT_SECONDS = 10
_MOST_SUBMITTED_TO_RAY = 1 << 14


class WorkerPool:
    """A pool of worker processes. If a worker dies, this process raises an error. Workers end with this process."""

    def __init__(self, workers: int) -> None:
        self.most_submitted = 2 * workers
        self._context = _TrackingContext()
        with _deferred_stop_signals():  # the pool starts a process that removes semaphores
            self._pool = ProcessPoolExecutor(workers, self._context, _exit_with_parent)

    def submit(self, function: Callable[[Any], Any], job: Any) -> Future[Any]:
        """Queue `function(job)` for a worker and return its future. Raise ChildProcessError if a worker died."""
        with self._reporting_worker_death(job), _deferred_stop_signals():
            return self._pool.submit(function, job)

    def result(self, future: Future[Any], job: Any) -> Any:
        """Return the result of a finished future. Raise ChildProcessError, which names `job`, if a worker died."""
        with self._reporting_worker_death(job):
            return future.result()

    @contextmanager
    def _reporting_worker_death(self, job: Any) -> Iterator[None]:
        try:
            yield
        except BrokenProcessPool as error:
            raise ChildProcessError(
                f"a worker process died at {job} or a job beside it; if memory ran out, use fewer --workers, and "
                "continue with --resume"
            ) from error

    def close(self) -> None:
        """Kill all workers, including those that run a job."""
        with _deferred_stop_signals():
            for process in self._context.processes:
                process.terminate()
            self._pool.shutdown(cancel_futures=True)


@contextmanager
def _deferred_stop_signals() -> Iterator[None]:
    """Defer stop signals as `deferred` does, because an exception in the block could break a pool.

    Processes that start in the block never receive these signals. Ctrl-C and a scheduler's SIGTERM reach all processes
    of a group, but only this process should handle them.
    """
    with deferred(_STOP_SIGNALS):
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


@contextmanager
def deferred(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Delay the handling of these signals until the block has ended. Outside the main thread, do nothing."""
    received: list[int] = []
    # Python allows signal handlers in the main thread only.
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in signals} if is_main else {}
    for number in handlers:
        signal.signal(number, lambda signal_number, _: received.append(signal_number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for received_number in received:
            signal.raise_signal(received_number)


class _Worker(SpawnProcess):
    """A worker process. It never receives SIGTERM, so `terminate` kills it."""

    def terminate(self) -> None:
        self.kill()


class _TrackingContext(SpawnContext):
    """A multiprocessing context that records its processes."""

    # Spawn, because a fork would copy locks that other threads may hold.

    def __init__(self) -> None:
        super().__init__()
        self.processes: list[_Worker] = []

    def Process(self, *args: Any, **kwargs: Any) -> _Worker:  # type: ignore[override]
        process = _Worker(*args, **kwargs)
        self.processes.append(process)
        return process


def _exit_with_parent() -> None:
    """Start a thread that ends this worker process with exit code 1 as soon as its parent process has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a worker process calls this"

    def wait_for_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait_for_parent, daemon=True).start()


class RayCluster:
    """A Ray cluster that this process has joined or started; `close` leaves it.

    All nodes must see inputs and outputs under the same paths (a network file system, or URLs for the inputs). Ray
    copies this package to the nodes, and runs a job again if its worker or node died.

    Args:
        address: host:port of a cluster, or "local" for a new cluster on this machine. Default: the variable
            RAY_ADDRESS, or "local" if RAY_ADDRESS is not set.
        workers: Maximum number of concurrent jobs; None for the cluster's number of CPUs.

    Raises:
        ModuleNotFoundError: Ray is not installed.
        ConfigError: Ray does not start, no cluster answers, or the address is "auto".
    """

    def __init__(self, address: str | None, workers: int | None) -> None:
        self.most_submitted = workers or _MOST_SUBMITTED_TO_RAY
        address = address or os.environ.get("RAY_ADDRESS") or "local"
        if address == "auto":
            # Ray would read the address from a file in the shared temporary folder, which any user can write.
            raise ConfigError(
                "--ray-address auto may find the cluster of another user, who could run code here; name host:port of "
                "your cluster (ray status shows it), or local for a new cluster"
            )
        if address == "local":
            os.environ.setdefault("RAY_AUTH_MODE", "token")  # Ray reads this once, when it is imported
        import ray

        environment: dict[str, Any] = {"py_modules": [str(Path(megatron_neobert.__file__).parent)]}
        if " " in sys.executable:
            # Ray starts workers through a shell. Without quotes they never start, and Ray waits forever.
            environment["py_executable"] = shlex.quote(sys.executable)
        sigterm_handler = signal.getsignal(signal.SIGTERM)
        try:
            # If nothing listens at host:port, Ray would retry for minutes and then end the process.
            host, separator, port = address.removeprefix("ray://").rpartition(":")
            if separator:
                socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
            ray.init(address, runtime_env=environment, log_to_driver=False, logging_level=logging.WARNING)
        except Exception as error:  # Ray raises many classes, and plain Exception if a node does not start
            raise ConfigError(
                f"--ray-address {address}: no Ray cluster answers or starts ({short_reason(error)}); see ray status "
                "and the logs below RAY_TMPDIR, or use --executor local"
            ) from error
        finally:
            signal.signal(signal.SIGTERM, sigterm_handler)  # ray.init replaces it
        node = ray.get_runtime_context().gcs_address
        action = "started a cluster for this command" if address == "local" else "joined the cluster"
        print(f"Ray: {action} at {node}")
        self._ray = ray
        self._remote = ray.remote(num_cpus=1, max_retries=_RETRIES)(_run_remotely)

    def submit(self, function: Callable[[Any], Any], job: Any) -> Future[Any]:
        """Submit `function(job)` to the cluster and return its future."""
        # The future keeps Ray's reference to the result alive.
        future: Future[Any] = self._remote.remote(function, job).future()
        return future

    def result(self, future: Future[Any], job: Any) -> Any:
        """Return the result of a finished future. The message of ChildProcessError names `job`.

        Raises:
            NeoBERTError, OSError, ModuleNotFoundError: The exception that the job raised.
            RayTaskError: The job raised any other exception, which is a bug.
            ChildProcessError: The job's worker died at every attempt.
        """
        try:
            result = future.result()
        except self._ray.exceptions.RayTaskError:
            raise  # has the traceback of the worker
        except self._ray.exceptions.RayError as error:
            raise ChildProcessError(
                f"the Ray worker at {job} died {_RETRIES + 1} times ({type(error).__name__}); if memory ran out, use "
                "fewer --workers, and continue with --resume"
            ) from error
        if isinstance(result, Exception):
            raise result
        return result

    def close(self) -> None:
        """Leave the cluster. Jobs that have not ended are cancelled."""
        self._ray.shutdown()


def _run_remotely(function: Callable[[Any], Any], job: Any) -> Any:
    try:
        return function(job)
    except (NeoBERTError, OSError, ModuleNotFoundError) as error:
        # Returned instead of raised, because Ray would wrap the exception in its own class.
        return error
