"""The console command `neobert`: overview, unknown commands, shell completion, and start from any folder."""

import sys

import pytest
from commands import ENVIRONMENT, REPOSITORY, run, run_program, succeed

from megatron_neobert import __main__ as neobert
from megatron_neobert import __version__, pretrain


def test_overview_lists_every_command_and_imports_no_package():
    code = """import runpy, sys
before = {name.partition(".")[0] for name in sys.modules}
sys.argv = ["neobert", "--help"]
try: runpy.run_module("megatron_neobert", run_name="__main__")
except SystemExit as end: assert not end.code
print(sorted({name.partition(".")[0] for name in sys.modules} - before - set(sys.stdlib_module_names)))"""
    *shown, imported = succeed(sys.executable, "-c", code).splitlines()
    assert imported == "['megatron_neobert']"
    assert [name for name in neobert.NAMES if not any(line.startswith(f"  {name} ") for line in shown)] == []
    assert max(map(len, shown)) <= 80


def test_every_module_of_commands_has_the_first_word_of_a_command():
    modules = {path.stem for path in (REPOSITORY / "megatron_neobert" / "commands").glob("[!_]*.py")}
    assert modules == {name.split()[0].replace("-", "_") for name in neobert.NAMES}


def test_version_is_that_of_the_package():
    assert run("--version") == (0, f"neobert {__version__}\n", "")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("evalate glue", "neobert evalate: no such command; did you mean 'evaluate'?"),
        ("inspect batches", "neobert inspect: data or batch must follow; did you mean 'batch'?"),
    ],
)
def test_unknown_command_is_refused_with_a_suggestion(words, sentence):
    code, _, errors = run(words)
    assert code == 2 and sentence in errors and "Traceback" not in errors


@pytest.mark.parametrize(
    ("typed", "answers"),
    [
        ("neobert evaluate ", ["classify", "glue", "mteb", "ner", "ppl", "throughput"]),
        ("neobert evaluate glue --dat", ["--data-dir"]),
        ("neobert convert megatron-to-hf --lo", ["--load"]),
        ("neobert train --lr-decay-style co", ["cosine", "constant"]),
        ("neobert train --config ablations/m7", ["ablations/m7", "ablations/m7_released"]),
        ("neobert nothing ", []),
    ],
)
def test_shell_completes_commands_flags_and_values(typed, answers):
    """bash, as registered by argcomplete, passes the line in the environment and reads file descriptor 8."""
    asked = {"COMP_LINE": typed, "COMP_POINT": str(len(typed)), "_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n"}
    command = ("bash", "-c", 'exec "$@" 8>&1', "bash", sys.executable, "-m", "megatron_neobert")
    assert run_program(*command, env=ENVIRONMENT | asked).stdout.split() == answers


def test_train_starts_this_package_from_any_folder_and_finds_a_recipe_by_its_name(tmp_path):
    """The working directory has folders with the names of the package and the recipe, which must not be used."""
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "neobert"  # as pip writes it
    script.write_text("from megatron_neobert.__main__ import start\n\nif __name__ == '__main__':\n    start()\n")
    (tmp_path / "megatron_neobert").mkdir()
    (tmp_path / "megatron_neobert" / "__init__.py").write_text("raise SystemExit('another package')")
    (tmp_path / "ablations" / "m8").mkdir(parents=True)
    for start in ([script, "train"], [pretrain.__file__]):
        for recipe, code, sentence in (
            ("ablations/m8", 2, "--data-path is missing"),
            ("ablations/m99", 66, "or recipe; did you mean 'ablations/"),
        ):
            ended = run_program(sys.executable, *start, "--config", recipe, cwd=tmp_path)
            assert ended.returncode == code and sentence in ended.stderr
