"""Starts a training script on the ranks of this node: `python -m megatron_neobert.launch SCRIPT [flags]`.

Checks the flags before any process is started, on several nodes together with the other nodes, hands the script to
torchrun, and ends with the exit code of the rank that failed first. After a crash it starts the ranks again, if it is
allowed to.

Environment: NPROC_PER_NODE (default: the number of GPUs, or 1), NNODES (1), NODE_RANK, MASTER_ADDR and MASTER_PORT
(needed with more than one node; srun gives the first two), RENDEZVOUS_TIMEOUT_SECONDS (600), MAX_RESTARTS (0, on one
node). See docs/launching.md.
"""

import os
import shutil
import signal
import sys
from dataclasses import asdict, replace
from pathlib import Path

from megatron_neobert.checkpoint.folder import check_folders, has_stop_file
from megatron_neobert.checkpoint.start import refuse_full_disk, refuse_unfit_start
from megatron_neobert.cli import flag_of
from megatron_neobert.config.cli import parse_command_line
from megatron_neobert.config.schema import CheckpointConfig
from megatron_neobert.data.batches.inputs import open_phases
from megatron_neobert.errors import EXIT_IO_ERROR, ConfigError, NeoBERTError, run_command
from megatron_neobert.runtime import signals
from megatron_neobert.runtime.environment import CHECKED_BY_LAUNCHER, find_node, whole_number
from megatron_neobert.runtime.rendezvous import Report, agree_to_start
from megatron_neobert.runtime.torchrun import is_crash, run_ranks


def train() -> int:
    """`neobert train [flags]`: starts this package's own script."""
    sys.argv.insert(1, str(Path(__file__).with_name("pretrain.py")))
    return main()


def main() -> int:
    """Checks, then starts; `--help` and `--dry-run` are answered here and start nothing."""
    if len(sys.argv) < 2:
        raise ConfigError("usage: python -m megatron_neobert.launch SCRIPT [flags]")
    script, *arguments = sys.argv[1:]
    signals.pass_on_stop_signals()
    node, max_restarts = find_node(), whole_number("MAX_RESTARTS", "0", minimum=0)
    nproc = whole_number("NPROC_PER_NODE", str(_default_processes()))
    timeout_seconds = whole_number("RENDEZVOUS_TIMEOUT_SECONDS", "600")
    own, world_size = Report(rank=node.rank), node.nodes * nproc
    try:
        command = parse_command_line(arguments, world_size=world_size)
        if max_restarts:
            check_restarts(command.settings.checkpoint, nodes=node.nodes)
        inputs = open_phases(command.settings)  # once and now, before any rank is started
        # Of several nodes one tries to create --save, which all of them share.
        check_folders(command.settings.checkpoint, create=node.rank == 0 and not command.dry_run)
        refuse_unfit_start(command.settings, inputs)
        refuse_full_disk(command.settings, vocab_size=inputs[0].tokenizer.vocab_size)
        # What all nodes must be started with alike, by the name that the user knows.
        start = {"NNODES": str(node.nodes), "NPROC_PER_NODE": str(nproc)}
        for section in asdict(command.settings).values():
            start |= {flag_of(name): str(value) for name, value in section.items()}
        own = replace(own, start=start)
    except (NeoBERTError, OSError) as error:
        if node.nodes == 1 or "--dry-run" in arguments:
            raise
        print(f"error: {error}", file=sys.stderr, flush=True)  # now: the other nodes may take a while to be told
        exit_code = error.exit_code if isinstance(error, NeoBERTError) else EXIT_IO_ERROR
        own = replace(own, problem=str(error), exit_code=exit_code)
    if not own.problem and command.dry_run:
        from megatron_neobert.planning.plan import print_plan

        return print_plan(command.settings, world_size=world_size)
    os.environ[CHECKED_BY_LAUNCHER] = "1"
    if world_size == 1 and not max_restarts:
        # Kept back until the rank is prepared for them: it will be this process, for a moment without any handler.
        signal.pthread_sigmask(signal.SIG_BLOCK, signals.STOP_SIGNALS)
        os.execv(sys.executable, [sys.executable, script, *arguments])
    if node.nodes > 1:
        where = f"node {node.rank} of {node.nodes} on {own.host}"
        if not own.problem:
            place = f"rendezvous at {node.address} port {node.port}, for at most {timeout_seconds} s"
            print(f"{where} can start; {place}", file=sys.stderr, flush=True)
        verdict, _store = agree_to_start(node, own, timeout_seconds=timeout_seconds)
        if verdict.problem:
            if verdict is not own:
                print(f"error: node {verdict.rank} ({verdict.host}): {verdict.problem}", file=sys.stderr)
            return verdict.exit_code
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // nproc)))
    options = [f"--nproc-per-node={nproc}", f"--rdzv-conf=timeout={timeout_seconds}"]
    for restart in range(1, max_restarts + 1):
        code = run_ranks(node, [*options, script, *arguments])
        if not is_crash(code) or signals.passed_on or has_stop_file(command.settings.checkpoint.save):
            return code
        print(f"restart {restart} of {max_restarts}, from the last checkpoint", file=sys.stderr, flush=True)
    return run_ranks(node, [*options, script, *arguments])


def _default_processes() -> int:
    if shutil.which("nvidia-smi") is None:
        return 1  # without asking torch, whose import takes longer than everything else here
    import torch

    return max(1, torch.cuda.device_count())


def check_restarts(checkpoint: CheckpointConfig, *, nodes: int) -> None:
    """Refuses restarts that could not resume the run.

    Raises:
        ConfigError: MAX_RESTARTS does not fit to the rest.
    """
    if nodes > 1:
        raise ConfigError(
            f"MAX_RESTARTS is set for {nodes} nodes, but a launcher restarts the ranks of its own node alone; unset it "
            "and let the cluster start the job again."
        )
    if not checkpoint.loads_save:
        raise ConfigError(
            f"MAX_RESTARTS is set, but --save is {checkpoint.save} and --load is {checkpoint.load}; give both the same "
            "folder, or a restarted run could not resume."
        )


if __name__ == "__main__":
    run_command(main)
