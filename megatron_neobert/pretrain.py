"""Entry point of each rank of a training run. `neobert train`, torchrun and srun start it as a module or a file."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    # When run as a file, Python puts this folder on sys.path. Replace it so that imports go through the package.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from megatron_neobert.errors import run_command
from megatron_neobert.runtime import signals
from megatron_neobert.runtime.environment import local_rank, world_size

if TYPE_CHECKING:  # slow to import
    from megatron_neobert.config.schema import Settings
    from megatron_neobert.runtime.watcher import Watcher


def main() -> int:
    """Train with the settings in `sys.argv`, or print the plan with --dry-run. Collective: all ranks.

    Returns:
        0 after training or the plan, 75 if stopped after saving a checkpoint, 130 if stopped without one.
    """
    # The imports below take seconds.
    signals.install_signal_handlers()
    from megatron_neobert.config.cli import parse_command_line

    command = parse_command_line(sys.argv[1:], world_size=world_size())
    if command.dry_run:
        from megatron_neobert.planning.forecast import open_or_assume_phases
        from megatron_neobert.planning.plan import print_plan

        opened = open_or_assume_phases(command.settings)
        return print_plan(command.settings, opened, command.plan, world_size=command.world_size)
    from megatron_neobert.runtime.watcher import Watcher

    with Watcher(limit_seconds=60.0 * command.settings.parallel.distributed_timeout_minutes) as watcher:
        return train(command.settings, watcher)


def train(settings: "Settings", watcher: "Watcher") -> int:
    """Prepare torch and Megatron, train, and return the exit code for `main`. Collective: all ranks."""
    # Inductor would start a process per core in each rank, and all ranks compile at the same time.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if settings.parallel.tensor_model_parallel_size > 1:
        # CUDA reads this when it starts. Kernels then start in launch order, which Megatron needs to overlap
        # tensor-parallel reductions with matrix products.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    import torch

    from megatron_neobert.model.kernels import check_hardware, import_megatron

    watcher.mark("importing Megatron")
    if torch.cuda.is_available():
        # Before a package asks for the current device, or each rank of a node would use memory of the first GPU.
        torch.cuda.set_device(local_rank())
    # Before Megatron is imported, because Megatron imports any package named apex.
    check_hardware(settings)
    import_megatron()
    from megatron_neobert.training.loop import run_training

    return run_training(settings, watcher)


if __name__ == "__main__":
    run_command(main)
