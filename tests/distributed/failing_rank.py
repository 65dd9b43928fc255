"""The training command with a rank that fails at one stage, and a launcher that forks its ranks.

FAULT is `stage:rank:how`; the names are below. Forked ranks have imported everything, which saves most of a start.
"""

import importlib
import os
import signal
import sys
import time
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import processes

from megatron_neobert import launch, pretrain
from megatron_neobert.config import cli
from megatron_neobert.errors import SaveError, run_command
from megatron_neobert.runtime import watcher

LOOP, SETUP = "megatron_neobert.training.loop", "megatron_neobert.training.setup"
# Functions that a rank calls: before its watcher starts, during the imports, and once the imports are done.
STAGES = {
    "parsing": (cli, "parse_command_line"),
    "importing": ("megatron_neobert.model.kernels", "check_hardware"),
    "folders": (LOOP, "check_folders"),
    "data": (SETUP, "open_phases"),
    "joining": ("megatron_neobert.runtime.distributed", "initialize"),
    "disk": (LOOP, "refuse_full_disk"),
    "building": (LOOP, "build_run"),
    "loading": (LOOP, "find_checkpoint"),
    "training": (LOOP, "train_step"),
    "validating": (LOOP, "validation_step"),
    "finishing": ("megatron_neobert.runtime.distributed", "shut_down"),
}
CALLS = {"training": 3}  # the fault is in this call; otherwise in the first


def fail(how: str) -> None:
    """Print a line, and fail in one way."""
    print("the fault", flush=True)
    if how == "raise":
        raise ValueError("planted\x1b]0;owned\x07")
    if how == "refuse":
        raise SaveError("planted refusal.")
    if how.startswith("sys.exit"):
        sys.exit(int(how.split()[1]))
    if how.startswith("os._exit"):
        os._exit(int(how.split()[1]))
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how.startswith("stop"):
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(3600)


def plant(stage: str, how: str) -> None:
    """Replace the function of a stage."""
    module, name = STAGES[stage]
    module = importlib.import_module(module) if isinstance(module, str) else module
    function, calls = getattr(module, name), 0

    def failing(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == CALLS.get(stage, 1):
            fail(how)
        return function(*arguments, **options)

    setattr(module, name, failing)


def main() -> int:
    """Train like pretrain.py."""
    stage, rank, how = os.environ["FAULT"].split(":")
    if how == "stop for a minute":
        watcher._SILENT_TICKS = 8  # faster
    if os.environ["RANK"] != rank:
        return pretrain.main()
    if stage in ("parsing", "importing"):
        plant(stage, how)
        return pretrain.main()
    from megatron_neobert.model import kernels

    import_megatron = kernels.import_megatron

    def import_and_plant() -> None:
        import_megatron()
        plant(stage, how)

    kernels.import_megatron = import_and_plant
    return pretrain.main()


class ForkedRank(get_context("fork").Process):
    """A fork of the launcher that runs `main` as a rank, with the methods of Popen that the launcher uses."""

    def __init__(self, command: list[str], *, env: dict[str, str]) -> None:
        super().__init__(target=run_rank, args=(command[3:], env))
        self.start()

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self) -> int | None:
        self.join()
        return self.exitcode

    returncode = property(poll)


def run_rank(words: list[str], variables: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)
    processes._run_main(__name__, words)


def launch_forked() -> int:
    """Run the launcher with forked ranks."""
    launch.subprocess = SimpleNamespace(Popen=ForkedRank)
    return launch.main()


if __name__ == "__main__":
    run_command(main)
