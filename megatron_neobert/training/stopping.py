"""When a run ends before its last iteration: a signal to any rank, the time limit, or the exit interval.

All ranks stop at the same iteration, after saving. Standard library only, so that the handler can be installed before
torch is imported: a signal that arrives during the imports is remembered and not deadly to one rank.
"""

import os
import signal
import time
from types import FrameType

from megatron_neobert.config import TrainingConfig
from megatron_neobert.errors import EXIT_INTERRUPTED

_NOTHING, _TIME_LIMIT, _SIGNAL = range(3)
_REASONS = {_TIME_LIMIT: "--exit-duration-in-mins is over", _SIGNAL: "a signal asked for it"}

_signals_received: list[int] = []
_started_seconds = time.monotonic()


def install_signal_handlers() -> None:
    """SIGTERM, SIGUSR1 and the first Ctrl-C finish the iteration and save; a second Ctrl-C aborts."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, _remember)


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
