"""The training command with something broken on purpose, in place of examples/pretrain_neobert.sh.

FAULTS lists what, as `name:rank:iteration`; the names are those of the functions below.
"""

import os
import resource
from typing import Any

from megatron_neobert import pretrain
from megatron_neobert.errors import run_command
from megatron_neobert.runtime import signals
from megatron_neobert.state import Run
from megatron_neobert.training import loop

RANK = os.environ.get("RANK", "0")
LARGEST_FILE_BYTES = 1 << 16


def crash(run: Run) -> None:
    """Once: a process that was started again does not crash."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise RuntimeError("crashed on purpose")


def clock_ahead(run: Run) -> None:
    """By an hour, as if this rank had started that much earlier."""
    signals._started_seconds -= 3600


def file_size_limit(run: Run) -> None:
    """From now on this rank can write no large file: EFBIG, from the kernel."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE_BYTES, LARGEST_FILE_BYTES))


def install(faults: str) -> None:
    """Wraps the training step of this rank."""
    wanted = [fault.split(":") for fault in faults.split()]
    train_step = loop.train_step

    def broken_step(run: Run, batches: Any) -> Any:
        for name, rank, iteration in wanted:
            if rank == RANK and int(iteration) == run.state.iteration + 1:
                globals()[name](run)
        return train_step(run, batches)

    loop.train_step = broken_step


if __name__ == "__main__":
    install(os.environ.get("FAULTS", ""))
    try:
        run_command(pretrain.main)
    except SystemExit as end:
        print(f"rank {RANK} ends with {end.code}", flush=True)
        raise
