"""A command ends with one sentence and the exit code of its error's class."""

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
    "KeyboardInterrupt()": (130, ""),
}


def run_raising(expression: str, rank: str) -> subprocess.CompletedProcess:
    code = f"from megatron_neobert.errors import *\ndef main(): raise {expression}\nrun_command(main)"
    return subprocess.run([sys.executable, "-c", code], env={"RANK": rank}, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("expression", CASES)
def test_an_error_ends_in_one_sentence_and_its_exit_code(expression):
    code, message = CASES[expression]
    finished = run_raising(expression, rank="0")
    assert (finished.returncode, finished.stderr) == (code, message)


def test_our_own_bugs_keep_their_traceback():
    finished = run_raising("ValueError('a')", rank="0")
    assert finished.returncode == 1
    assert "Traceback" in finished.stderr


def test_another_rank_is_silent_about_what_all_ranks_find_and_speaks_for_itself_otherwise():
    assert run_raising("ConfigError('a')", rank="3").stderr == ""
    assert run_raising("DataError('a')", rank="3").stderr == "error on rank 3: a\n"
