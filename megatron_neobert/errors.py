"""Errors that somebody can mend, and the exit code that each one ends a command with.

Every message says what is wrong with its values, the rule it breaks, and what to do. Anything that is not one of
these classes (or an operating-system error) is our own bug and keeps its traceback.
"""

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import ClassVar, NoReturn

EXIT_UNAVAILABLE = 69  # another rank has gone or does not answer: start again with the same command
EXIT_IO_ERROR = 74
EXIT_STOPPED_EARLY = 75  # stopped on request with a checkpoint written: start again with the same command
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141  # as a shell reports SIGPIPE: whoever read our output has left, and the work may be half done

LONGEST_REASON = 500  # characters of what a library says
_SECONDS_TO_BE_ENDED = 5.0  # torchrun looks ten times a second, but ranks that started together are not equally fast


class NeoBERTError(Exception):
    """Base of the errors below; never raised itself."""

    exit_code: ClassVar[int] = 1


class ConfigError(NeoBERTError):
    """The user's settings. Carries every problem found, so that one start reports all of them."""

    exit_code = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        if len(self.problems) == 1:
            super().__init__(self.problems[0])
        else:
            super().__init__("cannot start:" + "".join(f"\n  - {problem}" for problem in self.problems))


class LauncherError(NeoBERTError):
    """What the environment says about this rank. Each rank is told something else, so each of them speaks."""

    exit_code = 2


class DataError(NeoBERTError):
    """The content of a shard, a corpus or a tokenizer."""

    exit_code = 65


class MissingInputError(NeoBERTError):
    """An input that does not exist, or a pattern that matches nothing."""

    exit_code = 66


class DivergenceError(NeoBERTError):
    """Numbers that a run cannot go on with: not finite, or not the same on all replicas."""

    exit_code = 70


class OutputError(NeoBERTError):
    """An output that cannot be created, or that exists already."""

    exit_code = 73


class SaveError(NeoBERTError):
    """A checkpoint that could not be written."""

    exit_code = EXIT_IO_ERROR


class CheckpointError(NeoBERTError):
    """A checkpoint that cannot be used: incomplete, damaged, or of another model."""

    exit_code = 78


class ConversionError(NeoBERTError):
    """A weight or a setting that the target layout cannot hold, or that did not arrive."""

    exit_code = 78


def short_reason(error: BaseException) -> str:
    """What a library raised, for a message of ours: its kind and its words on one line, cut where it goes on and on."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST_REASON]


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """Runs a command's `main` and ends the process with the exit code that its outcome deserves.

    Under torchrun one rank of each node says what all of them find; what a rank finds alone, it says itself.
    """
    try:
        code = main() or 0
        sys.stdout.flush()  # here, where a reader that has left is noticed
    except NeoBERTError as error:
        code = error.exit_code
        _print_error(error, code)
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads_output():  # `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = EXIT_BROKEN_PIPE
        else:
            code = EXIT_IO_ERROR
            _print_error(error, code)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    sys.exit(code)


def _nobody_reads_output() -> bool:
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _print_error(error: Exception, code: int) -> None:
    if os.environ.get("LOCAL_RANK", "0") != "0" and not isinstance(error, LauncherError):
        _wait_to_be_ended(code)
    rank = os.environ.get("RANK", "0")
    place = "" if rank == "0" else f" on rank {rank}"
    print(f"error{place}: {error}", file=sys.stderr, flush=True)


def _wait_to_be_ended(code: int) -> None:
    """Ends the process with `code` if torchrun asks for it meanwhile: then another rank of this node has ended first.

    That one has said why, and where all ranks find the same it was local rank 0, which does not wait.
    """
    signal.set_wakeup_fd(-1)  # whoever listens to signals there would answer this one too
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(code))
    time.sleep(_SECONDS_TO_BE_ENDED)
