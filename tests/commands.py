"""The commands of this project, by the words behind `neobert` or by the path of a script in the checkout."""

import importlib
import io
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from processes import Ended, run_command

from megatron_neobert.errors import run_command as run_main

REPOSITORY = Path(__file__).resolve().parents[1]
PUBLISHED = REPOSITORY / "tests" / "published"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY)}


def command_line(command: str, *arguments: object) -> list[str]:
    """Return the words that start `evaluate glue` or `benchmarks/benchmark_step.py`."""
    words = [str(REPOSITORY / command)] if command.endswith(".py") else ["-m", "megatron_neobert", *command.split()]
    return [sys.executable, *words, *map(str, arguments)]


def main_of(command: str) -> tuple[str, list[str]]:
    """Return the module whose `main` starts a command, and the words before its arguments."""
    if command.endswith(".py"):
        return command.removesuffix(".py").replace("/", "."), []
    return "megatron_neobert.__main__", command.split()


def run_program(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program and capture what it prints; the options are those of subprocess.run."""
    options = {"env": ENVIRONMENT, "capture_output": True, "text": True, "timeout": 600, **options}
    return subprocess.run([*map(str, words)], check=False, **options)


def succeed(*words: object, **options: Any) -> str:
    """Run a program as `run_program` does, and return its standard output. Fail unless its exit code is 0."""
    ended = run_program(*words, **options)
    assert ended.returncode == 0, f"{words}\n{ended.stdout}{ended.stderr}"
    return ended.stdout


def run(command: str, *arguments: object, **options: Any) -> tuple[int, str, str]:
    """Return exit code, standard output and standard error; the options are those of subprocess.run."""
    ended = run_program(*command_line(command, *arguments), **options)
    return ended.returncode, ended.stdout, ended.stderr


def run_forked(command: str, *arguments: object) -> Ended:
    """Run the command in a fork, in a tenth of a second, with both streams in one."""
    module, words = main_of(command)
    return run_command(module, *words, *arguments)


def call(command: str, *arguments: object) -> tuple[int, str, str]:
    """Run the command in this process, which has imported most of it; return what `run` does."""
    output, errors = io.StringIO(), io.StringIO()
    module, words = main_of(command)
    with (
        pytest.MonkeyPatch.context() as patch,
        mock.patch.dict(os.environ),  # what a command sets there is taken back
        _hub_as_before(),
        redirect_stdout(output),
        redirect_stderr(errors),
    ):
        patch.setattr(sys, "argv", ["neobert", *words, *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            run_main(importlib.import_module(module).main)
    return int(ended.value.code or 0), output.getvalue(), errors.getvalue()


@contextmanager
def _hub_as_before() -> Iterator[None]:
    """Undo `go_offline` in libraries that this process has imported, or later tests could not reach a loopback hub."""
    yield
    for name in ("huggingface_hub.constants", "datasets.config"):
        if name in sys.modules:
            sys.modules[name].HF_HUB_OFFLINE = False  # type: ignore[attr-defined]


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Limit files of this process to `size` bytes, which has the effect of a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
