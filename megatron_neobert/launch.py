"""Starts a training script on the ranks of this node: `python -m megatron_neobert.launch SCRIPT [flags]`.

Checks the flags before any process is started, on several nodes together with the other nodes, hands the script to
torchrun, and ends with the exit code of the rank that failed first (torchrun itself always ends with 1, so nobody could
tell a preempted run from a broken one).

Environment: NPROC_PER_NODE (default: the number of GPUs, or 1), NNODES (1), NODE_RANK, MASTER_ADDR and MASTER_PORT
(needed with more than one node; srun gives the first two), RENDEZVOUS_TIMEOUT_SECONDS (600). See docs/launching.md.
"""

import contextlib
import logging
import os
import shutil
import signal
import sys
import time
from dataclasses import asdict
from types import FrameType
from typing import Any

import psutil

from megatron_neobert.config import Settings, flag_of
from megatron_neobert.data.inputs import open_inputs
from megatron_neobert.errors import EXIT_IO_ERROR, EXIT_STOPPED_EARLY, ConfigError, NeoBERTError, run_command
from megatron_neobert.flags import parse_command_line
from megatron_neobert.meeting import Meeting
from megatron_neobert.nodes import Place, find_place, whole_number
from megatron_neobert.training.checkpoint_files import check_folders
from megatron_neobert.training.stopping import watch_signals

_STOP_SECONDS = 3  # within which a signal is answered, unless the launcher waits in C++
_forwarded_signals: set[int] = set()


def main() -> int:
    """Checks, then starts; `--help` and `--dry-run` are answered here and start nothing."""
    if len(sys.argv) < 2:
        raise ConfigError("usage: python -m megatron_neobert.launch SCRIPT [flags]")
    script, *arguments = sys.argv[1:]
    _install_signal_handlers()
    place = find_place(os.environ)
    nproc = whole_number(os.environ, "NPROC_PER_NODE", str(_default_processes()))
    timeout_seconds = whole_number(os.environ, "RENDEZVOUS_TIMEOUT_SECONDS", "600")
    world_size = place.nodes * nproc
    meeting = Meeting(place, timeout_seconds=timeout_seconds)
    try:
        command = parse_command_line(arguments, world_size=world_size)
        open_inputs(command.settings.data)  # once and at once, before any rank is started
        check_folders(command.settings.checkpoint)
    except (NeoBERTError, OSError) as error:
        if place.nodes == 1 or "--dry-run" in arguments:
            raise
        print(f"error: {error}", file=sys.stderr, flush=True)  # now: the other nodes may take a while to be told
        exit_code = error.exit_code if isinstance(error, NeoBERTError) else EXIT_IO_ERROR
        meeting.refuse(str(error), exit_code=exit_code)
        return exit_code
    if command.dry_run:
        from megatron_neobert.training.plan import print_plan

        return print_plan(command.settings, world_size=world_size)
    if world_size == 1:
        os.execv(sys.executable, [sys.executable, script, *arguments])
    if place.nodes > 1:
        verdict = meeting.agree(_what_must_agree(command.settings, nodes=place.nodes, nproc=nproc))
        if verdict.problem:
            print(f"error: node {verdict.rank} ({verdict.host}): {verdict.problem}", file=sys.stderr)
            return verdict.exit_code
    return _run_torchrun(script, arguments, place=place, nproc=nproc, timeout_seconds=timeout_seconds)


def _default_processes() -> int:
    if shutil.which("nvidia-smi") is None:
        return 1  # without asking torch, whose import takes longer than everything else here
    import torch

    return max(1, torch.cuda.device_count())


def _what_must_agree(settings: Settings, *, nodes: int, nproc: int) -> dict[str, Any]:
    """What all nodes must be started with alike, by the name that the user knows."""
    flags = {flag_of(name): str(value) for section in asdict(settings).values() for name, value in section.items()}
    return {"NNODES": str(nodes), "NPROC_PER_NODE": str(nproc), **flags}


def _run_torchrun(script: str, arguments: list[str], *, place: Place, nproc: int, timeout_seconds: int) -> int:
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    options = [f"--nnodes={place.nodes}", f"--nproc-per-node={nproc}"]
    if place.nodes == 1:
        options.append("--standalone")
    else:
        options += [f"--node-rank={place.rank}", f"--master-addr={place.address}", f"--master-port={place.port}"]
        options.append(f"--rdzv-conf=timeout={timeout_seconds}")
    # Not torchrun's way with the others: it would kill the ranks 30 s later, in the middle of saving.
    options.append("--signals-to-handle=SIGHUP,SIGQUIT")
    signal.signal(signal.SIGINT, _stop)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the rank's own message says more
    try:
        torchrun.run(torchrun.parse_args([*options, script, *arguments]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return _exit_code_of_rank(rank, failure.exitcode)
    return 0


def _install_signal_handlers() -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _stop)
    watch_signals(_stop_waiting)


def _stop(number: int, frame: FrameType | None) -> None:
    """The ranks save and end by themselves, torchrun then ends with their exit code. Without ranks it ends at once."""
    ranks = psutil.Process().children()
    if not ranks:
        _say_stopped(number)
        sys.exit(EXIT_STOPPED_EARLY)
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


def _exit_code_of_rank(rank: int, code: int) -> int:
    """That of the rank; 128 + the signal for a rank that a signal ended, as shells report it."""
    if code >= 0:
        return code
    if -code in _forwarded_signals:  # it came before the rank could prepare for it: nothing had begun, nothing is lost
        return EXIT_STOPPED_EARLY
    print(f"error: rank {rank} was ended by signal {-code}", file=sys.stderr)
    return 128 - code


if __name__ == "__main__":
    run_command(main)
