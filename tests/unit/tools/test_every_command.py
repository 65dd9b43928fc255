"""Promises of every command: no environment, misspelt flags, --help without torch, and Ctrl-C."""

import os
import re
import sys
from pathlib import Path

import pyarrow
import pytest
from commands import REPOSITORY, call, run_program
from pyarrow import parquet

from megatron_neobert.__main__ import NAMES

SCRIPTS = [
    *sorted(REPOSITORY.glob("tools/*.py")),
    *sorted(REPOSITORY.glob("benchmarks/benchmark_*.py")),
    REPOSITORY / "checkpoint_conversion/convert.py",
]
OWN_CHECKOUT = "sys.path.insert(0, str(Path(__file__).resolve().parents[1]))"
every_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)


def start(*words: object, packages: Path | None = None, options: tuple[str, ...] = ()):
    """Return exit code and standard error of a script, or of `neobert` with these words.

    The process runs far from the checkout; the packages come before the checkout on its path.
    """
    path = [str(packages or ""), str(REPOSITORY)]
    command = [str(words[0])] if str(words[0]).endswith(".py") else ["-m", "megatron_neobert", str(words[0])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path[:1] if command[0] != "-m" else path)}
    ended = run_program(sys.executable, *options, *command, *words[1:], cwd="/", env=environment)
    return ended.returncode, ended.stderr


@every_script
def test_script_imports_this_project_from_its_own_checkout(script):
    """It does not import an installed package. tests/distributed/test_launch.py starts one."""
    source = script.read_text(encoding="utf-8")
    assert OWN_CHECKOUT in re.split(r"\nfrom (?:megatron_neobert|checkpoint_conversion)\b", source)[0]


def test_script_can_be_loaded_without_any_package():
    """Its packages are imported in `main`, where run_command reports a missing one."""
    code = "import runpy, sys\nfor script in sys.argv[1:]: assert 'main' in runpy.run_path(script, run_name='read')"
    ended = run_program(sys.executable, "-E", "-S", "-c", code, *SCRIPTS)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("words", [(REPOSITORY / "tools/preprocess_data.py",), ("validate", "corpus")])
def test_command_without_the_environment_ends_with_69_and_names_the_remedy(words):
    code, errors = start(*words, options=("-S",))
    assert code == 69
    assert errors.startswith(f"error: {sys.executable} has no module ") and errors.count("\n") == 1
    assert f"{REPOSITORY}/tools/prepare_environment.sh" in errors or f"{REPOSITORY}/.venv/bin/python" in errors


def test_python_that_is_too_old_is_refused():
    code = "import sys; sys.version_info = (3, 9, 18); import megatron_neobert"
    ended = run_program(sys.executable, "-c", code)
    assert ended.returncode == 69
    assert ended.stderr.startswith(f"error: {sys.executable} is Python 3.9, and")


@pytest.mark.parametrize("command", [*SCRIPTS, *(name for name in NAMES if name != "train")], ids=str)
def test_misspelt_flag_gets_a_suggestion_in_every_command(command):
    words = str(command.relative_to(REPOSITORY)) if isinstance(command, Path) else command
    direction = ["megatron-to-hf"] if words.endswith("convert.py") else []
    code, _, errors = call(words, *direction, "--hlep")
    assert code == 2 and "unknown flag --hlep; did you mean '--help'?" in errors


def test_help_of_every_command_does_not_import_torch():
    code = """import contextlib, io, runpy, sys
from megatron_neobert.__main__ import NAMES, main
def ask(words, start):
    sys.argv, shown = [*words, "--help"], io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(shown):
        start()
    assert not {"torch", "transformers", "datasets", "matplotlib"} & set(sys.modules), words
    return shown.getvalue()
for script in sys.argv[1:]:
    assert "usage: " in ask([script], lambda: runpy.run_path(script, run_name="__main__")), script
for name in NAMES:
    assert ask(["neobert", *name.split()], main).startswith(f"usage: neobert {name} "), name
"""
    ended = run_program(sys.executable, "-c", code, *SCRIPTS)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        ("report --results nothere --output out", 66, "--results nothere: no such folder"),
        ("convert megatron-to-hf --load nothere --output out", 66, "nothere holds no"),
        ("convert hf-to-megatron --load /nothere --output out", 66, "--load /nothere: no"),
        ("verify / /nothere", 66, "B /nothere: no such folder"),
        ("evaluate glue --model / --data-dir / --output out --tasks mrcp", 2, "--tasks mrcp is not one of"),
        ("evaluate glue --model /nothere --data-dir / --output out", 66, "--model /nothere: no such folder"),
        ("evaluate mteb --model /nothere --data-dir / --output out", 66, "--model /nothere: no such folder"),
        ("evaluate ppl --model /nothere --data / --output out", 66, "--model /nothere: no"),
        ("evaluate ppl --model / --data / --output out --max-length 3", 2, "--max-length 3 is below 4"),
        ("evaluate throughput --model /nothere --output out", 66, "--model /nothere: no such folder"),
        ("train-embedder --model /nothere --config x --data-dir / --output out", 66, "--model /nothere"),
        ("export-onnx --model /nothere --output out", 66, "--model /nothere: no such folder"),
        ("evaluate classify --model {} --data-dir {}/rows --output {}/out", 65,
         "{}/rows/mine has the columns tekst, label, but no text; rename its columns."),
        ("evaluate ppl --model {} --data {}/mine.jsonl --output {}/out", 65,
         "--data {}/mine.jsonl has no document to measure (1 x "),
        ("evaluate ppl --model {} --data {}/mine.parquet --output {}/out", 65,
         "{}/mine.parquet has no column 'content'; its text columns: tekst; choose"),
    ],
)  # fmt: skip
def test_wrong_input_is_reported_before_torch_is_imported(tmp_path, words, code, reason):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "mine.csv").write_text("tekst,label\na cat,0\na mat,1\n")
    (tmp_path / "mine.jsonl").write_text('{"tekst": "a cat"}\n')
    parquet.write_table(pyarrow.table({"tekst": ["a cat"]}), tmp_path / "mine.parquet")
    found, errors = start(*(word.replace("{}", str(tmp_path)) for word in words.split()), packages=tmp_path)
    assert found == code and errors.startswith(f"error: {reason.replace('{}', str(tmp_path))}"), errors


@pytest.mark.parametrize(
    ("words", "package"),
    [
        (("preprocess",), "numpy"),
        (("train-tokenizer", "--input", __file__, "--output", "out"), "orjson"),
        (("check", "parity"), "torch"),
    ],
)
def test_ctrl_c_during_imports_ends_without_a_traceback(tmp_path, words, package):
    interrupted = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    (tmp_path / f"{package}.py").write_text(interrupted)
    assert start(*words, packages=tmp_path) == (130, "interrupted\n")
