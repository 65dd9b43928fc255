"""The training command with injected faults, instead of examples/pretrain_neobert.sh.

The environment variable FAULTS lists faults as `name:rank:iteration`. Names are those of the functions below.
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


def clock_ahead(run: Run) -> None:
    """Set this rank's start time back by an hour."""
    signals._started_seconds -= 3600


def file_size_limit(run: Run) -> None:
    """Let the kernel refuse large files of this rank with EFBIG from now on."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE_BYTES, LARGEST_FILE_BYTES))


def install(faults: str) -> None:
    """Inject faults before the training steps of this rank."""
    train_step = loop.train_step

    def faulty_step(run: Run, batches: Any) -> Any:
        for name, rank, iteration in (fault.split(":") for fault in faults.split()):
            if rank == RANK and int(iteration) == run.state.iteration + 1:
                globals()[name](run)
        return train_step(run, batches)

    loop.train_step = faulty_step


if __name__ == "__main__":
    install(os.environ.get("FAULTS", ""))
    run_command(pretrain.main)
