"""tools/prepare_environment.sh, with a stand-in for Python that records the calls of pip."""

import os
import re
import shutil
from pathlib import Path

import pytest
from commands import REPOSITORY, run_program

BASH = shutil.which("bash") or "bash"

STAND_IN = """#!{bash}
# Answers the questions of the script: versions of Python and torch, pip, and creating a venv.
case "$*" in
*sys.version_info*) echo "{version} {suitable}" ;;
*ensurepip*) exit {ensurepip} ;;
*platform*) echo "{version}" ;;
*importlib.metadata*) [[ -n "{torch}" ]] && echo "{torch}" ;;
"-m venv"*) mkdir -p "${{@: -1}}/bin" && cp "$0" "${{@: -1}}/bin/python" ;;
"-m pip --version") ;;
"-m pip install"*) echo "$*" >>"${{0%/bin/*}}/pip_calls"; echo "Downloading $*"; {wait}; exit {pip} ;;
*) exit 99 ;;
esac
"""


def write_stand_in(path: Path, *, version="3.11.7", torch="", ensurepip=0, pip=0, wait=":") -> None:
    """Write a stand-in for Python.

    Args:
        torch: Version of the installed torch; empty for none.
        ensurepip: Exit code of importing venv and ensurepip.
        pip: Exit code of `pip install`.
        wait: Command that `pip install` runs first.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    suitable = "suitable" if version.split(".")[1] in ("11", "12", "13") else "unsuitable"
    answers = {"suitable": suitable, "torch": torch, "ensurepip": ensurepip, "pip": pip, "wait": wait}
    path.write_text(STAND_IN.format(bash=BASH, version=version, **answers))
    path.chmod(0o755)


@pytest.fixture
def clone(tmp_path) -> Path:
    """The files of the repository that the script reads, in a folder with a space in its name."""
    root = tmp_path / "a clone"
    (root / "tools").mkdir(parents=True)
    for name in ("pyproject.toml", "constraints.txt", "tools/prepare_environment.sh"):
        shutil.copy(REPOSITORY / name, root / name)
    (tmp_path / "commands").mkdir()
    for name in ("bash", "cat", "cksum", "sed", "rm", "cp", "mkdir", "tail", "dirname", "sleep", "touch"):
        (tmp_path / "commands" / name).symlink_to(shutil.which(name))
    return root


def prepare(clone: Path, *arguments: str, **variables: str):
    """Run the script from another directory; PATH has basic commands and the stand-ins in base/."""
    commands = clone.parent / "commands"
    environment = {"PATH": f"{clone.parent / 'base'}:{commands}", "HOME": os.environ.get("HOME", "/"), **variables}
    return run_program(BASH, clone / "tools" / "prepare_environment.sh", *arguments, cwd="/", env=environment)


def pip_calls(environment: Path) -> list[str]:
    return (environment / "pip_calls").read_text().splitlines()


def test_environment_is_created_once_with_torch_first_and_again_after_a_change_or_a_move(clone, tmp_path):
    write_stand_in(tmp_path / "base" / "python3")
    result = prepare(clone, "--dev")
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{clone}/.venv/bin/python\n"
    calls = pip_calls(clone / ".venv")
    sources = f"{clone}/.venv/transformer_engine_sources"
    ends = ("torch", "--editable .[dev]", f"--no-deps --upgrade --target {sources} transformer-engine")
    assert [call.endswith(end) for call, end in zip(calls, ends, strict=True)] == [True] * 3
    assert all("--constraint" in call for call in calls)
    for arguments in (["--dev"], []):  # the larger environment serves the smaller request too
        again = prepare(clone, *arguments)
        assert (again.stdout, again.stderr) == (f"{clone}/.venv/bin/python\n", "")
    assert pip_calls(clone / ".venv") == calls
    for number, file in enumerate(("pyproject.toml", "constraints.txt"), start=1):
        (clone / file).write_text((clone / file).read_text() + "# changed\n")
        prepare(clone)
        assert len(pip_calls(clone / ".venv")) == 3 + 2 * number
    moved = prepare(clone.rename(tmp_path / "moved"))
    assert "creating .venv" in moved.stderr and moved.stdout == f"{tmp_path}/moved/.venv/bin/python\n"


def test_active_environment_is_used_and_its_torch_kept(clone, tmp_path):
    active = tmp_path / "active"
    write_stand_in(active / "bin" / "python", version="3.12.1", torch="2.9.0a0+nv25")
    result = prepare(clone, VIRTUAL_ENV=str(active))
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{active}/bin/python\n"
    assert not (clone / ".venv").exists()
    (call,) = pip_calls(active)
    assert call.endswith("--editable .[fast]")
    assert "\ntorch==2.9.0a0+nv25\n" in (active / "megatron_neobert_constraints.txt").read_text()


def test_installation_prints_each_line_of_pip_once_and_the_package_that_it_installs_while_it_waits(clone, tmp_path):
    sleep = tmp_path / "commands" / "sleep"
    sleep.unlink()
    sleep.write_text(f"#!{BASH}\nexec {shutil.which('sleep')} 0.1\n")  # instead of nine seconds
    sleep.chmod(0o755)
    waits = "sleep; sleep; sleep; sleep; sleep"
    changes = 'p="${0%/bin/*}/lib/python3.11/site-packages/PACKAGE"; mkdir -p "$p"; touch "$p"; echo "LINE"'
    first = changes.replace("PACKAGE", "a").replace("LINE", "Installing collected packages: a, b")
    second = changes.replace("PACKAGE", "b-2.dist-info").replace("LINE", "  Successfully uninstalled b-1")
    write_stand_in(tmp_path / "base" / "python3", wait=f"{waits}; {first}; {waits}; {second}; {waits}")
    lines = prepare(clone).stderr.splitlines()
    assert all(line.startswith("environment: ") for line in lines)
    texts = re.findall(r"^environment: \d+ s: (Downloading|installing \w+)", "\n".join(lines), flags=re.MULTILINE)
    assert texts == ["Downloading", "installing a", "installing b"] * 2, "of torch and of this project"
    assert any(re.fullmatch(r"environment: \d+ s", line) for line in lines), "the same line is not printed twice"


def test_unsupported_python_is_skipped_for_a_supported_one(clone, tmp_path):
    write_stand_in(tmp_path / "base" / "python3", version="3.14.0")
    write_stand_in(tmp_path / "base" / "python3.11", version="3.11.9")
    assert "creating .venv with Python 3.11.9" in prepare(clone).stderr


@pytest.mark.parametrize(
    ("pythons", "sentence"),
    [
        ({}, "no Python 3.11 to 3.13 on the PATH (no python at all)"),
        ({"python3": {"version": "3.9.2"}}, "on the PATH (python3 is 3.9.2)"),
        ({"python3": {"ensurepip": 1}}, "its modules venv and ensurepip are not installed"),
    ],
    ids=["none", "too old", "without venv"],
)
def test_machine_without_a_usable_python_is_reported_in_one_sentence(clone, tmp_path, pythons, sentence):
    for name, properties in pythons.items():
        write_stand_in(tmp_path / "base" / name, **properties)
    result = prepare(clone)
    assert (result.returncode, result.stdout, len(result.stderr.splitlines())) == (69, "", 1)
    assert sentence in result.stderr
    assert not (clone / ".venv").exists()


def test_failed_installation_names_its_log_and_leaves_no_stamp(clone, tmp_path):
    write_stand_in(tmp_path / "base" / "python3", pip=1)
    for _ in range(2):  # the second call tries again
        result = prepare(clone)
        assert (result.returncode, result.stdout) == (69, "")
        assert f"{clone}/.venv/megatron_neobert_install.log" in result.stderr
    assert len(pip_calls(clone / ".venv")) == 2
