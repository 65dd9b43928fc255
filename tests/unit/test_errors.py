"""A command that fails prints one sentence and ends with the exit code of its error class."""

import subprocess
import sys

import pytest

CASES = {
    "ConfigError('a')": (2, "error: a\n"),
    "ConfigError(['a', 'b'])": (2, "error: cannot start:\n  - a\n  - b\n"),
    "DataError('a')": (65, "error: a\n"),
    "MissingInputError('a')": (66, "error: a\n"),
    "OutputError('a')": (73, "error: a\n"),
    "OSError(28, 'No space left on device', 'f')": (74, "error: [Errno 28] No space left on device: 'f'\n"),
    "CheckpointError('a')": (78, "error: a\n"),
    "ConversionError('a')": (78, "error: a\n"),
    "KeyboardInterrupt()": (130, "interrupted\n"),
    "DataError('http://me:secret@h/a?sig=secret: no')": (65, "error: http://h/a: no\n"),
    "OSError(\"404, url='https://h/a?sig=secret'\")": (74, "error: 404, url='https://h/a'\n"),
    "OSError('too many tries with url: /a?sig=secret (refused)')": (
        74,
        "error: too many tries with url: /a (refused)\n",
    ),
    "DataError('\\x1b[2J\\x07\\u202e of a stranger')": (65, "error: \\x1b[2J\\x07\\u202e of a stranger\n"),
}


def run_raising(expression: str, before: str = "", **variables: str) -> subprocess.CompletedProcess:
    code = (
        "import os, signal, threading, time\n"
        "from megatron_neobert import errors\nfrom megatron_neobert.errors import *\n"
        f"def main():\n    {before}\n    raise {expression}\nrun_command(main)"
    )
    return subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("expression", CASES)
def test_error_is_one_sentence_with_the_exit_code_of_its_class(expression):
    code, message = CASES[expression]
    finished = run_raising(expression, RANK="0", LOCAL_RANK="0")
    assert (finished.returncode, finished.stderr) == (code, message)


@pytest.mark.parametrize("bug", ["ValueError('a \\x1b[2J')", "ModuleNotFoundError('a', name='megatron_neobert.x')"])
def test_bug_keeps_its_traceback(bug):
    finished = run_raising(bug, RANK="0")
    assert finished.returncode == 1
    assert "Traceback" in finished.stderr
    assert "\x1b" not in finished.stderr


@pytest.mark.parametrize(("module", "extra"), [("nvidia.dali.fn", "dali"), ("ray", "ray")])
def test_missing_package_of_an_extra_is_reported_with_the_command_that_installs_it(module, extra):
    finished = run_raising(f"ModuleNotFoundError('a', name='{module}')")
    assert finished.returncode == 69
    assert finished.stderr.startswith(f"error: {module} is not installed; it comes with the extra [{extra}]: ")
    assert finished.stderr.endswith(f"[{extra}]'\n") and finished.stderr.count("\n") == 1


def test_missing_required_package_is_reported_with_its_python():
    finished = run_raising("ModuleNotFoundError('a', name='torch')")
    assert finished.returncode == 69
    assert finished.stderr.startswith(f"error: {sys.executable} has no module torch; ")


def test_warning_is_printed_without_file_and_line_unless_the_user_asks_for_warnings():
    warn = "import warnings; warnings.warn('odd\\x1b')"
    assert run_raising("DataError('a')", before=warn).stderr == "warning: odd\\x1b\nerror: a\n"
    assert "UserWarning: odd" in run_raising("DataError('a')", before=warn, PYTHONWARNINGS="default").stderr


def test_command_without_standard_output_ends_with_its_exit_code():
    finished = run_raising("DataError('a')", before="sys.stdout = None; return 3")  # as Python sets it after >&-
    assert (finished.returncode, finished.stderr) == (3, "")


@pytest.mark.parametrize(
    ("error", "local_rank", "wait_seconds"),
    [("CheckpointError", "0", 1e9), ("LauncherError", "3", 1e9), ("CheckpointError", "3", 0.1)],
    ids=["first rank of a node", "launcher", "another rank"],
)
def test_error_is_printed_with_its_rank_at_once_or_after_the_wait_for_torchrun(error, local_rank, wait_seconds):
    wait = f"errors._SECONDS_UNTIL_TERMINATED = {wait_seconds}"
    finished = run_raising(f"{error}('a')", before=wait, RANK="8", LOCAL_RANK=local_rank)
    assert finished.stderr == "error on rank 8: a\n"


def test_rank_that_torchrun_terminates_prints_nothing():
    """Even though the run has installed its own signal handler, which would save and continue."""
    torchrun = """errors._SECONDS_UNTIL_TERMINATED = 1e9
    def handler(number, frame): pass
    def end():
        while signal.getsignal(signal.SIGTERM) is handler: time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
    signal.signal(signal.SIGTERM, handler)
    threading.Thread(target=end).start()"""
    finished = run_raising("MissingInputError('a')", before=torchrun, RANK="3", LOCAL_RANK="3")
    assert (finished.returncode, finished.stderr) == (66, "")
