"""The recipes of containers/ agree with each other and with the repository; no image is built."""

import re
from pathlib import Path

from packaging.requirements import Requirement

REPOSITORY = Path(__file__).resolve().parents[2]
DOCKERFILE = (REPOSITORY / "containers" / "Dockerfile").read_text(encoding="utf-8")
DEFINITION = (REPOSITORY / "containers" / "neobert.def").read_text(encoding="utf-8")
# What setup.py reads and installs, and the commands.
NEEDED = {"megatron_neobert", "checkpoint_conversion", "tools", "benchmarks", "examples", "setup.py", "constraints.txt"}
NEEDED |= {"README.md", "LICENSE"}


def found(pattern: str, text: str = DOCKERFILE) -> list[str]:
    return re.findall(pattern, text, flags=re.MULTILINE)


def test_both_recipes_begin_with_the_same_image_and_the_commands_of_one_do_not_run_as_root():
    assert found(r"^FROM (\S+)$") == found(r"^From: (\S+)$", DEFINITION) != []
    assert found(r"^USER (\S+)$")[-1:] not in ([], ["root"], ["0"])


def test_what_is_copied_exists_and_nothing_that_is_needed_stays_behind():
    in_docker = [word for line in found(r"^COPY (.+)$") for word in line.split()[:-1]]
    (section,) = found(r"^%files\n((?:    .*\n)+)", DEFINITION)
    for copied in (in_docker, [line.split()[0] for line in section.splitlines()]):
        assert [source for source in copied if not (REPOSITORY / source).exists()] == []
        assert NEEDED - set(copied) == set()


def test_engine_is_compiled_at_a_version_that_setup_py_allows():
    install = (REPOSITORY / "containers" / "install.sh").read_text(encoding="utf-8")
    (version,) = found(r"transformer-engine\[core_cu\$cuda,pytorch\]==([\d.]+)", install)
    lines = found(r'"(transformer-engine[^"]+)"', (REPOSITORY / "setup.py").read_text(encoding="utf-8"))
    assert lines and all(Requirement(line).specifier.contains(version) for line in lines)
