"""When a run ends before its last iteration: a signal to any rank, the time limit, or the exit interval.

All ranks stop at the same iteration, after saving. Before the process group stands there is no such iteration and
nothing to save, so a signal ends the rank at once. Standard library only: this has to hold before torch is imported.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from megatron_neobert.config import TrainingConfig
from megatron_neobert.errors import EXIT_INTERRUPTED, EXIT_STOPPED_EARLY

_NOTHING, _TIME_LIMIT, _SIGNAL = range(3)
_REASONS = {_TIME_LIMIT: "--exit-duration-in-mins is over", _SIGNAL: "a signal asked for it"}

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

_group_stands = threading.Event()
_signals_received: list[int] = []
_started_seconds = time.monotonic()


def install_signal_handlers() -> None:
    """SIGTERM, SIGUSR1 and Ctrl-C end this rank at once, with 75, until `remember_signals` is called."""
    for number in STOP_SIGNALS:
        signal.signal(number, _remember)
    watch_signals(_end_rank)


def remember_signals() -> None:
    """From now on they finish the iteration and save; a second Ctrl-C aborts. To be called once the group stands."""
    _group_stands.set()


def watch_signals(answer: Callable[[int], None]) -> None:
    """Calls `answer` with each stop signal that has a handler, in a thread of its own.

    Python runs a handler between two steps of the main thread, and there is no next step while that waits in C++ for
    a peer that does not come. At once, however, the signal leaves its number in a pipe, which a thread can read.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    threading.Thread(target=_read_signals, args=(reader, answer), daemon=True).start()


def _read_signals(reader: int, answer: Callable[[int], None]) -> None:
    while True:
        (number,) = os.read(reader, 1)
        if number in STOP_SIGNALS:
            answer(number)


def _end_rank(number: int) -> None:
    if _group_stands.is_set():
        return
    rank, name = os.environ.get("RANK", "0"), signal.Signals(number).name
    sys.stderr.write(f"rank {rank}: stopped by {name} before the first iteration\n")  # in one piece, beside others
    os._exit(EXIT_STOPPED_EARLY)


def _remember(number: int, frame: FrameType | None) -> None:
    _signals_received.append(number)
    if _signals_received.count(signal.SIGINT) > 1:
        os._exit(EXIT_INTERRUPTED)


def stop_code_of_this_rank(training: TrainingConfig) -> int:
    """What this rank alone knows; the largest code over all ranks decides (see `reason_to_stop`)."""
    if _signals_received:
        return _SIGNAL
    limit = training.exit_duration_in_mins
    if limit is not None and time.monotonic() - _started_seconds >= 60 * limit:
        return _TIME_LIMIT
    return _NOTHING


def reason_to_stop(training: TrainingConfig, *, iteration: int, agreed_code: int) -> str | None:
    """Why all ranks stop after this iteration, in words; None to go on."""
    if iteration >= training.train_iters:
        return None  # it is over anyway
    if agreed_code != _NOTHING:
        return _REASONS[agreed_code]
    if training.exit_interval and iteration % training.exit_interval == 0:
        return f"--exit-interval {training.exit_interval}"
    return None
