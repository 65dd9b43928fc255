"""Processes that start in a tenth of a second: forked from a server that has imported torch and Megatron already.

pytest's own process cannot be that server: after one test has had a gloo group in it, a fork of it that forms another
group crashes. multiprocessing's fork server is a fresh interpreter, started at the first use by each worker of pytest.
"""

import importlib
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from multiprocessing import forkserver, get_context
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import pytest
from torch import multiprocessing
from torch.distributed import TCPStore

from megatron_neobert.runtime.store import serve_store

_SERVERS: dict[str, forkserver.ForkServer] = {}
_STARTING = threading.Lock()
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC_PER_NODE")


class Ended(NamedTuple):
    """How a command ended, and what it printed on both streams."""

    code: int
    output: str

    @property
    def errors(self) -> list[str]:
        return [line for line in self.output.splitlines() if line.startswith("error")]

    def refused(self, code: int) -> bool:
        """One sentence, this exit code, no traceback."""
        return self.code == code and len(self.errors) == 1 and "Traceback" not in self.output


def run_on_ranks(function: Callable[..., None], *arguments: Any, world_size: int, preload: str = "preloaded") -> None:
    """Calls a function in `world_size` processes that torch's env:// can join; raises if one of them fails.

    Args:
        preload: Module that the processes have imported; each has a server of its own.
    """
    store = serve_store("127.0.0.1", 0, nodes=world_size)
    call = _Call(function, arguments, {**os.environ, **group_of(store, world_size=world_size)}, (1, 2))
    use_server(preload)
    multiprocessing.start_processes(_run_rank, args=(call,), nprocs=world_size, start_method="forkserver")


def group_of(store: TCPStore, *, world_size: int) -> dict[str, str]:
    """Where ranks meet whose store stands already: a port that was only looked for may be taken a moment later."""
    where = {"MASTER_ADDR": store.host, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return {"WORLD_SIZE": str(world_size), **where}


def run_command(
    module: str,
    *arguments: Any,
    environment: dict[str, str] | None = None,
    preload: str = "preloaded",
    limit_seconds: float | None = None,
) -> Ended:
    """Run `main` of a command's module as its script would, outside any launcher or Slurm job.

    Args:
        preload: Module that the process has imported; each has a server of its own.
        limit_seconds: Kill the process after this time; its exit code is then -9.
    """
    with tempfile.TemporaryFile() as output:
        words = [str(argument) for argument in arguments]
        streams = (output.fileno(), output.fileno())
        call = _Call(_run_main, (module, words), {**clean_environment(), **(environment or {})}, streams)
        use_server(preload)
        process = get_context("forkserver").Process(target=call)
        process.start()
        process.join(limit_seconds)
        if process.is_alive():
            process.kill()
            process.join()
        output.seek(0)
        assert process.exitcode is not None
        return Ended(process.exitcode, output.read().decode())


def clean_environment() -> dict[str, str]:
    """Return this process's environment without what a launcher or a Slurm job left in it."""
    return {name: value for name, value in os.environ.items() if name not in _LAUNCHERS and "SLURM" not in name}


def use_server(preload: str = "preloaded") -> None:
    """Starts it where that is needed; multiprocessing knows one, by these two names."""
    # Tests start commands in several threads, and each would restore the PYTHONPATH that another has set.
    with _STARTING, pytest.MonkeyPatch.context() as patch:
        server = _SERVERS.setdefault(preload, forkserver.ForkServer())
        forkserver.ensure_running = server.ensure_running
        forkserver.connect_to_new_process = server.connect_to_new_process
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        server.set_forkserver_preload([preload])
        server.ensure_running()


class _Call:
    """A function with its arguments, environment, working directory and streams, on its way to a process."""

    def __init__(self, function: Any, arguments: Any, environment: dict[str, str], streams: tuple[int, int]) -> None:
        self.content = cloudpickle.dumps((function, arguments))  # closures too
        self.environment, self.folder, self.streams = environment, Path.cwd(), streams

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "streams": tuple(DupFd(stream) for stream in self.streams)}

    def __call__(self) -> None:
        for number, stream in zip((1, 2), self.streams, strict=True):
            os.dup2(stream.detach(), number)  # type: ignore[attr-defined]
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        multiprocessing.set_start_method(None, force=True)  # what a shell's process has; a fork server's child keeps it
        function, arguments = cloudpickle.loads(self.content)
        function(*arguments)


def _run_rank(rank: int, call: _Call) -> None:
    call.environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    call()


def _run_main(module: str, words: list[str]) -> None:
    from megatron_neobert.errors import run_command as run_main

    module, _, function = module.partition(":")
    sys.argv = [module, *words]
    try:
        run_main(getattr(importlib.import_module(module), function or "main"))
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
