"""How a call with a bad input must end: refused by an error of ours with its exit code, soon, and in little memory.

Anything else fails the test: another exception passes through, a call that does not come back is interrupted, memory
beyond the limit ends in MemoryError, and what is accepted is reported as such.
"""

import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from megatron_neobert.checkpoint.folder import check_folders
from megatron_neobert.config.cli import parse_command_line
from megatron_neobert.data.batches.inputs import open_inputs
from megatron_neobert.errors import EXIT_IO_ERROR, ConfigError, NeoBERTError

_LIMIT_SECONDS = 300  # what ends at all ends within one or two
_LIMIT_BYTES = 1 << 30  # beyond what the process has already
_LONGEST_SENTENCE = 900  # characters: values out of a file are cut


class Hang(BaseException):
    """The call did not come back."""


@contextmanager
def bounded() -> Iterator[None]:
    """Interrupt what takes five minutes, and refuse it more than a gigabyte of new memory."""

    def give_up(number: int, frame: FrameType | None) -> None:
        raise Hang(f"not back after {_LIMIT_SECONDS} s")

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(_LIMIT_SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (used + _LIMIT_BYTES, hard))
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def outcome_of(call: Callable[[], Any]) -> tuple[int, list[str]]:
    """Return the exit code that the call deserves and its sentences; (0, []) if it accepts."""
    with bounded():
        try:
            call()
        except NeoBERTError as error:
            return error.exit_code, error.problems if isinstance(error, ConfigError) else [str(error)]
        except OSError as error:
            return EXIT_IO_ERROR, [str(error)]
    return 0, []


def assert_refused(call: Callable[[], Any], exit_code: int, *words: str) -> None:
    """Assert that the call ends with the code, in short printable sentences that hold all the words."""
    code, sentences = outcome_of(call)
    assert code == exit_code, f"ended with {code} {sentences}, expected {exit_code}"
    assert all(sentence.isprintable() and len(sentence) <= _LONGEST_SENTENCE for sentence in sentences), sentences
    assert all(word in "\n".join(sentences) for word in words), f"expected {words} in: {sentences}"


def start_checks(*arguments: str) -> None:
    """Run the checks of the training command before it starts anything."""
    settings = parse_command_line(list(arguments), world_size=1).settings
    open_inputs(settings.data)
    check_folders(settings.checkpoint)
