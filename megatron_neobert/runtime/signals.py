"""Requests to stop a run before its last iteration: a signal, the time limit, or the file SAVE/STOP.

All ranks stop after the same iteration and save a checkpoint. Before the process group is formed, ranks cannot agree
and have nothing to save, so a signal ends the rank at once. This module does not import torch, because the handlers
must be installed before the slow imports.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import NoReturn

import psutil

from megatron_neobert.config.schema import Settings, TrainingConfig
from megatron_neobert.errors import EXIT_INTERRUPTED, EXIT_STOPPED_EARLY
from megatron_neobert.runtime.environment import is_rank_zero

_NOTHING, _TIME_LIMIT, _STOP_FILE, _SIGNAL = range(4)
_REASONS = ("", "--exit-duration-in-mins is reached", "the file STOP exists in --save", "a stop signal was received")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
ABORT_SIGNAL = signal.SIGQUIT  # the launcher sends it to the ranks at the second Ctrl-C
FIRST_INTERRUPT = (
    "stopping after this iteration, then saving if there is --save; Ctrl-C again stops at once without saving"
)
LAUNCHER_ID = "neobert"  # TORCHELASTIC_RUN_ID of ranks whose launcher announces the first Ctrl-C

_WRITE_SECONDS = 2.0

_group_is_formed = threading.Event()
_signals_received: list[int] = []  # by this rank
_started_seconds = time.monotonic()
forwarded: set[int] = set()  # signals that this launcher sent to its ranks
interrupts: list[int] = []  # Ctrl-C signals that this launcher received while it had ranks


def forward_stop_signals() -> None:
    """Forward stop signals from this launcher to its ranks from now on. Without ranks, a signal ends the launcher."""
    _watch_signals(_forward)


def _forward(number: int) -> None:
    ranks = psutil.Process().children()
    if not ranks:
        code = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_STOPPED_EARLY
        end_process(code, f"stopped by {signal.Signals(number).name} while no rank was running\n")
    if number == signal.SIGINT:
        # A terminal sends Ctrl-C to the ranks, too. Forwarded as SIGTERM, it is not counted twice there.
        interrupts.append(number)
        number = signal.SIGTERM if len(interrupts) == 1 else ABORT_SIGNAL
        if len(interrupts) == 1:
            _announce_stop()
    forwarded.add(number)
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):  # the rank has just ended
            rank.send_signal(number)


def install_signal_handlers() -> None:
    """Let SIGTERM, SIGUSR1, SIGUSR2 and Ctrl-C end this rank at once, with exit code 75. Call this in the main thread.

    After `finish_iteration_at_signals`, these signals only stop training. SIGQUIT ends the rank with exit code 130.
    """
    _watch_signals(_handle)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # blocked by a launcher that became this rank


def finish_iteration_at_signals() -> None:
    """Let a stop signal from now on end the run after the current iteration, and a second Ctrl-C abort at once.

    Call this function once the process group exists, so that all ranks can agree on the last iteration.
    """
    _group_is_formed.set()


def _watch_signals(handle: Callable[[int], None]) -> None:
    """Start a thread that calls `handle(number)` for each stop or abort signal of this process.

    Call this in the main thread. Unlike a Python signal handler, `handle` runs even while the main thread waits in C++.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in (*STOP_SIGNALS, ABORT_SIGNAL):
        # The pipe receives only signals that have a handler.
        signal.signal(number, lambda *_: None)

    def read() -> None:
        while True:
            (number,) = os.read(reader, 1)
            if number in STOP_SIGNALS or number == ABORT_SIGNAL:
                handle(number)

    threading.Thread(target=read, daemon=True).start()


def _handle(number: int) -> None:
    rank, name = os.environ.get("RANK", "0"), signal.Signals(number).name
    _signals_received.append(number)
    if number == ABORT_SIGNAL or _signals_received.count(signal.SIGINT) > 1:
        end_process(EXIT_INTERRUPTED, f"rank {rank}: aborted\n")
    if not _group_is_formed.is_set():
        end_process(EXIT_STOPPED_EARLY, f"rank {rank}: stopped by {name} before the first iteration\n")
    # A terminal sends Ctrl-C to all processes of a node: the launcher of this project announces it, or else one rank.
    announces = os.environ.get("LOCAL_RANK", "0") == "0" and os.environ.get("TORCHELASTIC_RUN_ID") != LAUNCHER_ID
    if number == signal.SIGINT and announces:
        _announce_stop()


def _announce_stop() -> None:
    # In a thread, because the reader of standard error may hang, and the second Ctrl-C must still be handled.
    threading.Thread(target=os.write, args=(2, f"{FIRST_INTERRUPT}\n".encode()), daemon=True).start()


def end_process(code: int, text: str) -> NoReturn:
    """Print `text` on standard error and end this process, even if writing hangs. Any thread may call this."""
    timer = threading.Timer(_WRITE_SECONDS, os._exit, (code,))
    timer.daemon = True
    timer.start()
    # A single system call, so that lines of several ranks do not mix. sys.stderr may be locked by the main thread.
    os.write(2, text.encode())
    os._exit(code)  # a regular exit would wait for threads that hang


def requested_stop(settings: Settings, *, has_trained: bool = True) -> int:
    """Return the stop code of this rank: 0 to continue, 1 for the time limit, 2 for the file STOP, 3 for a signal.

    The largest code over all ranks decides. Only rank 0 checks the file.

    Args:
        has_trained: True after the first iteration of this start. Until then, the time limit is ignored, because a
            limit shorter than the start-up time would end every start.
    """
    limit, save = settings.training.exit_duration_in_mins, settings.checkpoint.save
    if _signals_received:
        return _SIGNAL
    # os.path.exists returns False for any error, unlike Path.exists. The next iteration checks a network file system
    # again.
    if save is not None and is_rank_zero() and os.path.exists(f"{save}/STOP"):  # noqa: PTH110
        return _STOP_FILE
    is_over = has_trained and limit is not None and time.monotonic() - _started_seconds >= 60 * limit
    return _TIME_LIMIT if is_over else _NOTHING


def reason_to_stop(training: TrainingConfig, *, iteration: int, agreed_code: int) -> str | None:
    """Return the reason why all ranks stop after this iteration, or None. At the last iteration, always return None.

    `agreed_code` is the largest result of `requested_stop` over all ranks.
    """
    return None if iteration >= training.train_iters else _REASONS[agreed_code] or None
