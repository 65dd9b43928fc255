"""Start a training script on the ranks of this node: `python -m megatron_neobert.launch SCRIPT [flags]`.

The launcher checks all flags before it starts a rank, then runs the script with torchrun. It exits with the exit code
of the rank that failed first, because torchrun's own exit code does not tell a preempted run from a broken one.

Environment: NPROC_PER_NODE (default: number of GPUs, or 1), NNODES (default: 1), RENDEZVOUS_TIMEOUT_SECONDS (default:
600). Runs of several nodes also need NODE_RANK, MASTER_ADDR and MASTER_PORT. In a Slurm step, NNODES and NODE_RANK
default to those of the step. See docs/cluster.md.
"""

import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_neobert.checkpoint.folder import check_folders
from megatron_neobert.checkpoint.start import refuse_full_disk, refuse_unfit_start
from megatron_neobert.config.cli import parse_command_line
from megatron_neobert.data.batches.inputs import open_phases
from megatron_neobert.errors import (
    EXIT_INTERRUPTED,
    EXIT_STOPPED_EARLY,
    EXIT_UNAVAILABLE,
    ConfigError,
    LauncherError,
    run_command,
)
from megatron_neobert.runtime import signals
from megatron_neobert.runtime.environment import Node, find_node, whole_number
from megatron_neobert.runtime.store import reach_store, serve_store

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # slow to import


def train() -> int:
    """Run `neobert train [flags]`: start pretrain.py, and return the exit code. See `main`."""
    sys.argv.insert(1, str(Path(__file__).with_name("pretrain.py")))
    return main()


def main() -> int:
    """Check the command line in `sys.argv`, run the ranks of this node, and return the exit code.

    With one rank, this process becomes the rank (execv). `--help` and `--dry-run` start no rank.

    Raises:
        NeoBERTError: The environment, settings, corpus, checkpoint or folders are wrong.
        ConnectionError: The nodes do not find each other.
    """
    if len(sys.argv) < 2:
        raise ConfigError("no script; start with python -m megatron_neobert.launch SCRIPT [flags]")
    script, *arguments = sys.argv[1:]
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):  # of another launcher, from whose shell this one was started
        os.environ.pop(variable, None)
    signals.forward_stop_signals()
    node = find_node()
    nproc = whole_number("NPROC_PER_NODE", str(_default_processes()))
    timeout_seconds = whole_number("RENDEZVOUS_TIMEOUT_SECONDS", "600")
    world_size = node.nodes * nproc
    command = parse_command_line(arguments, world_size=world_size)
    settings = command.settings
    inputs = open_phases(settings)
    check_folders(settings.checkpoint)
    refuse_unfit_start(settings, inputs)
    refuse_full_disk(settings, vocab_size=inputs[0].tokenizer.vocab_size)
    if command.dry_run:
        from megatron_neobert.planning.plan import print_plan

        return print_plan(settings, inputs, command.plan, world_size=command.world_size)
    if world_size == 1:
        # Block stop signals until the rank has installed its handlers: after execv, a signal would kill the process.
        signal.pthread_sigmask(signal.SIG_BLOCK, signals.STOP_SIGNALS)
        os.execv(sys.executable, [sys.executable, script, *arguments])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // nproc)))
    return run_ranks(node, [script, *arguments], nproc=nproc, timeout_seconds=timeout_seconds)


def _default_processes() -> int:
    # Importing torch takes longer than everything else in this launcher.
    if shutil.which("nvidia-smi") is None:
        return 1
    import torch

    return max(1, torch.cuda.device_count())


def run_ranks(node: Node, script: Sequence[str], *, nproc: int, timeout_seconds: int) -> int:
    """Run `script`, a file and its arguments, on the ranks of this node, and return the exit code of the node.

    The code is 0, that of the rank that failed first, or 128 + N if the launcher receives signal N, SIGHUP or SIGQUIT.

    Raises:
        ConnectionError: The nodes do not find each other within `timeout_seconds`, or a port cannot be used.
        LauncherError: Another node has the same NODE_RANK.
    """
    from torch.distributed import DistError
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # The variable keeps the store open until the ranks have ended.
    store = None
    if node.nodes == 1:
        # torchrun's --standalone opens a store on all interfaces, and unpickles what any client writes there.
        store = serve_store("127.0.0.1", 0, nodes=1)
        node = replace(node, address=store.host, port=store.port)
    else:
        rendezvous = f"rendezvous at {node.address} port {node.port}, for at most {timeout_seconds} s"
        print(f"node {node.rank} of {node.nodes} can start; {rendezvous}", file=sys.stderr, flush=True)
        store = _rendezvous(node, timeout_seconds=timeout_seconds)
    options = [f"--nproc-per-node={nproc}", f"--nnodes={node.nodes}", f"--node-rank={node.rank}"]
    options += [f"--master-addr={node.address}", f"--master-port={node.port}", f"--rdzv-conf=timeout={timeout_seconds}"]
    options.append(f"--log-dir={os.devnull}")  # no log folder below TMPDIR
    # For other signals, torchrun would kill the ranks after 30 s, while they save. Under nohup, SIGHUP stays ignored.
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    options.append(f"--signals-to-handle={'SIGQUIT' if is_ignored else 'SIGHUP,SIGQUIT'}")
    # The error message of the rank is clearer than torchrun's.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    started = time.monotonic()
    try:
        torchrun.run(torchrun.parse_args([*options, *script]))
    except ChildFailedError as error:
        return exit_code_of_node({rank: failure.exitcode for rank, failure in error.failures.items()})
    except SignalException as error:  # SIGHUP or SIGQUIT, which the ranks received, too
        signals.forwarded.add(error.sigval)
        return 128 + error.sigval
    except DistError as error:
        raise ConnectionError(_describe_failed_rendezvous(node, time.monotonic() - started, error)) from error
    return 0


def _rendezvous(node: Node, *, timeout_seconds: int) -> "TCPStore":
    """Return the store of a run of several nodes. Node 0 serves the store; other nodes wait and connect.

    Raises ConnectionError after `timeout_seconds`, and LauncherError if two nodes have the same NODE_RANK.
    """
    from torch.distributed import DistError

    started = time.monotonic()
    store = serve_store(node.address, node.port, nodes=node.nodes) if node.rank == 0 else None
    try:
        store = store or reach_store(node.address, node.port, timeout_seconds=timeout_seconds)
        launchers = store.add(f"launchers of node {node.rank}", 1)
    except (OSError, DistError) as error:
        raise ConnectionError(_describe_failed_rendezvous(node, time.monotonic() - started, error)) from error
    if launchers > 1:
        raise LauncherError(
            f"NODE_RANK {node.rank} was given to two nodes, or node {node.rank} was started twice; number the nodes "
            f"from 0 to {node.nodes - 1}, and start all of them again."
        )
    return store


def _describe_failed_rendezvous(node: Node, seconds: float, error: Exception) -> str:
    return (
        f"the {node.nodes} nodes did not all meet at {node.address} port {node.port} within {seconds:.0f} s "
        f"({str(error).splitlines()[0][:200]}). Read the output of the other nodes, and check NODE_RANK, MASTER_ADDR, "
        "MASTER_PORT and the firewall; if a node is only slow, raise RENDEZVOUS_TIMEOUT_SECONDS."
    )


def exit_code_of_node(codes: Mapping[int, int]) -> int:
    """Return the exit code of the rank that failed first.

    A rank that was ended by signal N gives 128 + N, or EXIT_STOPPED_EARLY if the launcher forwarded the signal. After a
    second Ctrl-C the result is EXIT_INTERRUPTED. Ranks with EXIT_UNAVAILABLE only lost the connection to another rank,
    so they count only if no rank has another code. The failed rank is printed on standard error, unless the result is
    EXIT_UNAVAILABLE, EXIT_STOPPED_EARLY or EXIT_INTERRUPTED.

    Args:
        codes: Exit codes of failed ranks, at least one, in the order in which torchrun noticed them; -N for signal N.
    """
    if len(signals.interrupts) > 1:
        return EXIT_INTERRUPTED
    causes = {rank: code for rank, code in codes.items() if code != EXIT_UNAVAILABLE}
    rank, code = next(iter((causes or codes).items()))
    if code >= 0:
        if code not in (EXIT_UNAVAILABLE, EXIT_STOPPED_EARLY, EXIT_INTERRUPTED):
            print(f"rank {rank} ended first, with exit code {code}", file=sys.stderr, flush=True)
        return code
    # A forwarded stop signal kills a rank only before its handlers are installed, when nothing can be lost.
    if -code in signals.forwarded:
        return EXIT_STOPPED_EARLY
    print(f"error: rank {rank} was ended by signal {-code}", file=sys.stderr, flush=True)
    return 128 - code


if __name__ == "__main__":
    run_command(main)
