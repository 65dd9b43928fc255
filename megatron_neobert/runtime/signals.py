"""Requests to end a run before its last iteration: a signal to any process, the time limit, the file SAVE/STOP.

All ranks stop at the same iteration, after saving. Before the process group stands there is no such iteration and
nothing to save, so a signal ends the rank at once. No torch: this has to hold before it is imported.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil

from megatron_neobert.config.schema import Settings, TrainingConfig
from megatron_neobert.errors import EXIT_INTERRUPTED, EXIT_STOPPED_EARLY, EXIT_UNAVAILABLE
from megatron_neobert.runtime.environment import is_rank_zero

_NOTHING, _TIME_LIMIT, _STOP_FILE, _SIGNAL = range(4)
_REASONS = ("", "--exit-duration-in-mins is over", "the file STOP in --save asked for it", "a signal asked for it")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
ABORT_SIGNAL = signal.SIGQUIT  # what the launcher makes of the second Ctrl-C
FIRST_INTERRUPT = "stopping after this iteration, with a checkpoint if there is --save; Ctrl-C again aborts at once"

_SECONDS_TO_WRITE = 2.0  # to stderr, whose reader may have stopped

_group_stands = threading.Event()
_signals_received: list[int] = []
_signals_answered: list[int] = []
_started_seconds = time.monotonic()
passed_on: set[int] = set()  # by this launcher to its ranks
interrupts: list[int] = []  # Ctrl-C that this launcher got while it had ranks


def pass_on_stop_signals() -> None:
    """Pass stop signals on to the ranks of this launcher from now on; without ranks one ends the launcher.

    In a thread, because the main thread may wait in C++ for another node's launcher.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)  # the thread hears of signals that have a handler
    watch_signals(_pass_on)


def _pass_on(number: int) -> None:
    """Send a signal to the ranks, which save and end by themselves.

    A Ctrl-C is passed on as SIGTERM, and the second one as an abort: a signal to all processes of a job reaches the
    ranks twice, which must not count as two.
    """
    ranks = psutil.Process().children()
    if not ranks:
        _write(f"stopped by {signal.Signals(number).name} while no rank was running\n")
        os._exit(EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_STOPPED_EARLY)
    if number == ABORT_SIGNAL:  # torchrun passes this one on, see --signals-to-handle in launch.py
        return
    if number == signal.SIGINT:
        interrupts.append(number)
        number = signal.SIGTERM if len(interrupts) == 1 else ABORT_SIGNAL
        if len(interrupts) == 1:
            _write(f"{FIRST_INTERRUPT}\n")
    passed_on.add(number)
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended by itself
            rank.send_signal(number)


def install_signal_handlers() -> None:
    """SIGTERM, SIGUSR1 and Ctrl-C end this rank at once, with 75, until `remember_signals` is called."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=_end_with_launcher, args=(os.getppid(),), daemon=True).start()
    for number in (*STOP_SIGNALS, ABORT_SIGNAL):
        signal.signal(number, lambda number, frame: _signals_received.append(number))
    watch_signals(_answer)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # the launcher held them back until now


def remember_signals() -> None:
    """Let stop signals finish the iteration and save; a second Ctrl-C aborts. Call after the group is formed."""
    _group_stands.set()


def watch_signals(answer: Callable[[int], None]) -> None:
    """Calls `answer` with each stop or abort signal that has a handler, in a thread of its own.

    Python runs a handler between two steps of the main thread, and there is no next step while that waits in C++ for
    a peer that does not come. At once, however, the signal leaves its number in a pipe, which a thread can read.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)

    def read() -> None:
        while True:
            (number,) = os.read(reader, 1)
            if number in STOP_SIGNALS or number == ABORT_SIGNAL:
                answer(number)

    threading.Thread(target=read, daemon=True).start()


def _end_with_launcher(launcher: int) -> None:
    """End a rank whose torchrun or launcher has ended: it would wait for other ranks, or write beside its successor."""
    while os.getppid() == launcher:
        time.sleep(1.0)
    rank = os.environ.get("RANK", "0")
    _write(f"error: rank {rank}: the launcher that started it has gone. The last checkpoint is untouched.\n")
    os._exit(EXIT_UNAVAILABLE)


def _answer(number: int) -> None:
    rank, name = os.environ.get("RANK", "0"), signal.Signals(number).name
    _signals_answered.append(number)
    if number == ABORT_SIGNAL or _signals_answered.count(signal.SIGINT) > 1:
        _write(f"rank {rank}: aborted\n")
        os._exit(EXIT_INTERRUPTED)
    if not _group_stands.is_set():
        _write(f"rank {rank}: stopped by {name} before the first iteration\n")
        os._exit(EXIT_STOPPED_EARLY)
    if number == signal.SIGINT:
        _write(f"{FIRST_INTERRUPT}\n")


def _write(text: str) -> None:
    ask_within(_SECONDS_TO_WRITE, lambda: write_to_stderr(text))


def write_to_stderr(text: str) -> None:
    """Write with one call, since other ranks write as well, and past the lock of sys.stderr."""
    os.write(2, text.encode())


def ask_within(seconds: float, question: Callable[[], Any]) -> Any:
    """Return the answer, or None if the question fails or takes longer: a call to a lost peer may not return."""
    answers: list[Any] = []

    def wait_for_answer() -> None:
        with contextlib.suppress(Exception):  # the caller ends a run, which no failure of a question may prevent
            answers.append(question())

    thread = threading.Thread(target=wait_for_answer, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


def count_signals() -> int:
    """Number of stop signals received by this rank."""
    return len(_signals_received)


def requested_stop(settings: Settings, *, has_trained: bool = True) -> int:
    """Return the stop code of this rank. The largest over all ranks decides. Rank 0 alone looks for the file STOP.

    Until a start `has_trained`, the time limit does not count: one below the time that starting takes would end every
    start.
    """
    limit, save = settings.training.exit_duration_in_mins, settings.checkpoint.save
    if _signals_received:
        return _SIGNAL
    # Unlike Path.exists, false for any error: a network file system is asked again in the next iteration.
    if save is not None and is_rank_zero() and os.path.exists(f"{save}/STOP"):  # noqa: PTH110
        return _STOP_FILE
    is_over = has_trained and limit is not None and time.monotonic() - _started_seconds >= 60 * limit
    return _TIME_LIMIT if is_over else _NOTHING


def reason_to_stop(training: TrainingConfig, *, iteration: int, agreed_code: int) -> str | None:
    """Return why all ranks stop after this iteration; None to continue, or because it is the last one."""
    return None if iteration >= training.train_iters else _REASONS[agreed_code] or None
