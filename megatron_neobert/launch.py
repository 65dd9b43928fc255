"""Starts a training script on the ranks of this node: `python -m megatron_neobert.launch SCRIPT [flags]`.

Checks the flags before any process is started, hands the script to torchrun, and ends with the exit code of the rank
that failed first (torchrun itself always ends with 1, so nobody could tell a preempted run from a broken one).

Environment: NPROC_PER_NODE (default: the number of GPUs, or 1), NNODES (1), NODE_RANK (0), MASTER_ADDR and MASTER_PORT
(needed with more than one node).
"""

import logging
import os
import shutil
import signal
import sys
from types import FrameType

import psutil

from megatron_neobert.data.inputs import open_inputs
from megatron_neobert.errors import ConfigError, run_command
from megatron_neobert.flags import parse_command_line
from megatron_neobert.training.checkpoint_files import check_folders


def main() -> int:
    """Checks, then starts; `--help` and `--dry-run` are answered here and start nothing."""
    if len(sys.argv) < 2:
        raise ConfigError("usage: python -m megatron_neobert.launch SCRIPT [flags]")
    script, *arguments = sys.argv[1:]
    nnodes = _whole_number("NNODES", "1")
    nproc = _whole_number("NPROC_PER_NODE", str(_default_processes()))
    command = parse_command_line(arguments, world_size=nnodes * nproc)
    open_inputs(command.settings.data)  # once and at once, before any rank is started
    check_folders(command.settings.checkpoint)
    if command.dry_run:
        from megatron_neobert.training.plan import print_plan

        return print_plan(command.settings, world_size=nnodes * nproc)
    if nnodes * nproc == 1:
        os.execv(sys.executable, [sys.executable, script, *arguments])
    return _run_torchrun(script, arguments, nnodes=nnodes, nproc=nproc)


def _default_processes() -> int:
    if shutil.which("nvidia-smi") is None:
        return 1  # without asking torch, whose import takes longer than everything else here
    import torch

    return max(1, torch.cuda.device_count())


def _whole_number(name: str, default: str) -> int:
    text = os.environ.get(name, default)
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"the environment variable {name} is {text!r}; it must be a whole number of at least 1.")
    return int(text)


def _run_torchrun(script: str, arguments: list[str], *, nnodes: int, nproc: int) -> int:
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if nnodes == 1:
        rendezvous = ["--standalone"]
    else:
        rendezvous = [f"--node-rank={os.environ.get('NODE_RANK', '0')}"]
        rendezvous += [f"--master-addr={_required('MASTER_ADDR')}", f"--master-port={_required('MASTER_PORT')}"]
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the rank's own message says more
    # Not torchrun's way with these signals: it would kill the ranks 30 s later, in the middle of saving.
    rendezvous.append("--signals-to-handle=SIGHUP,SIGQUIT")
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, _forward_to_ranks)
    options = torchrun.parse_args([f"--nnodes={nnodes}", f"--nproc-per-node={nproc}", *rendezvous, script, *arguments])
    try:
        torchrun.run(options)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            print(f"error: rank {rank} was ended by signal {-failure.exitcode}", file=sys.stderr)
            return 128 - failure.exitcode
        return failure.exitcode
    return 0


def _forward_to_ranks(number: int, frame: FrameType | None) -> None:
    """The ranks save and end by themselves; torchrun then ends with their exit code."""
    for rank in psutil.Process().children():
        rank.send_signal(number)


def _required(name: str) -> str:
    if name not in os.environ:
        raise ConfigError(f"NNODES is above 1 but {name} is not set; export the address and port of the first node.")
    return os.environ[name]


if __name__ == "__main__":
    run_command(main)
