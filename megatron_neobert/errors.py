"""Errors that a user can fix, with the exit code of each class, and `run_command`, which reports them.

A message states what is wrong with its values, the rule, and what to do. Any other exception, except OSError and
KeyboardInterrupt, is a bug of this project and keeps its traceback.
"""

import difflib
import os
import select
import shlex
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import ClassVar, NoReturn

from megatron_neobert.text import visible, without_credentials

# Codes from 64 to 78 follow sysexits.h; docs/troubleshooting.md lists all of them.
# A package is missing, or another rank has ended or does not answer: start again.
EXIT_UNAVAILABLE = 69
EXIT_IO_ERROR = 74
# The run stopped on request and saved a checkpoint: the same command resumes it.
EXIT_STOPPED_EARLY = 75
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as in a shell
# 128 + SIGPIPE, as in a shell. The reader of our output has ended, and the work may be incomplete.
EXIT_BROKEN_PIPE = 141

LONGEST_REASON = 500  # characters of a library's message
# Extra in pyproject.toml -> modules it installs. tests/repo/test_packaging.py compares both.
MODULES_OF_EXTRAS = {
    "eval": ("mteb", "sentence_transformers", "datasets", "sklearn", "scipy", "seqeval", "accelerate"),
    "onnx": ("transformers.exporters", "onnx", "onnx_ir", "onnxscript", "onnxruntime"),
    "fast": ("nanotoken",),
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
_IS_CHECKOUT = (_REPOSITORY / "setup.py").exists()  # False for an installed wheel
_LAYOUT = "\n\t"  # control characters that messages may contain
# torchrun polls its ranks ten times per second. The rest is a margin, because ranks do not fail at the same moment.
_SECONDS_UNTIL_TERMINATED = 10.0


class NeoBERTError(Exception):
    """Base class of this project's errors. Credentials in a message's URLs are removed."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str) -> None:
        super().__init__(without_credentials(message))


class ConfigError(NeoBERTError):
    """Invalid settings. The message lists all problems, so that one start is enough to find them."""

    exit_code = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = list(map(without_credentials, [problems] if isinstance(problems, str) else problems))
        if len(self.problems) == 1:
            super().__init__(self.problems[0])
        else:
            super().__init__("cannot start:" + "".join(f"\n  - {problem}" for problem in self.problems))


class LauncherError(NeoBERTError):
    """Contradictory environment variables of a rank or node. Every rank prints its error, because the values differ."""

    exit_code = 2


class DataError(NeoBERTError):
    """Invalid content of an input file, a corpus or a tokenizer."""

    exit_code = 65


class MissingInputError(NeoBERTError):
    """An input does not exist, or a pattern matches no file."""

    exit_code = 66


class WorkerError(NeoBERTError):
    """A worker process or another rank has ended."""

    exit_code = EXIT_UNAVAILABLE


class MissingPackageError(NeoBERTError):
    """A required package is not installed, and no extra of this project contains the package."""

    exit_code = EXIT_UNAVAILABLE


class DivergenceError(NeoBERTError):
    """Losses, gradients or weights are not finite; the run cannot continue."""

    exit_code = 70


class OutputError(NeoBERTError):
    """An output cannot be created, or exists already."""

    exit_code = 73


class SaveError(NeoBERTError):
    """A checkpoint could not be written."""

    exit_code = EXIT_IO_ERROR


class StorageError(NeoBERTError):
    """An object in remote storage cannot be read, or its local copy cannot be written."""

    exit_code = EXIT_IO_ERROR


class CheckpointError(NeoBERTError):
    """A checkpoint cannot be used: it is incomplete, damaged, or from a different model or run."""

    exit_code = 78


class ConversionError(NeoBERTError):
    """A weight or setting is missing, or the target format cannot represent it."""

    exit_code = 78


def suggestion(word: str, known: Iterable[str], *, otherwise: str = "; see --help for the list.") -> str:
    """Return the end of an error message about an unknown name, such as `; did you mean '--lr'?`.

    Return `otherwise` if no name in `known` is similar to `word`.
    """
    # Without their hyphens, because these would make all flags similar.
    names = {name.lstrip("-"): name for name in known}
    close = difflib.get_close_matches(word.lstrip("-"), list(names), n=1, cutoff=0.6)
    return f"; did you mean {names[close[0]]!r}?" if close else otherwise


def suggest_path(path: Path, *, otherwise: str) -> str:
    """Return the end of an error message about a missing path: a similar name in the same folder, or `otherwise`."""
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    return suggestion(path.name, names, otherwise=otherwise)


def short_reason(error: BaseException) -> str:
    """Return a library error's class and message on one line of at most 500 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST_REASON]


def yaml_reason(error: Exception) -> str:
    """Return a PyYAML error's message, line and column (from 1) on one line, without excerpts of the file."""
    text, mark = str(error), getattr(error, "problem_mark", None)
    if mark is not None:
        problem = ", ".join(filter(None, (getattr(error, "context", None), getattr(error, "problem", None))))
        text = f"line {mark.line + 1}, column {mark.column + 1}: {problem}"
    return " ".join(text.split())[:LONGEST_REASON]


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """Run the `main` of a command, print an error as one sentence on stderr, and end the process with the exit code.

    The code is `main`'s result (0 for None), a NeoBERTError's `exit_code`, 69 for a missing package, 74 for an OSError,
    130 for Ctrl-C, 141 (silently) for a closed stdout, or 1 with a traceback for any other exception. Under torchrun,
    an error that all ranks raise is printed once per node. `main` should import slow and optional packages itself.
    """
    print_warnings_as_sentences()
    try:
        code = main() or 0
        if sys.stdout is not None:  # None if the process was started without standard output
            sys.stdout.flush()  # inside the try block, to notice that the reader of a pipe has ended
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
        print("interrupted", file=sys.stderr)
    except Exception as error:
        code, message = explain(error)
        stdout_poll = select.poll()
        stdout_poll.register(1, 0)
        is_stdout_closed = any(event & select.POLLERR for _, event in stdout_poll.poll(0))
        if isinstance(error, BrokenPipeError) and is_stdout_closed:  # as in `neobert ... | head`
            # Python flushes stdout again at exit, which must not fail.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = EXIT_BROKEN_PIPE
        elif message is None:
            print(format_bug(error), end="", file=sys.stderr)
        else:
            if not isinstance(error, LauncherError) and os.environ.get("LOCAL_RANK", "0") != "0":
                # Wait, so that only local rank 0 prints an error that all ranks raise. torchrun then terminates this
                # rank. If torchrun does not, only this rank has an error.
                signal.set_wakeup_fd(-1)  # or the run's signal thread would handle SIGTERM
                signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(code))
                time.sleep(_SECONDS_UNTIL_TERMINATED)
            rank = os.environ.get("RANK", "0")
            print(f"error{'' if rank == '0' else f' on rank {rank}'}: {message}", file=sys.stderr, flush=True)
    sys.exit(code)


def explain(error: BaseException) -> tuple[int, str | None]:
    """Return an error's exit code and message. The message is None for a bug, whose traceback should be printed."""
    code: int = 1
    message: str | None = None
    if isinstance(error, NeoBERTError):
        code, message = error.exit_code, str(error)
    elif isinstance(error, OSError):  # its message is not ours and can contain URLs and control characters
        code, message = EXIT_IO_ERROR, str(error)
    elif isinstance(error, ModuleNotFoundError) and (remedy := _missing_package(error.name or "")):
        code, message = EXIT_UNAVAILABLE, remedy
    elif isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        code, message = code or EXIT_UNAVAILABLE, f"exited with code {code} before the run was finished"
    return code, None if message is None else visible(without_credentials(message), keep=_LAYOUT)


def format_bug(error: BaseException) -> str:
    """Return the traceback of an error, without credentials and escape sequences."""
    return visible(without_credentials("".join(traceback.format_exception(error))), keep=_LAYOUT)


def print_warnings_as_sentences() -> None:
    """Print Python warnings without file and line, unless the user has set -W or PYTHONWARNINGS."""
    if not sys.warnoptions:
        warnings.formatwarning = lambda message, *_, **__: f"warning: {visible(str(message), keep=_LAYOUT)}\n"


def install_command(extra: str) -> str:
    """Return the command that installs an extra of this project, from the checkout if Python runs from a checkout."""
    packages = [f"megatron-neobert[{extra}]"]
    if _IS_CHECKOUT:
        packages = ["-c", f"{_REPOSITORY}/constraints.txt", "-e", f"{_REPOSITORY}[{extra}]"]
    return shlex.join([sys.executable, "-m", "pip", "install", *packages])


def _missing_package(module: str) -> str | None:
    """Return a message that says how to install `module`, or None if `module` belongs to this project or to Python."""
    package = module.split(".")[0]
    if package in ("", "megatron_neobert", "checkpoint_conversion", *sys.stdlib_module_names):
        return None
    for extra, modules in MODULES_OF_EXTRAS.items():
        if any(f"{module}.".startswith(f"{name}.") for name in modules):
            return f"{module} is not installed; it comes with the extra [{extra}]: {install_command(extra)}"
    python = _REPOSITORY / ".venv" / "bin" / "python"
    if python.exists() and Path(sys.executable).parent != python.parent:
        remedy = f"start the command with {python}"
    elif _IS_CHECKOUT:
        remedy = f"make an environment that has it with: bash {_REPOSITORY}/tools/prepare_environment.sh"
    else:
        remedy = f"install it with: {sys.executable} -m pip install --force-reinstall megatron-neobert"
    return f"{sys.executable} has no module {module}; {remedy}"
