"""Errors that a user can fix, and the exit code that each one ends a command with.

Every message holds what is wrong with its values, the rule it breaks, and what to do. Anything that is not one of
these classes (or an operating-system error) is our own bug and keeps its traceback.
"""

from __future__ import annotations  # `neobert check environment` runs on older Pythons too

import difflib
import os
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import ClassVar, NoReturn

from megatron_neobert.text import visible, without_credentials

EXIT_UNAVAILABLE = 69  # a package is missing; or another rank has gone or does not answer: start again
EXIT_IO_ERROR = 74  # this and those below 79 are named by sysexits.h
EXIT_STOPPED_EARLY = 75  # stopped on request with a checkpoint written: start again with the same command
EXIT_INTERRUPTED = 130  # as a shell reports SIGINT
EXIT_BROKEN_PIPE = 141  # as a shell reports SIGPIPE: the reader of our output has left, and the work may be half done

LONGEST_REASON = 500  # characters of a library's message
# Extras of setup.py and the modules they bring; tests/unit/test_errors.py compares them.
MODULES_OF_EXTRAS = {
    "eval": ("mteb", "sentence_transformers", "datasets", "sklearn", "scipy", "seqeval", "accelerate"),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "fast": ("nanotoken", "gigatoken"),
    "sentencepiece": ("sentencepiece",),
    "warc": ("fastwarc", "resiliparse"),
    "s3": ("s3fs",),
    "ray": ("ray",),
    "wandb": ("wandb",),
    "dali": ("nvidia.dali",),
    "gpu": ("transformer_engine",),
    "benchmark": ("datatrove", "datasets"),
}
_REPOSITORY = Path(__file__).resolve().parents[1]
_KEPT = "\n\t"  # control characters in a message that only lay it out
_SECONDS_TO_BE_ENDED = 10.0  # torchrun looks ten times a second, but ranks that started together are not equally fast


class NeoBERTError(Exception):
    """Base of the errors below; never raised itself. Removes the credentials of URLs from the message."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str) -> None:
        super().__init__(without_credentials(message))


class ConfigError(NeoBERTError):
    """The user's settings. Carries every problem found, so that one start reports all of them."""

    exit_code = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = list(map(without_credentials, [problems] if isinstance(problems, str) else problems))
        if len(self.problems) == 1:
            super().__init__(self.problems[0])
        else:
            super().__init__("cannot start:" + "".join(f"\n  - {problem}" for problem in self.problems))


class LauncherError(NeoBERTError):
    """A contradiction in the environment of this rank or node. Each has another one, so each of them reports it."""

    exit_code = 2


class DataError(NeoBERTError):
    """The content of a shard, a corpus or a tokenizer."""

    exit_code = 65


class MissingInputError(NeoBERTError):
    """An input that does not exist, or a pattern that matches nothing."""

    exit_code = 66


class WorkerError(NeoBERTError):
    """A process that this one needs has ended."""

    exit_code = EXIT_UNAVAILABLE


class MissingPackageError(NeoBERTError):
    """A package is not installed, and no extra of this project installs it."""

    exit_code = EXIT_UNAVAILABLE


class DivergenceError(NeoBERTError):
    """Numbers that a run cannot continue with: not finite, or not the same on all replicas."""

    exit_code = 70


class OutputError(NeoBERTError):
    """An output that cannot be created, or that exists already."""

    exit_code = 73


class SaveError(NeoBERTError):
    """A checkpoint that could not be written."""

    exit_code = EXIT_IO_ERROR


class StorageError(NeoBERTError):
    """An object in remote storage that cannot be read, or its local copy that cannot be written."""

    exit_code = EXIT_IO_ERROR


class CheckpointError(NeoBERTError):
    """A checkpoint that cannot be used: incomplete, damaged, or of another model."""

    exit_code = 78


class ConversionError(NeoBERTError):
    """A weight or a setting that the target layout cannot hold, or that did not arrive."""

    exit_code = 78


def suggestion(word: str, known: Iterable[str], *, otherwise: str = "; see --help for the list.") -> str:
    """Return the end of a sentence about an unknown name: the known name that it resembles."""
    names = {name.lstrip("-"): name for name in known}  # the hyphens that all flags share would make them alike
    close = difflib.get_close_matches(word.lstrip("-"), list(names), n=1, cutoff=0.6)
    return f"; did you mean {names[close[0]]!r}?" if close else otherwise


def short_reason(error: BaseException) -> str:
    """Return kind and message of a library's error on one line, truncated."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST_REASON]


def yaml_reason(error: Exception) -> str:
    """Return what PyYAML found, on one line: place and problem, without its excerpts of the file."""
    text, mark = str(error), getattr(error, "problem_mark", None)
    if mark is not None:
        found = ", ".join(filter(None, (getattr(error, "context", None), getattr(error, "problem", None))))
        text = f"line {mark.line + 1}, column {mark.column + 1}: {found}"
    return " ".join(text.split())[:LONGEST_REASON]


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """Run a command's `main` and end the process with the exit code of its outcome.

    Under torchrun one rank of each node reports what all of them find, and a rank itself what it finds alone. Imports
    that take long or may fail belong into `main`: Ctrl-C and a missing package are handled here.
    """
    print_warnings_as_sentences()
    try:
        code = main() or 0
        sys.stdout.flush()  # here, where a reader that has left is noticed
    except NeoBERTError as error:
        code = error.exit_code
        _print_error(error, code)
    except ModuleNotFoundError as error:
        sentence = _missing_package(error.name or "")
        code = EXIT_UNAVAILABLE if sentence else 1
        _print_error(sentence, code) if sentence else _print_trace()
    except OSError as error:
        poll = select.poll()
        poll.register(1, 0)
        if isinstance(error, BrokenPipeError) and any(event & select.POLLERR for _, event in poll.poll(0)):  # `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = EXIT_BROKEN_PIPE
        else:
            code = EXIT_IO_ERROR
            _print_error(error, code)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
        print("interrupted", file=sys.stderr)
    except Exception:
        code = 1
        _print_trace()
    sys.exit(code)


def print_warnings_as_sentences() -> None:
    """Print warnings without their place in the source, unless Python was asked for them (-W, PYTHONWARNINGS)."""
    if not sys.warnoptions:
        warnings.formatwarning = lambda message, *_, **__: f"warning: {visible(str(message), keep=_KEPT)}\n"


def _missing_package(module: str) -> str | None:
    """Return what to do about a module that cannot be found; None if it is none that a user could install."""
    package = module.split(".")[0]
    if package in ("", "megatron_neobert", "checkpoint_conversion", *sys.stdlib_module_names):
        return None
    is_checkout = (_REPOSITORY / "setup.py").exists()  # and no installed wheel
    for extra, modules in MODULES_OF_EXTRAS.items():
        if any(f"{module}.".startswith(f"{name}.") for name in modules):
            package = f"'megatron-neobert[{extra}]'"
            if is_checkout:
                package = f"-c {_REPOSITORY}/constraints.txt -e '{_REPOSITORY}[{extra}]'"
            install = f"{sys.executable} -m pip install {package}"
            return f"{module} is not installed; it comes with the extra [{extra}]: {install}"
    python = _REPOSITORY / ".venv" / "bin" / "python"
    if python.exists() and Path(sys.executable).parent != python.parent:
        remedy = f"start the command with {python}"
    elif is_checkout:
        remedy = f"make an environment that has it with: bash {_REPOSITORY}/tools/prepare_environment.sh"
    else:
        remedy = f"install it with: {sys.executable} -m pip install --force-reinstall megatron-neobert"
    return f"{sys.executable} has no module {module}; {remedy}"


def _print_trace() -> None:
    print(visible(without_credentials(traceback.format_exc()), keep=_KEPT), end="", file=sys.stderr)


def _print_error(error: Exception | str, code: int) -> None:
    if os.environ.get("LOCAL_RANK", "0") != "0" and not isinstance(error, LauncherError):
        # Until torchrun asks for the end because another rank of this node has ended first. That one has reported why,
        # and where all ranks find the same it was local rank 0, which does not wait.
        signal.set_wakeup_fd(-1)  # a thread that listens to signals there would answer this one too
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(code))
        time.sleep(_SECONDS_TO_BE_ENDED)
    rank = os.environ.get("RANK", "0")
    place = "" if rank == "0" else f" on rank {rank}"
    sentence = visible(without_credentials(str(error)), keep=_KEPT)  # of an OSError, whose message is not ours
    print(f"error{place}: {sentence}", file=sys.stderr, flush=True)
