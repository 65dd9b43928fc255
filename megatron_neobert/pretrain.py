"""Entry point of a run: `python -m megatron_neobert.pretrain`, or under torchrun on every rank. No logic of its own."""

import sys

from megatron_neobert.environment import world_size
from megatron_neobert.errors import run_command
from megatron_neobert.training import stopping


def main() -> int:
    """Parses the flags, then builds and trains, or says what would be trained."""
    stopping.install_signal_handlers()  # before torch is imported: a signal during the imports must not be lost
    from megatron_neobert.flags import parse_command_line

    command = parse_command_line(sys.argv[1:], world_size=world_size())
    if command.dry_run:
        from megatron_neobert.training.plan import print_plan

        return print_plan(command.settings, world_size=world_size())
    from megatron_neobert.training.loop import run_training

    return run_training(command.settings)


if __name__ == "__main__":
    run_command(main)
