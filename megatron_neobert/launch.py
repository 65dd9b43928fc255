"""Starts a training script on the ranks of this node: `python -m megatron_neobert.launch SCRIPT [flags]`.

Checks the flags before any process is started, on several nodes together with the other nodes, hands the script to
torchrun, and ends with the exit code of the rank that failed first (torchrun itself always ends with 1, so nobody could
tell a preempted run from a broken one). After a crash it starts the ranks again, if it is allowed to.

Environment: NPROC_PER_NODE (default: the number of GPUs, or 1), NNODES (1), NODE_RANK, MASTER_ADDR and MASTER_PORT
(needed with more than one node; srun gives the first two), RENDEZVOUS_TIMEOUT_SECONDS (600), MAX_RESTARTS (0, on one
node). See docs/launching.md.
"""

import logging
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from megatron_neobert.checkpoint.folder import check_folders, has_stop_file
from megatron_neobert.config.cli import parse_command_line
from megatron_neobert.config.schema import CheckpointConfig, flag_of
from megatron_neobert.data.batches.inputs import open_phases
from megatron_neobert.errors import (
    EXIT_INTERRUPTED,
    EXIT_IO_ERROR,
    EXIT_STOPPED_EARLY,
    EXIT_UNAVAILABLE,
    ConfigError,
    NeoBERTError,
    run_command,
)
from megatron_neobert.runtime import signals
from megatron_neobert.runtime.environment import CHECKED_BY_LAUNCHER, Node, find_node, whole_number
from megatron_neobert.runtime.rendezvous import Report, agree_to_start, serve_store


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
        open_phases(command.settings)  # once and now, before any rank is started
        check_folders(command.settings.checkpoint, create=not command.dry_run)
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
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    options = [f"--nproc-per-node={nproc}", f"--rdzv-conf=timeout={timeout_seconds}"]
    for restart in range(1, max_restarts + 1):
        code = _run_torchrun(node, [*options, script, *arguments])
        if not is_crash(code) or signals.passed_on or has_stop_file(command.settings.checkpoint.save):
            return code
        print(f"restart {restart} of {max_restarts}, from the last checkpoint", file=sys.stderr, flush=True)
    return _run_torchrun(node, [*options, script, *arguments])


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
    if checkpoint.resume == "never":
        raise ConfigError("MAX_RESTARTS is set, but --resume never would begin anew after a crash; drop one of them.")


def is_crash(code: int) -> bool:
    """Whether another start may get further: the program, another rank, the file system or a signal ended this one."""
    return code in (1, EXIT_UNAVAILABLE, EXIT_IO_ERROR) or (code > 128 and code != EXIT_INTERRUPTED)


def _run_torchrun(node: Node, words: list[str]) -> int:
    """The exit code of this node's ranks, all of which have ended."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if node.nodes == 1:
        # Not --standalone: its store listens on all interfaces, and torchrun unpickles what a stranger writes there.
        store = serve_store("127.0.0.1", 0, nodes=1)  # kept until the ranks have ended; a restart gets an empty one
        node = replace(node, address=store.host, port=store.port)
    options = [f"--nnodes={node.nodes}", f"--node-rank={node.rank}"]
    options += [f"--master-addr={node.address}", f"--master-port={node.port}"]
    options.append(f"--log-dir={os.devnull}")  # a folder below TMPDIR otherwise, for logs that nobody asked for
    # Not torchrun's way with the others: it would kill the ranks 30 s later, in the middle of saving.
    options.append("--signals-to-handle=SIGHUP,SIGQUIT")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the rank's own message is clearer
    try:
        torchrun.run(torchrun.parse_args([*options, *words]))
    except ChildFailedError as error:
        return exit_code_of_node({rank: failure.exitcode for rank, failure in error.failures.items()})
    except SignalException as error:  # a closed terminal, or SIGQUIT; the ranks got it as well
        signals.passed_on.add(error.sigval)
        return 128 + error.sigval
    return 0


def exit_code_of_node(codes: Mapping[int, int]) -> int:
    """That of the rank that failed for a reason of its own; 128 + the signal if one ended it, as shells report it.

    Args:
        codes: By rank, those that torchrun found failed first. A rank that lost another one waits for its end, but
            both may have ended by then.
    """
    if len(signals.interrupts) > 1:
        return EXIT_INTERRUPTED
    own_reasons = {rank: code for rank, code in codes.items() if code != EXIT_UNAVAILABLE}
    rank, code = next(iter((own_reasons or codes).items()))
    if code >= 0:
        if code not in (EXIT_UNAVAILABLE, EXIT_STOPPED_EARLY, EXIT_INTERRUPTED):
            print(f"rank {rank} ended first, with exit code {code}", file=sys.stderr, flush=True)
        return code
    if -code in signals.passed_on:  # it came before the rank could prepare for it: nothing had begun, nothing is lost
        return EXIT_STOPPED_EARLY
    print(f"error: rank {rank} was ended by signal {-code}", file=sys.stderr, flush=True)
    return 128 - code


if __name__ == "__main__":
    run_command(main)
