"""The recipes of containers/: what can be said about them without building an image."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
DOCKERFILE = (REPOSITORY / "containers" / "Dockerfile").read_text(encoding="utf-8")
DEFINITION = (REPOSITORY / "containers" / "neobert.def").read_text(encoding="utf-8")
INSTALL = (REPOSITORY / "containers" / "install.sh").read_text(encoding="utf-8")
IMAGE = re.compile(r"nvcr\.io/nvidia/pytorch:(\d\d\.\d\d)-py3")


def copied_by_docker(text: str) -> list[str]:
    """The sources of every COPY."""
    return [word for line in re.findall(r"^COPY (.+)$", text, flags=re.MULTILINE) for word in line.split()[:-1]]


def copied_by_apptainer(text: str) -> list[str]:
    """The sources of %files."""
    section = re.search(r"^%files\n((?:    .*\n)+)", text, flags=re.MULTILINE)
    return [line.split()[0] for line in section.group(1).splitlines()] if section else []


def needed_at_run_time() -> set[str]:
    """What setup.py reads and installs, what prepare_environment.sh reads, and the commands."""
    setup = (REPOSITORY / "setup.py").read_text(encoding="utf-8")
    read = {name for name in ("README.md", "LICENSE") if name in setup}
    folders = {"megatron_neobert", "checkpoint_conversion", "tools", "benchmarks", "examples"}
    return read | folders | {"setup.py", "constraints.txt"}


def test_both_recipes_begin_with_the_same_numbered_image():
    bases = re.findall(r"^FROM (\S+)$", DOCKERFILE, flags=re.MULTILINE)
    bases += re.findall(r"^From: (\S+)$", DEFINITION, flags=re.MULTILINE)
    assert len(bases) == 2 and len(set(bases)) == 1
    assert IMAGE.fullmatch(bases[0]), bases


@pytest.mark.parametrize(
    "copied", [copied_by_docker(DOCKERFILE), copied_by_apptainer(DEFINITION)], ids=["docker", "def"]
)
def test_what_is_copied_exists_and_nothing_that_is_needed_stays_behind(copied):
    assert [source for source in copied if not (REPOSITORY / source).exists()] == []
    assert needed_at_run_time() - set(copied) == set()


def test_both_recipes_run_the_same_steps_and_then_check_the_environment():
    for text in (DOCKERFILE, DEFINITION):
        steps = re.findall(r"containers/install\.sh (\w+)", text)
        assert steps[-2:] == ["engine", "project"]
        assert re.search(r"python -m megatron_neobert check environment$", text, flags=re.MULTILINE)
        assert "PIP_CONSTRAINT=" in text, "the image's pins would keep ours from being installed"


def user_of(dockerfile: str) -> str:
    """Who runs a container's command: the last USER."""
    return (re.findall(r"^USER (\S+)$", dockerfile, flags=re.MULTILINE) or ["root"])[-1].partition(":")[0]


def test_commands_do_not_run_as_root_and_the_environment_is_checked_as_they_run():
    assert user_of(DOCKERFILE) not in ("root", "0")
    assert f" {user_of(DOCKERFILE)} " in DOCKERFILE.partition("\nUSER ")[0], "the user is made before"
    assert "check environment" in DOCKERFILE.partition("\nUSER ")[2]
    assert user_of(DOCKERFILE.replace("\nUSER ", "\n# USER ")) == "root", "the control: without that line"


def test_engine_is_compiled_at_a_version_that_setup_py_allows():
    from packaging.requirements import Requirement

    (version,) = re.findall(r"transformer-engine\[core_cu\$cuda,pytorch\]==([\d.]+)", INSTALL)
    lines = re.findall(r'"(transformer-engine[^"]+)"', (REPOSITORY / "setup.py").read_text(encoding="utf-8"))
    assert lines and all(Requirement(line).specifier.contains(version) for line in lines)
