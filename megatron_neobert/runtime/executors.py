"""Executors of jobs: worker processes of this machine, and Ray clusters. Both give `concurrent.futures.Future`s."""

import logging
import multiprocessing
import os
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any

import megatron_neobert
from megatron_neobert.errors import ConfigError, NeoBERTError, short_reason

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_EXIT_CODE_SECONDS = 1.0  # between the end of a worker and the note of its code by another thread, at most
_RETRIES = 3  # of a job whose Ray worker has died
_CONNECT_SECONDS = 10  # for any answer from the address of a cluster
_MOST_SUBMITTED_TO_RAY = 1 << 14


class WorkerPool:
    """Processes that neither hang this one nor survive it, until they are closed."""

    def __init__(self, workers: int) -> None:
        self.most_submitted = 2 * workers
        self._context = _TrackingContext()
        with _deferred_stop_signals():  # the pool starts the process that removes semaphores
            self._pool = ProcessPoolExecutor(workers, self._context, _exit_with_parent)

    def submit(self, function: Callable[[Any], Any], job: Any) -> Future[Any]:
        """Hand a job to a worker. Raise ChildProcessError if a worker died."""
        with self._named_death(job), _deferred_stop_signals():
            return self._pool.submit(function, job)

    def result(self, future: Future[Any], job: Any) -> Any:
        """Return the result of a job that has ended.

        Raises:
            ChildProcessError: A worker died.
            Exception: The job raised it.
        """
        with self._named_death(job):
            return future.result()

    @contextmanager
    def _named_death(self, job: Any) -> Iterator[None]:
        try:
            yield
        except BrokenProcessPool as error:
            raise ChildProcessError(
                f"{self._context.describe_death()} at {job} or a job beside it; if memory ran out, use fewer "
                "--workers, and continue with --resume"
            ) from error

    def close(self) -> None:
        """End all processes, also those at work."""
        with _deferred_stop_signals():
            for process in self._context.processes:
                process.terminate()
            self._pool.shutdown(cancel_futures=True)


@contextmanager
def _deferred_stop_signals() -> Iterator[None]:
    """Handle stop signals at the end of the block: an exception of a handler would leave a pool half changed.

    Processes that start in the block inherit the signals as blocked, which lasts for their lives: Ctrl-C and a
    scheduler's SIGTERM go to all processes of a group, and this process decides what a signal means.
    """
    received: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()  # no other may set a handler
    handlers = {number: signal.getsignal(number) for number in _STOP_SIGNALS} if is_main else {}
    for number in handlers:
        signal.signal(number, lambda signal_number, _: received.append(signal_number))
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for again in received:
            signal.raise_signal(again)


class _Worker(SpawnProcess):
    """A worker process that remembers whether this process ended it."""

    is_ended_here = False

    def terminate(self) -> None:
        if self.pid is not None and not wait([self.sentinel], timeout=0):
            self.is_ended_here = True
            self.kill()


class _TrackingContext(SpawnContext):
    """A context that keeps its processes. Spawn: a fork would copy the locks of other threads in any state."""

    def __init__(self) -> None:
        super().__init__()
        self.processes: list[_Worker] = []

    def Process(self, *args: Any, **kwargs: Any) -> _Worker:  # type: ignore[override]
        process = _Worker(*args, **kwargs)
        self.processes.append(process)
        return process

    def describe_death(self) -> str:
        """Name the process that broke the pool, and how it ended."""
        for process in self.processes:
            if not process.is_ended_here and process.pid is not None and wait([process.sentinel], timeout=0):
                process.join()
                # The pool's own thread waits for the process as well; the one that comes second has no code at first.
                until = time.monotonic() + _EXIT_CODE_SECONDS
                while (code := process.exitcode) is None and time.monotonic() < until:
                    time.sleep(0.01)
                if code is None:
                    break
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                return f"worker process {process.pid} {how}"
        return "a worker process died"


def _exit_with_parent() -> None:
    """Exit with the parent; called in a worker process."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "this is a worker"

    def wait_for_its_end() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait_for_its_end, daemon=True).start()


class RayCluster:
    """A Ray cluster that this process has joined, or started for itself, until it is closed.

    All nodes must see inputs and outputs under the same paths (a network file system, or URLs for the inputs); the
    package itself travels with the jobs. A worker or node that dies costs its job another try.

    Args:
        address: host:port of a cluster, or "local" for a new one on this machine; None: what RAY_ADDRESS names, or a
            new one. "auto" is refused: Ray would look for a cluster in a file of the shared temporary folder, which any
            user may have written.
        workers: The most jobs at a time; None: as many as the cluster has CPUs.

    Raises:
        ModuleNotFoundError: Ray is not installed.
        ConfigError: Ray does not start, there is no such cluster, or the address is "auto".
    """

    def __init__(self, address: str | None, workers: int | None) -> None:
        self.most_submitted = workers or _MOST_SUBMITTED_TO_RAY
        address = address or os.environ.get("RAY_ADDRESS") or "local"
        if address == "auto":
            raise ConfigError(
                "--ray-address auto may find the cluster of another user, who could run code here; name host:port of "
                "your cluster (ray status shows it), or local for a new one"
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
                f"--ray-address {address}: no Ray cluster answers or starts ({short_reason(error)}); see ray status "
                "and the logs below RAY_TMPDIR, or use --executor local"
            ) from error
        finally:
            signal.signal(signal.SIGTERM, on_sigterm)  # Ray has put its own in its place
        node = ray.get_runtime_context().gcs_address
        how = "started a cluster for this command" if address == "local" else "joined the cluster"
        print(f"Ray: {how} at {node}")
        self._ray = ray
        self._remote = ray.remote(num_cpus=1, max_retries=_RETRIES)(_answer)

    def submit(self, function: Callable[[Any], Any], job: Any) -> Future[Any]:
        future: Future[Any] = self._remote.remote(function, job).future()  # which keeps the reference
        return future

    def result(self, future: Future[Any], job: Any) -> Any:
        """Return the result of a job that has ended.

        Raises:
            ChildProcessError: The job's worker died again and again.
            Exception: The job raised it.
        """
        try:
            result = future.result()
        except self._ray.exceptions.RayError as error:
            raise ChildProcessError(
                f"the Ray worker at {job} died {_RETRIES + 1} times ({type(error).__name__}); if memory ran out, use "
                "fewer --workers, and continue with --resume"
            ) from error
        if isinstance(result, Exception):
            raise result
        return result

    def close(self) -> None:
        """Leave the cluster, which ends the jobs that are left."""
        self._ray.shutdown()


def _answer(function: Callable[[Any], Any], job: Any) -> Any:
    try:
        return function(job)
    except (NeoBERTError, OSError, ModuleNotFoundError) as error:
        return error  # raised here, Ray would wrap it in a class of its own
