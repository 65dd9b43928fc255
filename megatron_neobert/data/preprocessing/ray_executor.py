"""Parts tokenised by the workers of a Ray cluster, existing or started here for the occasion.

All nodes must see the shards and PREFIX.partial under the same paths (a network file system, or URLs for the shards);
the package itself travels with the job. A worker or node that dies costs its part another try.
"""

import logging
import os
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Generator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import megatron_neobert
from megatron_neobert.data.preprocessing.part_tasks import PartDamage, PartResult, PartTask, tokenize_part
from megatron_neobert.errors import ConfigError, NeoBERTError, short_reason

_RETRIES = 3
_CONNECT_SECONDS = 10


def run_on_ray(
    tasks: Sequence[PartTask], *, workers: int | None, address: str | None
) -> Generator[PartResult | PartDamage, None, None]:
    """Results in the order in which they finish; closing the iterator cancels what is left.

    Args:
        tasks: Each needs one CPU of the cluster.
        workers: At most so many at once; None: as many as the cluster has room for.
        address: "auto" or host:port of a cluster, "local" for a new one on this machine; None: what RAY_ADDRESS says,
            or the cluster that runs on this machine, or a new one.

    Raises:
        ConfigError: Ray is not installed, does not start, or there is no such cluster.
        ChildProcessError: A part's worker died again and again.
        NeoBERTError, OSError: As raised by `tokenize_part`.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ConfigError(
            "--executor ray needs the package ray; install it with pip install 'megatron-neobert[ray]'"
        ) from error
    environment: dict[str, Any] = {"py_modules": [str(Path(megatron_neobert.__file__).parent)]}
    if " " in sys.executable:  # Ray starts workers by a shell, and without quotes waits for them for ever
        environment["py_executable"] = shlex.quote(sys.executable)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    address = address or os.environ.get("RAY_ADDRESS")
    try:
        _check_address(address)
        ray.init(address, runtime_env=environment, log_to_driver=False, logging_level=logging.WARNING)
    except Exception as error:  # Ray raises anything, Exception itself where a node does not come up
        if address in (None, "auto", "local"):
            problem = f"--executor ray: Ray does not start or connect on this machine ({short_reason(error)})"
            remedy = "look into its logs below RAY_TMPDIR, or use --executor local"
        else:
            problem = f"--ray-address {address}: no Ray cluster answers there ({short_reason(error)})"
            remedy = "see ray status, or start one"
        raise ConfigError(f"{problem}; {remedy}") from error
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray has put its own in its place
    function = ray.remote(num_cpus=1, max_retries=_RETRIES)(_tokenize)
    waiting = iter(tasks)
    running: dict[Any, PartTask] = {}
    try:
        while True:
            for task in islice(waiting, (workers or len(tasks)) - len(running)):
                running[function.remote(task)] = task
            if not running:
                return
            (done,), _ = ray.wait(list(running))
            task = running.pop(done)
            yield _result_of(task, ray.get, done, ray.exceptions.RayError)
    finally:
        for reference in running:
            ray.cancel(reference, force=True)
        ray.shutdown()


def _check_address(address: str | None) -> None:
    """Raises OSError where nothing listens at host:port; Ray would try for minutes, and then end the process."""
    host, separator, port = (address or "").removeprefix("ray://").rpartition(":")
    if separator:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()


def _tokenize(task: PartTask) -> PartResult | PartDamage | Exception:
    try:
        return tokenize_part(task, lambda progress: None)
    except (NeoBERTError, OSError) as error:
        return error  # raised here, Ray would wrap it in a class of its own


def _result_of(
    task: PartTask, get: Callable[[Any], Any], reference: Any, ray_error: type[Exception]
) -> PartResult | PartDamage:
    try:
        result = get(reference)
    except ray_error as error:
        raise ChildProcessError(
            f"the Ray worker at {task} died {_RETRIES + 1} times ({type(error).__name__}); if memory ran out, use "
            "fewer --workers, and go on with --resume"
        ) from error
    if isinstance(result, Exception):
        raise result
    assert isinstance(result, PartResult | PartDamage), f"{result=}"
    return result
