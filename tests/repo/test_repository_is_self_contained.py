"""The repository has no path of a machine, no host of a package registry, and no huge file."""

import re
from pathlib import Path

import pytest
from commands import REPOSITORY, run_program

MAXIMUM_LINES = 400
# All classes of an export are in one file, which is exported alone.
LONGEST_OF_NAME = {"megatron_neobert/huggingface/modeling_neobert.py": 610}
MAXIMUM_BYTES = 1_000_000

# Written so that this file does not match itself.
MACHINE_PATH = re.compile(r"(?<![\w.\-/$}])/(?:root|home|work|tmp|Users|mnt|scratch)/\w|\.\./shared\b")
REGISTRY_HOST = re.compile(
    r"\b(?:pypi(?:\.nvidia)?|pythonhosted|download\.pytorch|anaconda|npmjs|debian|golang|crates)\.(?:org|com|io|net)\b"
)


def list_files() -> list[Path]:
    """Files that git tracks or would track."""
    result = run_program("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=REPOSITORY)
    if result.returncode != 0:
        pytest.skip("not a git checkout", allow_module_level=True)
    return [path for name in result.stdout.split("\0") if name and (path := REPOSITORY / name).is_file()]


FILES = list_files()
CODE = [path for path in FILES if path.suffix in (".py", ".sh")]


@pytest.mark.parametrize("pattern", [MACHINE_PATH, REGISTRY_HOST], ids=["path of a machine", "registry"])
def test_no_file_has_a_path_of_a_machine_or_the_host_of_a_package_registry(pattern):
    texts = {path.relative_to(REPOSITORY): path.read_text(encoding="utf-8", errors="replace") for path in FILES}
    assert [
        f"{path}: {line}" for path, text in texts.items() for line in text.splitlines() if pattern.search(line)
    ] == []


def test_names_of_test_files_are_unique():
    """The test folders are not packages, so pytest collects only one of two modules with the same name."""
    names = [path.name for path in CODE if path.name.startswith("test_")]
    assert sorted(set(names)) == sorted(names)


def test_no_source_file_exceeds_400_lines():
    lengths = {str(path.relative_to(REPOSITORY)): len(path.read_text(encoding="utf-8").splitlines()) for path in CODE}
    too_long = {name for name, length in lengths.items() if length > LONGEST_OF_NAME.get(name, MAXIMUM_LINES)}
    assert too_long == set()


def test_no_file_exceeds_a_megabyte():
    sizes = {str(path.relative_to(REPOSITORY)): path.stat().st_size for path in FILES}
    assert {name: size for name, size in sizes.items() if size > MAXIMUM_BYTES} == {}
