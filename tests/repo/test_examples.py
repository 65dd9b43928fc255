"""Shell scripts: they parse, they explain themselves, and the environment script keeps its promises without a network.

The environment script is driven with a stand-in for Python that records what pip would be asked to do.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = sorted([*REPOSITORY.glob("examples/**/*.sh"), *REPOSITORY.glob("tools/*.sh"), REPOSITORY / ".ci" / "run"])
WITH_HELP = ["examples/quickstart.sh", "examples/speedrun.sh", "tools/prepare_environment.sh"]
BASH = shutil.which("bash") or "bash"

STAND_IN = """#!{bash}
# Answers like the Python that the environment script asks: its version, torch's version, pip, and making a venv.
case "$*" in
*sys.version_info*) echo "{version} {suitable}" ;;
*ensurepip*) exit {ensurepip} ;;
*platform*) echo "{version}" ;;
*importlib.metadata*) [[ -n "{torch}" ]] && echo "{torch}" ;;
"-m venv"*) mkdir -p "${{@: -1}}/bin" && cp "$0" "${{@: -1}}/bin/python" ;;
"-m pip --version") ;;
"-m pip install"*) echo "$*" >>"${{0%/bin/*}}/pip_calls"; exit {pip} ;;
*) exit 99 ;;
esac
"""


def write_stand_in(path: Path, *, version="3.11.7", torch="", ensurepip=0, pip=0) -> Path:
    """A `python` that is suitable or not by its version; `torch` is the version it says it has."""
    suitable = "suitable" if version.split(".")[1] in ("10", "11", "12", "13") else "unsuitable"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        STAND_IN.format(
            bash=BASH,
            version=version,
            suitable=suitable,
            torch=torch,
            ensurepip=ensurepip,
            pip=pip,
        )
    )
    path.chmod(0o755)
    return path


@pytest.fixture
def clone(tmp_path) -> Path:
    """What the environment script needs of the repository, in a folder with a space in its name."""
    root = tmp_path / "a clone"
    (root / "tools").mkdir(parents=True)
    for name in ("setup.py", "constraints.txt", "tools/prepare_environment.sh"):
        shutil.copy(REPOSITORY / name, root / name)
    return root


def prepare(clone: Path, *arguments: str, path: Path | None = None, active: Path | None = None):
    """Runs the script from another directory; `path` holds the only commands beside the system's basic ones."""
    commands = clone.parent / "commands"
    commands.mkdir(exist_ok=True)
    for name in ("bash", "cat", "cksum", "sed", "rm", "cp", "mkdir", "tail", "dirname"):
        if not (commands / name).exists():
            (commands / name).symlink_to(shutil.which(name))
    environment = {"PATH": f"{path}:{commands}" if path else str(commands), "HOME": os.environ.get("HOME", "/")}
    if active is not None:
        environment["VIRTUAL_ENV"] = str(active)
    command = [BASH, str(clone / "tools" / "prepare_environment.sh"), *arguments]
    return subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, check=False)


def pip_calls(environment: Path) -> list[str]:
    record = environment / "pip_calls"
    return record.read_text().splitlines() if record.exists() else []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_script_parses(script):
    source = script.read_text(encoding="utf-8")
    shell, separator, _ = source.partition("\n'''\n")
    if separator:  # Python below: bash has left the file by then, and to Python the shell part is a string
        compile(source, str(script), "exec")
        assert shell.splitlines()[-1].startswith("exec ")
        shell = shell.replace("''':'\n", "", 1)
    result = subprocess.run([BASH, "-n"], input=shell, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("script", WITH_HELP)
def test_script_help_shows_how_it_is_called_and_does_nothing(script, tmp_path):
    command = [BASH, str(REPOSITORY / script), "--help"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert f"bash {script}" in result.stdout
    assert "set -euo" not in result.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", WITH_HELP)
def test_script_refuses_an_unknown_argument_with_exit_code_2(script, tmp_path):
    command = [BASH, str(REPOSITORY / script), "--fast"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "--fast" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_environment_is_made_at_the_root_with_torch_installed_first(clone, tmp_path):
    write_stand_in(tmp_path / "base" / "python3")
    result = prepare(clone, path=tmp_path / "base")
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{clone}/.venv/bin/python\n"
    first, second = pip_calls(clone / ".venv")
    assert first.endswith("torch")
    assert second.endswith("--editable .")
    assert all("--constraint" in call for call in (first, second))


def test_second_call_finds_its_stamp_and_asks_pip_for_nothing(clone, tmp_path):
    write_stand_in(tmp_path / "base" / "python3")
    prepare(clone, "--dev", path=tmp_path / "base")
    before = pip_calls(clone / ".venv")
    for arguments in (["--dev"], []):  # the larger environment serves the smaller request too
        again = prepare(clone, *arguments, path=tmp_path / "base")
        assert (again.stdout, again.stderr) == (f"{clone}/.venv/bin/python\n", "")
    assert before[1].endswith("--editable .[dev]")
    sources = f"{clone}/.venv/transformer_engine_sources"
    assert before[2].endswith(f"--no-deps --upgrade --target {sources} transformer-engine")
    assert pip_calls(clone / ".venv") == before


@pytest.mark.parametrize("file", ["setup.py", "constraints.txt"])
def test_changed_dependency_is_installed_again(clone, tmp_path, file):
    write_stand_in(tmp_path / "base" / "python3")
    prepare(clone, path=tmp_path / "base")
    before = len(pip_calls(clone / ".venv"))
    (clone / file).write_text((clone / file).read_text() + "# changed\n")
    prepare(clone, path=tmp_path / "base")
    assert len(pip_calls(clone / ".venv")) > before


def test_moved_repository_gets_a_new_environment(clone, tmp_path):
    write_stand_in(tmp_path / "base" / "python3")
    prepare(clone, path=tmp_path / "base")
    moved = clone.rename(tmp_path / "moved")
    result = prepare(moved, path=tmp_path / "base")
    assert "making .venv" in result.stderr
    assert result.stdout == f"{moved}/.venv/bin/python\n"


def test_active_environment_is_used_and_its_torch_kept(clone, tmp_path):
    active = tmp_path / "active"
    write_stand_in(active / "bin" / "python", version="3.12.1", torch="2.9.0a0+nv25")
    result = prepare(clone, active=active)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{active}/bin/python\n"
    assert not (clone / ".venv").exists()
    (call,) = pip_calls(active)
    assert call.endswith("--editable .")
    assert "\ntorch==2.9.0a0+nv25\n" in (active / "megatron_neobert_constraints.txt").read_text()


def test_python_that_is_too_new_is_passed_over_for_one_that_fits(clone, tmp_path):
    write_stand_in(tmp_path / "base" / "python3", version="3.14.0")
    write_stand_in(tmp_path / "base" / "python3.11", version="3.11.9")
    result = prepare(clone, path=tmp_path / "base")
    assert "making .venv with Python 3.11.9" in result.stderr


@pytest.mark.parametrize(
    ("pythons", "sentence"),
    [
        ({}, "no Python 3.10 to 3.13 on the PATH (no python at all)"),
        ({"python3": {"version": "3.14.0"}}, "on the PATH (python3 is 3.14.0)"),
        ({"python3": {"version": "3.9.2"}}, "on the PATH (python3 is 3.9.2)"),
        ({"python3": {"ensurepip": 1}}, "its modules venv and ensurepip are not installed"),
    ],
    ids=["none", "too new", "too old", "without venv"],
)
def test_machine_without_a_usable_python_gets_one_sentence(clone, tmp_path, pythons, sentence):
    for name, properties in pythons.items():
        write_stand_in(tmp_path / "base" / name, **properties)
    result = prepare(clone, path=tmp_path / "base")
    assert result.returncode == 69
    assert len(result.stderr.splitlines()) == 1
    assert sentence in result.stderr
    assert result.stdout == ""
    assert not (clone / ".venv").exists()


def test_failed_installation_names_its_log_and_leaves_no_stamp(clone, tmp_path):
    write_stand_in(tmp_path / "base" / "python3", pip=1)
    for _ in range(2):  # the second call tries again
        result = prepare(clone, path=tmp_path / "base")
        assert result.returncode == 69
        assert f"{clone}/.venv/megatron_neobert_install.log" in result.stderr
        assert result.stdout == ""
    assert len(pip_calls(clone / ".venv")) == 2
