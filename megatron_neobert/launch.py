"""Starts a training script on the ranks of this node: `python -m megatron_neobert.launch SCRIPT [flags]`.

Checks the flags before any process is started, on several nodes together with the other nodes, hands the script to
torchrun, and ends with the exit code of the rank that failed first (torchrun itself always ends with 1, so nobody could
tell a preempted run from a broken one). After a crash it starts the ranks again, if it is allowed to.

Environment: NPROC_PER_NODE (default: the number of GPUs, or 1), NNODES (1), NODE_RANK, MASTER_ADDR and MASTER_PORT
(needed with more than one node; srun gives the first two), RENDEZVOUS_TIMEOUT_SECONDS (600), MAX_RESTARTS (0, on one
node). See docs/launching.md.
"""

import contextlib
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import FrameType
from typing import Any

import psutil

from megatron_neobert.checkpoint.folder import check_folders
from megatron_neobert.config.cli import parse_command_line
from megatron_neobert.config.schema import CheckpointConfig, Settings, flag_of
from megatron_neobert.data.batches.inputs import open_inputs
from megatron_neobert.errors import (
    EXIT_INTERRUPTED,
    EXIT_IO_ERROR,
    EXIT_STOPPED_EARLY,
    EXIT_UNAVAILABLE,
    ConfigError,
    NeoBERTError,
    run_command,
)
from megatron_neobert.runtime.nodes import Place, find_place, whole_number
from megatron_neobert.runtime.rendezvous import Meeting, serve_store
from megatron_neobert.runtime.signals import (
    ABORT_SIGNAL,
    FIRST_INTERRUPT,
    STOP_SIGNALS,
    has_stop_file,
    refuse_stop_file,
    watch_signals,
)

_STOP_SECONDS = 3  # within which a signal is answered, unless the launcher waits in C++
_forwarded_signals: set[int] = set()
_interrupts: list[int] = []


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What to start on this node."""

    place: Place
    script: str
    arguments: list[str]
    nproc: int
    rendezvous_seconds: int


def main() -> int:
    """Checks, then starts; `--help` and `--dry-run` are answered here and start nothing."""
    if len(sys.argv) < 2:
        raise ConfigError("usage: python -m megatron_neobert.launch SCRIPT [flags]")
    script, *arguments = sys.argv[1:]
    _install_signal_handlers()
    place = find_place(os.environ)
    nproc = whole_number(os.environ, "NPROC_PER_NODE", str(_default_processes()))
    timeout_seconds = whole_number(os.environ, "RENDEZVOUS_TIMEOUT_SECONDS", "600")
    max_restarts = whole_number(os.environ, "MAX_RESTARTS", "0", minimum=0)
    world_size = place.nodes * nproc
    meeting = Meeting(place, timeout_seconds=timeout_seconds)
    try:
        command = parse_command_line(arguments, world_size=world_size)
        if max_restarts:
            _check_restarts(command.settings.checkpoint, nodes=place.nodes)
        refuse_stop_file(command.settings.checkpoint.save)
        open_inputs(command.settings.data)  # once and at once, before any rank is started
        check_folders(command.settings.checkpoint, create=not command.dry_run)
    except (NeoBERTError, OSError) as error:
        if place.nodes == 1 or "--dry-run" in arguments:
            raise
        print(f"error: {error}", file=sys.stderr, flush=True)  # now: the other nodes may take a while to be told
        exit_code = error.exit_code if isinstance(error, NeoBERTError) else EXIT_IO_ERROR
        meeting.refuse(str(error), exit_code=exit_code)
        return exit_code
    if command.dry_run:
        from megatron_neobert.planning.plan import print_plan

        return print_plan(command.settings, world_size=world_size)
    if world_size == 1 and not max_restarts:
        # Kept back until the rank is prepared for them: it will be this process, for a moment without any handler.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        os.execv(sys.executable, [sys.executable, script, *arguments])
    if place.nodes > 1:
        verdict = meeting.agree(_what_must_agree(command.settings, nodes=place.nodes, nproc=nproc))
        if verdict.problem:
            print(f"error: node {verdict.rank} ({verdict.host}): {verdict.problem}", file=sys.stderr)
            return verdict.exit_code
    job = _Job(place=place, script=script, arguments=arguments, nproc=nproc, rendezvous_seconds=timeout_seconds)
    return _run_job(job, save=command.settings.checkpoint.save, max_restarts=max_restarts)


def _default_processes() -> int:
    if shutil.which("nvidia-smi") is None:
        return 1  # without asking torch, whose import takes longer than everything else here
    import torch

    return max(1, torch.cuda.device_count())


def _what_must_agree(settings: Settings, *, nodes: int, nproc: int) -> dict[str, Any]:
    """What all nodes must be started with alike, by the name that the user knows."""
    flags = {flag_of(name): str(value) for section in asdict(settings).values() for name, value in section.items()}
    return {"NNODES": str(nodes), "NPROC_PER_NODE": str(nproc), **flags}


def _check_restarts(checkpoint: CheckpointConfig, *, nodes: int) -> None:
    """Refuses restarts after which the run would not go on.

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
            "folder, or a restarted run could not go on."
        )
    if checkpoint.resume == "never":
        raise ConfigError("MAX_RESTARTS is set, but --resume never would begin anew after a crash; drop one of them.")


def _run_job(job: _Job, *, save: str | None, max_restarts: int) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // job.nproc)))
    signal.signal(signal.SIGINT, _stop)
    for restart in range(1, max_restarts + 1):
        code = _run_torchrun(job)
        if not _is_crash(code) or _forwarded_signals or has_stop_file(save):
            return code
        print(f"restart {restart} of {max_restarts}, from the last checkpoint", file=sys.stderr, flush=True)
    return _run_torchrun(job)


def _is_crash(code: int) -> bool:
    """Whether another start may get further: the program, another rank, the file system or a signal ended this one."""
    return code in (1, EXIT_UNAVAILABLE, EXIT_IO_ERROR) or (code > 128 and code != EXIT_INTERRUPTED)


def _run_torchrun(job: _Job) -> int:
    """The exit code of this node's ranks, all of which have ended."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    place = job.place
    if place.nodes == 1:
        # Not --standalone: its store listens on all interfaces, and torchrun unpickles what a stranger writes there.
        store = serve_store("127.0.0.1", 0, nodes=1)  # kept until the ranks have ended; a restart gets an empty one
        place = replace(place, address=store.host, port=store.port)
    options = [f"--nnodes={place.nodes}", f"--node-rank={place.rank}", f"--nproc-per-node={job.nproc}"]
    options += [f"--master-addr={place.address}", f"--master-port={place.port}"]
    options.append(f"--rdzv-conf=timeout={job.rendezvous_seconds}")
    options.append(f"--log-dir={os.devnull}")  # a folder below TMPDIR otherwise, for logs that nobody asked for
    # Not torchrun's way with the others: it would kill the ranks 30 s later, in the middle of saving.
    options.append("--signals-to-handle=SIGHUP,SIGQUIT")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the rank's own message says more
    try:
        torchrun.run(torchrun.parse_args([*options, job.script, *job.arguments]))
    except ChildFailedError as error:
        return _exit_code_of_node({rank: failure.exitcode for rank, failure in error.failures.items()})
    except SignalException as error:  # a closed terminal, or SIGQUIT; the ranks got it as well
        _forwarded_signals.add(error.sigval)
        return 128 + error.sigval
    return 0


def _install_signal_handlers() -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _stop)
    watch_signals(_stop_waiting)


def _stop(number: int, frame: FrameType | None) -> None:
    """The ranks save and end by themselves, torchrun then ends with their exit code. Without ranks it ends at once.

    A Ctrl-C is passed on as SIGTERM, and the second one as an abort: a signal to all processes of a job reaches the
    ranks twice, which must not count as two.
    """
    ranks = psutil.Process().children()
    if not ranks:
        _say_stopped(number)
        sys.exit(EXIT_STOPPED_EARLY)
    if number == signal.SIGINT:
        _interrupts.append(number)
        number = signal.SIGTERM if len(_interrupts) == 1 else ABORT_SIGNAL
        if len(_interrupts) == 1:
            print(FIRST_INTERRUPT, file=sys.stderr, flush=True)
    _forwarded_signals.add(number)
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended by itself
            rank.send_signal(number)


def _stop_waiting(number: int) -> None:
    """For the wait in torchrun for the launcher of another node, during which Python cannot call `_stop`."""
    time.sleep(_STOP_SECONDS)
    if not _forwarded_signals and not psutil.Process().children():
        _say_stopped(number)
        os._exit(EXIT_STOPPED_EARLY)


def _say_stopped(number: int) -> None:
    print(f"stopped by {signal.Signals(number).name} while no rank was running", file=sys.stderr, flush=True)


def _exit_code_of_node(codes: Mapping[int, int]) -> int:
    """That of the rank that failed for a reason of its own; 128 + the signal if one ended it, as shells report it.

    Args:
        codes: By rank, those that torchrun found failed first. A rank that lost another one waits for its end, but
            both may have ended by then.
    """
    if len(_interrupts) > 1:
        return EXIT_INTERRUPTED
    own_reasons = {rank: code for rank, code in codes.items() if code != EXIT_UNAVAILABLE}
    rank, code = next(iter((own_reasons or codes).items()))
    if code >= 0:
        if code not in (EXIT_UNAVAILABLE, EXIT_STOPPED_EARLY, EXIT_INTERRUPTED):
            print(f"rank {rank} ended first, with exit code {code}", file=sys.stderr, flush=True)
        return code
    if -code in _forwarded_signals:  # it came before the rank could prepare for it: nothing had begun, nothing is lost
        return EXIT_STOPPED_EARLY
    print(f"error: rank {rank} was ended by signal {-code}", file=sys.stderr, flush=True)
    return 128 - code


if __name__ == "__main__":
    run_command(main)
