"""Starts a training script on the ranks of this node: `python -m megatron_neobert.launch SCRIPT [flags]`.

Checks the flags before any process is started, hands the script to torchrun, and ends with the exit code of the rank
that failed first.

Environment: NPROC_PER_NODE (default: the number of GPUs, or 1), NNODES (1), NODE_RANK, MASTER_ADDR and MASTER_PORT
(needed with more than one node; srun gives the first two), RENDEZVOUS_TIMEOUT_SECONDS (600). See docs/launching.md.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

from megatron_neobert.checkpoint.folder import check_folders
from megatron_neobert.checkpoint.start import refuse_full_disk, refuse_unfit_start
from megatron_neobert.config.cli import parse_command_line
from megatron_neobert.data.batches.inputs import open_phases
from megatron_neobert.errors import ConfigError, run_command
from megatron_neobert.runtime import signals
from megatron_neobert.runtime.environment import find_node, whole_number
from megatron_neobert.runtime.torchrun import run_ranks


def train() -> int:
    """Start this package's own script: `neobert train [flags]`."""
    sys.argv.insert(1, str(Path(__file__).with_name("pretrain.py")))
    return main()


def main() -> int:
    """Check, then start the ranks; `--help` and `--dry-run` are answered here and start no rank."""
    if len(sys.argv) < 2:
        raise ConfigError("usage: python -m megatron_neobert.launch SCRIPT [flags]")
    script, *arguments = sys.argv[1:]
    signals.pass_on_stop_signals()
    if "MAX_RESTARTS" in os.environ:
        print("warning: MAX_RESTARTS is not read any more; torchrun --max-restarts replaces it", file=sys.stderr)
    node = find_node()
    nproc = whole_number("NPROC_PER_NODE", str(_default_processes()))
    timeout_seconds = whole_number("RENDEZVOUS_TIMEOUT_SECONDS", "600")
    world_size = node.nodes * nproc
    command = parse_command_line(arguments, world_size=world_size)
    settings = command.settings
    inputs = open_phases(settings)  # once and now, before any rank is started
    check_folders(settings.checkpoint)
    refuse_unfit_start(settings, inputs)
    refuse_full_disk(settings, vocab_size=inputs[0].tokenizer.vocab_size)
    if command.dry_run:
        from megatron_neobert.planning.plan import print_plan

        return print_plan(settings, world_size=world_size)
    if world_size == 1:
        # Kept back until the rank is prepared for them: it will be this process, for a moment without any handler.
        signal.pthread_sigmask(signal.SIG_BLOCK, signals.STOP_SIGNALS)
        os.execv(sys.executable, [sys.executable, script, *arguments])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // nproc)))
    return run_ranks(node, [script, *arguments], nproc=nproc, timeout_seconds=timeout_seconds)


def _default_processes() -> int:
    if shutil.which("nvidia-smi") is None:
        return 1  # without asking torch, whose import takes longer than everything else here
    import torch

    return max(1, torch.cuda.device_count())


if __name__ == "__main__":
    run_command(main)
