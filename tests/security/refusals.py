"""Assert that a call refuses bad input: with one of our errors and its exit code, soon, and in little memory.

Other exceptions pass through. A call that hangs is interrupted, and memory beyond the limit ends in MemoryError.
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
from megatron_neobert.data.batches.corpora import open_corpora
from megatron_neobert.errors import EXIT_IO_ERROR, ConfigError, NeoBERTError

_LIMIT_SECONDS = 300  # a call that does not hang takes one or two
_LIMIT_BYTES = 1 << 30  # more than the process has already
_LONGEST_MESSAGE = 900  # characters; values from files are truncated


class Hang(BaseException):
    """The call did not return in time."""


@contextmanager
def bounded() -> Iterator[None]:
    """Limit the block to five minutes and a gigabyte of new memory."""

    def give_up(number: int, frame: FrameType | None) -> None:
        raise Hang(f"no return after {_LIMIT_SECONDS} s")

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    previous = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(_LIMIT_SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (used + _LIMIT_BYTES, hard))
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def assert_refused(call: Callable[[], Any], exit_code: int, *words: str) -> None:
    """Assert that the call fails with this exit code and short printable messages that contain all the words."""
    code, messages = 0, list[str]()
    with bounded():
        try:
            call()
        except NeoBERTError as error:
            code, messages = error.exit_code, error.problems if isinstance(error, ConfigError) else [str(error)]
        except OSError as error:
            code, messages = EXIT_IO_ERROR, [str(error)]
    assert code == exit_code, f"ended with {code} {messages}, expected {exit_code}"
    assert all(message.isprintable() and len(message) <= _LONGEST_MESSAGE for message in messages), messages
    assert all(word in "\n".join(messages) for word in words), f"expected {words} in: {messages}"


def start_checks(*arguments: str) -> None:
    """Run the checks that precede a training run."""
    settings = parse_command_line(list(arguments), world_size=1).settings
    open_corpora(settings.data)
    check_folders(settings.checkpoint)
