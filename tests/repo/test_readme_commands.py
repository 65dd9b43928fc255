"""What README and CONTRIBUTING tell people to type exists, with the flags they name; `--help` costs no torch."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CONTRIBUTING.md")
COMMANDS = sorted(
    [
        *REPOSITORY.glob("tools/*.py"),
        *(REPOSITORY / "checkpoint_conversion" / name for name in ("convert.py", "verify.py")),
    ]
)
TOP_LEVEL = ("megatron_neobert", "checkpoint_conversion", "tools", "examples", "tests", ".ci", "docs")

# Runs a script as if from the command line with --help and reports which of the slow packages it imported.
HELP = """
import runpy, sys
sys.argv = [sys.argv[1], "--help"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as stop:
    code = stop.code or 0
print("\\nimported:", [name for name in ("torch", "transformers", "megatron.core") if name in sys.modules])
sys.exit(code)
"""


def code_pieces(page: str) -> list[str]:
    """Lines of fenced blocks (continuation lines joined) and inline code."""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```\w*\n(.*?)```", text, flags=re.DOTALL)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    lines = [line.split(" #")[0].strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [piece for piece in lines + [code.replace("\\|", "|") for code in inline] if piece]


def documented_commands() -> list[tuple[str, str]]:
    starts = ("bash ", "python ", "make ", "torchrun ")
    return sorted({(page, piece) for page in PAGES for piece in code_pieces(page) if piece.startswith(starts)})


def documented_paths() -> list[tuple[str, str]]:
    pattern = re.compile(rf"(?:{'|'.join(map(re.escape, TOP_LEVEL))})/[\w./-]+")
    return sorted({(page, piece) for page in PAGES for piece in code_pieces(page) if pattern.fullmatch(piece)})


def missing_script(command: str) -> str | None:
    """The script, module or make target that a command names and that does not exist."""
    words = shlex.split(command)
    if words[0] == "make":
        targets = re.findall(r"^(\w+):", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
        return next((word for word in words[1:] if word not in targets), None)
    if "-m" in words[:2]:
        module = words[2]
        own = module.split(".")[0] in TOP_LEVEL
        return module if own and not (REPOSITORY / f"{module.replace('.', '/')}.py").is_file() else None
    scripts = [word for word in words[1:] if word.endswith((".py", ".sh"))]
    return next((script for script in scripts if not (REPOSITORY / script).is_file()), None)


@cache
def help_of(*words: str) -> str:
    """The --help of a script, or of one of its subcommands."""
    command = [sys.executable if words[0].endswith(".py") else "bash", *words, "--help"]
    environment = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True).stdout


def unknown_flags(command: str) -> list[str]:
    """Flags in a documented command that the --help of its script does not know."""
    script, separator, rest = re.sub(r"[\[\]]", " ", command).partition(".py " if ".py " in command else ".sh ")
    if not separator:
        return []
    script = script.split()[-1] + separator.strip()
    subcommand = re.match(r"[a-z][a-z-]+(?= |$)", rest)
    help_text = help_of(script, subcommand.group()) if subcommand else help_of(script)
    return [flag for flag in re.findall(r"--[a-z][\w-]*", rest) if not re.search(rf"{flag}(?![\w-])", help_text)]


@pytest.mark.parametrize(("page", "command"), documented_commands())
def test_documented_command_exists(page, command):
    assert missing_script(command) is None


@pytest.mark.parametrize(("page", "command"), documented_commands())
def test_documented_flags_are_known_to_their_command(page, command):
    assert unknown_flags(command) == []


@pytest.mark.parametrize(("page", "path"), documented_paths())
def test_documented_path_exists(page, path):
    assert (REPOSITORY / path).exists()


def test_planted_commands_are_found_missing():
    assert missing_script("python tools/preprocess_everything.py --input x") == "tools/preprocess_everything.py"
    assert missing_script("make everything") == "everything"
    assert missing_script("python -m megatron_neobert.pretrane") == "megatron_neobert.pretrane"
    assert unknown_flags("python tools/make_sample_corpus.py --output D [--gigabytes N]") == ["--gigabytes"]


def test_readme_names_the_two_commands():
    assert {"bash examples/quickstart.sh", "make test"} <= {command for _, command in documented_commands()}


@pytest.mark.parametrize("script", COMMANDS, ids=lambda path: path.name)
def test_help_answers_without_importing_torch(script):
    result = subprocess.run([sys.executable, "-c", HELP, str(script)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "usage:" in result.stdout
    assert result.stdout.endswith("imported: []\n")


def test_help_check_would_see_an_import_of_torch(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import sys, types\nsys.modules['torch'] = types.ModuleType('torch')\nsys.exit(0)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", HELP, str(tmp_path / "slow.py")], capture_output=True, text=True, check=False
    )
    assert result.stdout.endswith("imported: ['torch']\n")


def test_every_command_is_a_module_that_can_be_imported_without_running():
    for script in COMMANDS:
        assert "main" in runpy.run_path(str(script), run_name="not_main")
