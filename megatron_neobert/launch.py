"""Start a training script on the ranks of this node: `python -m megatron_neobert.launch SCRIPT [flags]`.

The launcher checks all flags before it starts a rank, then runs the script once per rank, with torchrun's environment
variables. It exits with the code of the first rank that failed, on any node.

Environment: NPROC_PER_NODE (default: one rank per GPU; on a CPU one per core, at most 8), NNODES (default: 1),
RENDEZVOUS_TIMEOUT_SECONDS (default: 600). Runs of several nodes also need NODE_RANK, MASTER_ADDR and MASTER_PORT. In a
Slurm step, NNODES and NODE_RANK default to the step's values. See docs/cluster.md.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

from megatron_neobert.checkpoint.folder import check_folders
from megatron_neobert.checkpoint.start import refuse_full_disk, refuse_unfit_start
from megatron_neobert.config.cli import parse_command_line
from megatron_neobert.config.schema import Settings
from megatron_neobert.errors import (
    EXIT_INTERRUPTED,
    EXIT_STOPPED_EARLY,
    EXIT_UNAVAILABLE,
    ConfigError,
    LauncherError,
    WorkerError,
    run_command,
)
from megatron_neobert.planning.forecast import open_or_assume_phases
from megatron_neobert.runtime import signals
from megatron_neobert.runtime.environment import Node, find_node, whole_number
from megatron_neobert.runtime.store import reach_store, serve_store
from megatron_neobert.text import counted

if TYPE_CHECKING:  # slow to import
    from torch.distributed import TCPStore

    from megatron_neobert.runtime.watcher import Failure, RunStatus

_POLL_SECONDS = 0.2
_KILL_SECONDS = 6.0  # after a failure; the watchers of the ranks end them earlier
_MARGIN_SECONDS = 60.0  # after --distributed-timeout-minutes, in which a rank that hangs has failed
_MOST_CPU_RANKS = 8  # each has a copy of the model; cores beyond them are threads of the ranks
_LEAVE_SECONDS = 10.0  # node 0 serves the store until the other nodes have left


def main() -> int:
    """Check the command line in `sys.argv`, run the ranks of this node, and return the exit code.

    With one rank, this process becomes the rank (execv). `--help` and `--dry-run` start no rank.
    """
    if len(sys.argv) < 2:
        raise ConfigError("no script; start with python -m megatron_neobert.launch SCRIPT [flags]")
    script, *arguments = sys.argv[1:]
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):  # of another launcher, from whose shell this one was started
        os.environ.pop(variable, None)
    signals.forward_stop_signals()
    node = find_node(starts="--dry-run" not in arguments)
    is_given = "NPROC_PER_NODE" in os.environ
    gpus = 0
    if not is_given and shutil.which("nvidia-smi"):
        import torch  # takes longer than everything else in this launcher

        gpus = torch.cuda.device_count()
    nproc = whole_number("NPROC_PER_NODE") if is_given else gpus or choose_cpu_ranks(arguments, nodes=node.nodes)
    timeout_seconds = whole_number("RENDEZVOUS_TIMEOUT_SECONDS", "600")
    world_size = node.nodes * nproc
    command = parse_command_line(arguments, world_size=world_size)
    settings = command.settings
    check_folders(settings.checkpoint)
    opened = open_or_assume_phases(settings)
    if settings.data.data_path:
        refuse_unfit_start(settings, opened)
    refuse_full_disk(settings, vocab_size=opened[0].tokenizer.vocab_size)
    cores = len(os.sched_getaffinity(0))
    if not is_given and not gpus and not command.plan.gpus:
        reason = ", because the settings allow no more" if nproc < min(cores, _MOST_CPU_RANKS) else ""
        on_cores = f"{counted(nproc, 'rank')} on {counted(cores, 'core')}"
        on_cores += f" of each of {node.nodes:,} nodes" if node.nodes > 1 else ""
        remedy = "--gpus N plans for N GPUs" if command.dry_run else "NPROC_PER_NODE changes that"
        print(f"no GPU: {'planned for ' * command.dry_run}{on_cores}{reason}; {remedy}", flush=True)
    if command.dry_run:
        from megatron_neobert.planning.plan import print_plan

        return print_plan(settings, opened, command.plan, world_size=command.world_size)
    if world_size == 1:
        # Block stop signals until the rank has installed its handlers: after execv, a signal would kill the process.
        signal.pthread_sigmask(signal.SIG_BLOCK, signals.STOP_SIGNALS)
        os.execv(sys.executable, [sys.executable, script, *arguments])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // nproc)))
    return run_ranks(node, [script, *arguments], nproc=nproc, timeout_seconds=timeout_seconds, settings=settings)


def choose_cpu_ranks(arguments: Sequence[str], *, nodes: int) -> int:
    """Return the largest number of ranks per node for which the settings are valid, with at most one rank per core."""
    cores = len(os.sched_getaffinity(0))
    for ranks in range(min(cores, _MOST_CPU_RANKS), 1, -1):
        with contextlib.suppress(ConfigError):
            parse_command_line(list(arguments), world_size=nodes * ranks)
            return ranks
    return 1


def run_ranks(node: Node, script: Sequence[str], *, settings: Settings, nproc: int, timeout_seconds: int) -> int:
    """Run `script`, a file and its arguments, on this node's ranks, and return the exit code of the run.

    The first rank that failed decides the exit code: 128 + N if signal N ended the rank, 69 if the rank hung or ended
    early with 0. If no rank failed, it is the ranks' code, such as 0 or 75. After a second Ctrl-C, it is 130. Raise
    WorkerError if the ranks of this node have ended, but the ranks of another node neither end nor fail.
    """
    from torch.distributed import PrefixStore

    from megatron_neobert.runtime.watcher import Failure, RunStatus, Status

    if node.nodes == 1:
        # torchrun would open a store on all interfaces, and with --standalone unpickle what any client writes there.
        store = serve_store("127.0.0.1", 0, nodes=1)
        node = replace(node, address=store.host, port=store.port)
    else:
        store = _rendezvous(node, nproc=nproc, timeout_seconds=timeout_seconds)
    run = RunStatus(PrefixStore("watcher/0", store), node=str(node.rank), ranks=node.nodes * nproc)
    variables = {
        "MASTER_ADDR": node.address,
        "MASTER_PORT": str(node.port),
        "WORLD_SIZE": str(node.nodes * nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "GROUP_RANK": str(node.rank),
        # As torchrun sets them: the ranks have a launcher, and it serves the store.
        "TORCHELASTIC_RUN_ID": signals.LAUNCHER_ID,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    ranks = {}
    for local_rank in range(nproc):
        rank = node.rank * nproc + local_rank
        run.publish(Status(rank, socket.gethostname()))
        environment = os.environ | variables | {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        ranks[rank] = subprocess.Popen([sys.executable, "-u", *script], env=environment)
    failures: list[Failure] = []
    # In a thread, because the store of a lost node 0 may never answer. The ranks then end without it.
    follower = threading.Thread(target=_follow_ranks, args=(run, ranks, failures), daemon=True)
    follower.start()
    codes = [process.wait() for process in ranks.values()]
    if len(signals.interrupts) > 1:
        return EXIT_INTERRUPTED
    follower.join(60 * settings.parallel.distributed_timeout_minutes + _MARGIN_SECONDS)
    if follower.is_alive():
        raise WorkerError(
            f"the ranks of node {node.rank} have ended, but another node neither ends nor fails. Read the output "
            "of the other nodes, end them, and start all nodes again with the same command."
        )
    _leave(node, store)
    code = failures[0].code if failures else next(filter(None, codes), 0)
    return code if code >= 0 else 128 - code


def _follow_ranks(run: "RunStatus", ranks: Mapping[int, subprocess.Popen[bytes]], failures: list["Failure"]) -> None:
    """Wait until all ranks of the run have ended, or until a rank has failed and all ranks of this node have ended.

    Ranks that end too early are recorded as failures. The run's first failure is printed and appended to `failures`.
    This node's ranks that still run some seconds later are killed. Return early if the store is lost.
    """
    from torch.distributed import DistError

    running, have_all_ended, failed = dict(ranks), False, 0.0
    with contextlib.suppress(DistError):
        while running or not (failures or have_all_ended):
            time.sleep(_POLL_SECONDS)
            for rank, process in list(running.items()):
                if process.poll() is not None:
                    del running[rank]
                    _record_early_end(run, rank, process.returncode)
                    run.store.add("ended ranks", 1)
            have_all_ended = run.store.add("ended ranks", 0) == run.ranks
            failure = run.failure()
            if failure is not None and not failures:
                failures.append(failure)
                failed = time.monotonic()
                sentence = run.sentence_for_node(failure)
                # A rank that was stopped on request has printed that.
                if failure.rank not in ranks or failure.code not in (EXIT_STOPPED_EARLY, EXIT_INTERRUPTED):
                    os.write(2, sentence.encode())
            if failures and time.monotonic() - failed >= _KILL_SECONDS:
                for process in running.values():
                    process.kill()


def _record_early_end(run: "RunStatus", rank: int, code: int) -> None:
    """Record a failure if a rank's process has ended with exit code `code` before the rank has finished.

    If a forwarded stop signal killed the rank before its handlers were installed, record code 75: nothing is lost.
    """
    from megatron_neobert.runtime.watcher import REMEDY, Failure

    status = run.read(rank)
    if status.is_finished and code >= 0:
        return
    reason = f"exited with code {code} before the run was finished{REMEDY}"
    if code < 0:
        reason = f"was ended by signal {-code} ({signal.strsignal(-code)}){REMEDY}"
        code = EXIT_STOPPED_EARLY if -code in signals.forwarded else 128 - code
    run.record(Failure(rank, status.host, status.position, reason, code or EXIT_UNAVAILABLE))


def _rendezvous(node: Node, *, nproc: int, timeout_seconds: int) -> "TCPStore":
    """Wait until all nodes of a run are ready, and return the run's store, which node 0 serves.

    Raise ConnectionError after `timeout_seconds`, or LauncherError if the nodes' variables contradict each other.
    """
    from torch.distributed import DistError

    where = f"rendezvous at {node.address} port {node.port}, for at most {timeout_seconds} s"
    print(f"node {node.rank} of {node.nodes} can start; {where}", file=sys.stderr, flush=True)
    started = time.monotonic()
    store = serve_store(node.address, node.port, nodes=node.nodes) if node.rank == 0 else None
    # One node reads the keys of all nodes.
    keys, timeout = [f"node {number}" for number in range(node.nodes)], timedelta(seconds=timeout_seconds)
    try:
        store = store or reach_store(node.address, node.port, timeout_seconds=timeout_seconds)
        if store.add(f"launchers of node {node.rank}", 1) > 1:
            raise LauncherError(
                f"NODE_RANK {node.rank} was given to two nodes, or node {node.rank} was started twice; number the "
                f"nodes from 0 to {node.nodes - 1}, and start all of them again."
            )
        store.set(keys[node.rank], str(nproc))
        if node.rank == 0:
            store.wait(keys, timeout)
            counts = [int(count) for count in store.multi_get(keys)]
            other = next((number for number, count in enumerate(counts) if count != nproc), 0)
            store.set(
                "problem", f"node {other} has NPROC_PER_NODE {counts[other]}, node 0 has {nproc}" if other else ""
            )
        store.wait(["problem"], timeout)
        problem = store.get("problem").decode()
    except (OSError, DistError) as error:
        raise ConnectionError(
            f"the {node.nodes} nodes did not all meet at {node.address} port {node.port} within "
            f"{time.monotonic() - started:.0f} s ({str(error).splitlines()[0][:200]}). Read the output of the other "
            "nodes, and check NODE_RANK, MASTER_ADDR, MASTER_PORT and the firewall; if a node is only slow, raise "
            "RENDEZVOUS_TIMEOUT_SECONDS."
        ) from error
    if problem:
        _leave(node, store)
        raise LauncherError(f"{problem}; start all nodes with the same number of ranks.")
    return store


def _leave(node: Node, store: "TCPStore") -> None:
    """Report that this node no longer needs the store. Node 0, which serves the store, waits for all nodes."""
    from torch.distributed import DistError

    with contextlib.suppress(DistError):
        store.set(f"left {node.rank}", "")
        if node.rank == 0:
            store.wait([f"left {number}" for number in range(node.nodes)], timedelta(seconds=_LEAVE_SECONDS))


if __name__ == "__main__":
    run_command(main)
