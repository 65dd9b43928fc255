"""What holds for every command: whose package it runs, without an environment, with a misspelt flag, with Ctrl-C."""

import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from unit.tools.commands import REPOSITORY

from megatron_neobert.errors import ConfigError

COMMANDS = [
    *sorted(REPOSITORY.glob("tools/*.py")),
    *sorted(REPOSITORY.glob("benchmarks/benchmark_*.py")),
    *(REPOSITORY / "checkpoint_conversion" / name for name in ("convert.py", "verify.py")),
]
OWN_CHECKOUT = "sys.path.insert(0, str(Path(__file__).resolve().parents[1]))"
every_command = pytest.mark.parametrize("script", COMMANDS, ids=lambda path: path.name)


def start(script: Path, *arguments: object, packages: Path | None = None, options: tuple[str, ...] = ()):
    """Exit code and standard error of a process with PYTHONPATH=packages, started far from the checkout."""
    environment = {**os.environ, "PYTHONPATH": str(packages or "")}
    command = [sys.executable, *options, str(script), *map(str, arguments)]
    ended = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=300, check=False)
    return ended.returncode, ended.stderr


def make_clone(folder: Path) -> Path:
    """Names itself in the error of validate_data.py."""
    own = [
        f"megatron_neobert/{name}.py" for name in ("__init__", "text", "commands/__init__", "commands/validate_data")
    ]
    for name in (*own, "tools/validate_data.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, folder / name)
    errors = (REPOSITORY / "megatron_neobert" / "errors.py").read_text()
    (folder / "megatron_neobert" / "errors.py").write_text(f'{errors}\nraise SystemExit("{folder.name}")\n')
    return folder


# --- whose package


def test_script_runs_the_package_of_its_own_checkout_though_another_is_installed(tmp_path):
    first, second = make_clone(tmp_path / "first"), make_clone(tmp_path / "second")
    script = second / "tools" / "validate_data.py"
    assert start(script, packages=first) == (1, "second\n")
    script.write_text(script.read_text().replace(OWN_CHECKOUT, ""))
    assert start(script, packages=first) == (1, "first\n"), "the control: without that line"


@every_command
def test_every_script_has_that_line_before_its_first_import_of_this_project(script):
    source = script.read_text(encoding="utf-8")
    assert OWN_CHECKOUT in re.split(r"\nfrom (?:megatron_neobert|checkpoint_conversion)\b", source)[0]


# --- without the environment


def test_every_script_can_be_read_by_a_python_that_has_no_packages():
    """What is missing is then missed by `main`, where run_command reports it."""
    code = "import runpy, sys\nfor script in sys.argv[1:]: assert 'main' in runpy.run_path(script, run_name='read')"
    command = [sys.executable, "-E", "-S", "-c", code, *map(str, COMMANDS)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("tools/preprocess_data.py", ()),
        ("tools/validate_data.py", ("corpus",)),
        ("checkpoint_conversion/verify.py", "//"),
    ],
)
def test_command_started_without_the_environment_says_what_helps_and_ends_with_69(script, arguments):
    code, errors = start(REPOSITORY / script, *arguments, options=("-S",))
    assert code == 69
    assert errors.startswith(f"error: {sys.executable} has no module ") and errors.count("\n") == 1
    assert f"{REPOSITORY}/tools/prepare_environment.sh" in errors or f"{REPOSITORY}/.venv/bin/python" in errors


def test_command_whose_extra_is_missing_names_it(tmp_path):
    """As fetch_mteb.py in the quick start's own environment; here datasets is hidden."""
    (tmp_path / "datasets.py").write_text("raise ModuleNotFoundError('hidden', name='datasets')")
    code, errors = start(REPOSITORY / "tools" / "fetch_mteb.py", "--output", tmp_path, packages=tmp_path)
    assert code == 69
    remedy = f"{sys.executable} -m pip install -c {REPOSITORY}/constraints.txt -e '{REPOSITORY}[eval]'"
    assert errors == f"error: datasets is not installed; it comes with the extra [eval]: {remedy}\n"


@pytest.mark.parametrize(("command", "expected"), [("preprocess_data.py", 69), ("check_environment.py", 0)])
def test_python_that_is_too_old_is_named_except_to_the_command_that_checks_it(command, expected):
    code = f"import sys; sys.version_info, sys.argv = (3, 9, 18), ['{command}']; import megatron_neobert"
    ended = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert ended.returncode == expected
    assert ended.stderr.startswith(f"error: {sys.executable} is Python 3.9, and" if expected else "")


# --- misspelt flags


@pytest.fixture
def typed(monkeypatch):
    """Starts a command's main in this process, with the handlers of signals put back afterwards."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGPIPE)}

    def start_here(script, *arguments):
        monkeypatch.setattr(sys, "argv", [str(script), *map(str, arguments)])
        monkeypatch.setattr(sys, "path", list(sys.path))
        return runpy.run_path(str(script), run_name="read")["main"]()

    yield start_here
    for number, handler in handlers.items():
        signal.signal(number, handler)


@every_command
def test_misspelt_flag_gets_a_suggestion_in_every_command(script, typed):
    with pytest.raises(ConfigError, match=r"unknown flag --hlep; did you mean '--help'\?"):
        typed(script, "--hlep")


@pytest.mark.parametrize(
    ("words", "problems"),
    [
        (
            "checkpoint_conversion/convert.py megatron-to-hf --laod x --output=y",
            ["unknown flag --laod; did you mean '--load'?",
             "the following arguments are required: --load. See --help."],
        ),
        ("checkpoint_conversion/convert.py hf-to-megatron --load x --output y --no-verfication",
         ["unknown flag --no-verfication; did you mean '--no-verification'?"]),
        ("tools/validate_data.py corpus --xyz", ["unknown flag --xyz; see --help for the list."]),
        ("tools/validate_data.py corpus another", ["unrecognized arguments: another. See --help."]),
        (
            "tools/replay_batch.py --load x --iteratoin=5 --micro-batch-size 2",
            ["unknown flag --iteratoin; did you mean '--iteration'?",
             "the following arguments are required: --iteration. See --help."],
        ),
        ("tools/inspect_batch.py --iteration 5 --micro-batch-sise 2 --rowz -1",
         ["unknown flag --micro-batch-sise; did you mean '--micro-batch-size'?",
          "unknown flag --rowz; did you mean '--rows'?"]),
    ],
)  # fmt: skip
def test_flags_of_subcommands_and_of_a_run_are_known_and_every_unknown_one_is_named(words, problems, typed):
    script, *arguments = words.split()
    with pytest.raises(ConfigError) as refusal:
        typed(REPOSITORY / script, *arguments)
    assert refusal.value.problems == problems


# --- before torch


def test_help_of_every_command_answers_without_torch():
    code = """import contextlib, io, runpy, sys
from megatron_neobert.__main__ import PLACES, main
def ask(words, start):
    sys.argv, shown = [*words, "--help"], io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(shown):
        start()
    assert not {"torch", "transformers", "datasets", "matplotlib"} & set(sys.modules), words
    return shown.getvalue()
for script in sys.argv[1:]:
    assert "usage: " in ask([script], lambda: runpy.run_path(script, run_name="__main__")), script
for name in PLACES:
    assert ask(["neobert", *name.split()], main).startswith(f"usage: neobert {name} "), name
"""
    command = [sys.executable, "-c", code, *map(str, COMMANDS)]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        ("tools/report.py --results nothere --output out", 66, "--results nothere: no such folder"),
        ("checkpoint_conversion/convert.py megatron-to-hf --load nothere --output out", 66, "nothere holds no"),
        ("checkpoint_conversion/convert.py hf-to-megatron --load nothere --output out", 66, "--load nothere: no"),
        ("checkpoint_conversion/verify.py / nothere", 66, "B nothere: no such folder"),
        ("tools/evaluate_glue.py --model / --data-dir / --output out --tasks mrcp", 2, "--tasks mrcp: GLUE's"),
        ("tools/evaluate_glue.py --model nothere --data-dir / --output out", 66, "--model nothere: no such folder"),
        ("tools/evaluate_mteb.py --model nothere --data-dir / --output out", 66, "--model nothere: no such folder"),
        ("tools/evaluate_pseudo_perplexity.py --model nothere --data / --output out", 66, "--model nothere: no"),
        ("tools/benchmark_throughput.py --model nothere --output out", 66, "--model nothere: no such folder"),
        ("tools/finetune_contrastive.py --model nothere --config x --data-dir / --output out", 66, "--model nothere"),
        ("tools/export_onnx.py --model nothere --output out", 66, "--model nothere: no such folder"),
    ],
)  # fmt: skip
def test_input_that_is_not_there_is_found_before_torch_is_imported(tmp_path, words, code, reason):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    script, *arguments = words.split()
    found, errors = start(REPOSITORY / script, *arguments, packages=tmp_path)
    assert (found, errors[: len(reason) + 7]) == (code, f"error: {reason}")


# --- Ctrl-C


@pytest.mark.parametrize(
    ("words", "package"),
    [
        ("tools/preprocess_data.py", "numpy"),
        ("tools/inspect_data.py corpus", "numpy"),
        (f"tools/train_tokenizer.py --input {__file__} --output out", "orjson"),
        ("tools/replay_batch.py --load . --iteration 1", "yaml"),
        ("tools/check_parity.py", "torch"),
    ],
)
def test_ctrl_c_during_imports_ends_without_a_traceback(tmp_path, words, package):
    interrupted = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    (tmp_path / f"{package}.py").write_text(interrupted)
    script, *arguments = words.split()
    assert start(REPOSITORY / script, *arguments, packages=tmp_path) == (130, "interrupted\n")
