"""Entry point of a run on each of its ranks: what `neobert train`, torchrun or srun start, as a module or a file."""

import os
import sys
from pathlib import Path

if __name__ == "__main__":  # of a file it is the folder of the file, whose modules are none by their short names
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from megatron_neobert.errors import run_command
from megatron_neobert.runtime import signals
from megatron_neobert.runtime.environment import world_size


def main() -> int:
    """Parses the flags, then builds and trains, or prints what would be trained."""
    signals.install_signal_handlers()  # first of all: the imports below take seconds
    from megatron_neobert.config.cli import parse_command_line

    command = parse_command_line(sys.argv[1:], world_size=world_size())
    if command.dry_run:
        from megatron_neobert.planning.plan import print_plan

        return print_plan(command.settings, world_size=world_size())
    if command.settings.parallel.tensor_model_parallel_size > 1:
        # CUDA reads it when it starts. Kernels then begin in the order of their launches, by which Megatron overlaps
        # the reductions of tensor parallelism with its matrix products.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    from megatron_neobert.model.kernels import check_hardware

    check_hardware(command.settings)  # before Megatron is imported: it imports any package called apex
    from megatron_neobert.runtime.megatron_imports import import_megatron

    import_megatron()
    from megatron_neobert.training.loop import run_training

    return run_training(command.settings)


if __name__ == "__main__":
    run_command(main)
