"""setup.py and constraints.txt agree with each other, with the code, and with the versions of Python they promise."""

import ast
import importlib.metadata
import runpy
import sys
from pathlib import Path

import pytest
import setuptools
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from megatron_neobert.errors import MODULES_OF_EXTRAS

REPOSITORY = Path(__file__).resolve().parents[2]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
# Used when importable and absent from every list: NVIDIA's Apex is not on the registry, FlashAttention is a choice
# of the GPU machine, the launcher is torch's own.
NEVER_REQUIRED = {"apex", "flash_attn"}
# What provides a namespace that many packages share, also where it is not installed.
PROVIDED_BY = {"nvidia": ["nvidia-dali-cuda130"]}


@pytest.fixture(scope="module")
def metadata() -> dict:
    """The keyword arguments that setup.py gives to setup()."""
    captured = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", lambda **keywords: captured.update(keywords))
        runpy.run_path(str(REPOSITORY / "setup.py"))
    return captured


def test_command_that_misses_a_package_knows_the_extra_that_brings_it(metadata: dict):
    modules = {"scikit-learn": "sklearn", "nvidia-dali-cuda130": "nvidia.dali"}
    brought = {}
    for extra, lines in metadata["extras_require"].items():
        if extra not in ("dev", "docs"):  # which no command imports
            names = dict.fromkeys(Requirement(line).name for line in lines)
            brought[extra] = tuple(modules.get(name, name.replace("-", "_")) for name in names)
    assert brought == MODULES_OF_EXTRAS


def test_templates_are_packaged_with_the_code_that_fills_them_in(metadata: dict):
    for package in metadata["packages"]:
        files = [path for path in (REPOSITORY / package.replace(".", "/")).iterdir() if path.is_file()]
        others = {path.name for path in files if path.suffix != ".py"}
        assert others == {name for name in metadata["package_data"].get(package, []) if "/" not in name}, package


def constraint_lines() -> list[Requirement]:
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def pinned_version(name: str, python: str) -> str | None:
    """The version that constraints.txt gives a package on one Python; None if there is no line, or more than one."""
    versions = [
        str(requirement.specifier).removeprefix("==")
        for requirement in constraint_lines()
        if canonicalize_name(requirement.name) == canonicalize_name(name)
        and (requirement.marker is None or requirement.marker.evaluate({"python_version": python}))
    ]
    return versions[0] if len(versions) == 1 else None


def requirements(metadata: dict, *extras: str) -> list[Requirement]:
    lines = [*metadata["install_requires"], *(line for extra in extras for line in metadata["extras_require"][extra])]
    return [Requirement(line) for line in lines]


def third_party_imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add((node.module or "").split(".")[0])
    own = {"megatron_neobert", "checkpoint_conversion", "tools", "benchmarks"}
    return names - set(sys.stdlib_module_names) - own - NEVER_REQUIRED


def test_python_range_is_3_10_to_3_13(metadata):
    supported = SpecifierSet(metadata["python_requires"])
    assert [python for python in ("3.9", *PYTHONS, "3.14") if supported.contains(f"{python}.1")] == list(PYTHONS)


def test_package_called_apex_is_never_a_dependency(metadata):
    names = {requirement.name.lower() for requirement in requirements(metadata, *metadata["extras_require"])}
    assert "apex" not in names | {requirement.name.lower() for requirement in constraint_lines()}


@pytest.mark.parametrize("python", PYTHONS)
def test_core_and_dev_requirements_have_one_pinned_version_in_range(metadata, python):
    for requirement in requirements(metadata, "dev"):
        if requirement.marker is not None and not requirement.marker.evaluate({"python_version": python}):
            continue
        version = pinned_version(requirement.name, python)
        assert version is not None, f"constraints.txt has no single version of {requirement.name} for Python {python}"
        assert requirement.specifier.contains(version), f"{requirement.name} {version} is not {requirement.specifier}"


def test_every_imported_package_is_declared(metadata):
    distributions = importlib.metadata.packages_distributions()
    declared = {canonicalize_name(line.name) for line in requirements(metadata, *metadata["extras_require"])}
    missing = {}
    for top in ("megatron_neobert", "checkpoint_conversion", "tools", "benchmarks"):
        for path in (REPOSITORY / top).rglob("*.py"):
            for name in third_party_imports(path):
                found = PROVIDED_BY.get(name) or distributions.get(name, [name])
                providers = {canonicalize_name(provider) for provider in found}
                if not providers & declared:
                    missing.setdefault(name, []).append(str(path.relative_to(REPOSITORY)))
    assert missing == {}
