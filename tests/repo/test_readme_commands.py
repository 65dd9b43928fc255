"""What the pages tell people to type exists, with the flags they name; what README tells them to type works.

README's way from raw files to a model, and its quick start, are walked in order, as they are written, at toy size.
"""

import os
import re
import shlex
import shutil
import sys
from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import REPOSITORY, succeed
from test_tutorial import TINY
from tests_tiny import made_up_texts

from megatron_neobert.__main__ import find_command

PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{page.name}" for page in sorted((REPOSITORY / "docs").glob("*.md")))]


TOP_LEVEL = ("megatron_neobert", "checkpoint_conversion", "tools", "benchmarks", "examples", "tests", ".ci", "docs")


def code_pieces(page: str) -> list[str]:
    """Lines of fenced blocks (continuation lines joined) and inline code."""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```(?!console)\w*\n(.*?)```", text, flags=re.DOTALL)  # console: what was printed
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    lines = [line.split(" #")[0].strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [piece for piece in lines + [code.replace("\\|", "|") for code in inline] if piece]


def documented_commands() -> list[str]:
    starts = ("bash ", "python ", "make ", "torchrun ", "neobert ")
    return sorted({piece for page in PAGES for piece in code_pieces(page) if piece.startswith(starts)})


def documented_paths() -> list[str]:
    pattern = re.compile(rf"(?:{'|'.join(map(re.escape, TOP_LEVEL))})/[\w./-]+")
    return sorted({piece for page in PAGES for piece in code_pieces(page) if pattern.fullmatch(piece)})


def missing_script(command: str) -> str | None:
    """The script, module, make target or command that is named and does not exist."""
    words = shlex.split(command)
    if words[0] == "neobert":
        return None if words[1].startswith("-") or find_command(words[1:]) else " ".join(words[:3])
    if words[0] == "make":
        rules = re.findall(r"^([\w -]+):", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
        targets = " ".join(rules).split()
        return next((word for word in words[1:] if word not in targets), None)
    if "-m" in words[:2]:
        module = words[2]
        own = module.split(".")[0] in TOP_LEVEL
        return module if own and not (REPOSITORY / f"{module.replace('.', '/')}.py").is_file() else None
    scripts = [word for word in words[1:] if word.endswith((".py", ".sh"))]
    return next((script for script in scripts if not (REPOSITORY / script).is_file()), None)


@cache
def help_of(*words: str) -> str:
    """The --help of a script or command, or of one of its subcommands."""
    starts = {".py": [sys.executable], ".sh": ["bash"], "": [sys.executable, "-m", "megatron_neobert"]}
    every = "--help-all" if words in (("train",), ("examples/pretrain_neobert.sh",)) else "--help"
    command = (*starts[Path(words[0]).suffix], *words, every)
    return succeed(*command, cwd=REPOSITORY, env=os.environ | {"PYTHON": sys.executable})


def unknown_flags(command: str) -> list[str]:
    """Flags in a documented command that its --help does not know."""
    command = re.sub(r"[\[\]]", " ", command)
    if own := find_command(command.split()[1:]):
        start, rest = own.split(), command.split(own, 1)[1].lstrip()
    else:
        script, separator, rest = command.partition(".py " if ".py " in command else ".sh ")
        if not separator:
            return []
        start = [script.split()[-1] + separator.strip()]
    if own in (None, "convert") and (subcommand := re.match(r"[a-z][a-z-]+(?= |$)", rest)):
        start.append(subcommand.group())
    help_text = help_of(*start)
    return [flag for flag in re.findall(r"--[a-z][\w-]*", rest) if not re.search(rf"{flag}(?![\w-])", help_text)]


def test_documented_commands_exist_and_know_their_flags():
    commands = documented_commands()
    assert len(commands) > 80
    assert {command: script for command in commands if (script := missing_script(command))} == {}
    assert {command: flags for command in commands if (flags := unknown_flags(command))} == {}


def test_documented_paths_exist():
    assert [path for path in documented_paths() if not (REPOSITORY / path).exists()] == []


# A model of one layer and four iterations in the place of the small configuration, with a checkpoint in the middle.
TOY = TINY.replace("save_interval: 4", "save_interval: 2")


def block_of(page: str, heading: str, language: str) -> str:
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    return re.search(rf"^## {heading}$.*?```{language}\n(.*?)```", text, flags=re.DOTALL | re.MULTILINE)[1]


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like the repository, with texts, a toy configuration, and an environment that is ready."""
    place = tmp_path_factory.mktemp("a clone")
    for name in ("megatron_neobert", "checkpoint_conversion"):
        (place / name).symlink_to(REPOSITORY / name)
    for name in ("tools", "examples"):
        shutil.copytree(REPOSITORY / name, place / name)
    (place / "examples" / "configs" / "tiny.yaml").write_text(TOY)
    (place / "tiny").write_text(TOY)  # a file goes before the recipe of that name
    (place / "bin").mkdir()
    (place / "bin" / "neobert").write_text('#!/bin/sh\nexec python -m megatron_neobert "$@"\n')
    (place / "bin" / "neobert").chmod(0o755)
    (place / "tools" / "prepare_environment.sh").write_text(f"echo {shlex.quote(sys.executable)}\n")
    texts = place / "quickstart_run" / "texts"  # as the quickstart leaves them
    texts.mkdir(parents=True)
    pq.write_table(pa.table({"content": made_up_texts(300)}), texts / "part.parquet")
    return place


def succeed_in(place: Path, command: str) -> str:
    """Run a line in a shell whose python is this one, and return what was printed."""
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(place), "HF_HUB_OFFLINE": "1"}
    environment["PATH"] = f"{place / 'bin'}:{Path(sys.executable).parent}:{environment['PATH']}"
    environment.pop("NPROC_PER_NODE", None)  # one rank unless the command says otherwise
    return succeed("bash", "-c", command, cwd=place, env=environment)


@pytest.mark.slow
def test_blocks_of_the_readme_lead_from_raw_files_to_a_model_that_fills_masks_and_the_quick_start_resumes(place: Path):
    block = block_of("README.md", "Your own corpus", "bash").replace("\\\n", " ")
    lines = [" ".join(line.split(" #")[0].split()) for line in block.splitlines()]
    said = {line: succeed_in(place, line) for line in lines if line and not line.startswith("source ")}
    assert len(said) == 6, list(said)
    plan = next(output for command, output in said.items() if command.endswith("--dry-run"))
    assert "parameters" in plan and "1,000,000 iterations" in plan
    assert sorted(path.name for path in (place / "runs" / "first").glob("iter_*")) == ["iter_0000002", "iter_0000004"]
    (place / "fill.py").write_text(block_of("README.md", "Your own corpus", "python"))
    assert "'token_str'" in succeed_in(place, "python fill.py")

    run = place / "quickstart_run"  # finished stages are skipped: they find these files under their own names
    shutil.copytree(place / "tokenizer", run / "tokenizer")
    for path in (place / "corpus").glob("web_content_document*"):
        shutil.copy(path, run / path.name.replace("web", "corpus"))
    shutil.copytree(place / "runs" / "first", run / "checkpoints")
    shutil.rmtree(run / "checkpoints" / "iter_0000004")  # so that two iterations are left
    output = succeed_in(place, "bash examples/quickstart.sh")
    assert output.count("already there") == 3
    assert re.search(r"== Summary\n +loss +\d+\.\d\d -> \d+\.\d\d nats per masked token", output)
    assert (run / "checkpoints" / "iter_0000004").is_dir()
    assert (run / "model" / "config.json").is_file()
