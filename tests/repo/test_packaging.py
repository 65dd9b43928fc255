"""pyproject.toml, constraints.txt, containers/ and the imports of the code are consistent."""

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest
import setuptools
from commands import REPOSITORY
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from test_import_direction import MODULES, imported_names

from megatron_neobert.errors import MODULES_OF_EXTRAS

PYTHONS = ("3.11", "3.12", "3.13")
# Optional packages that pyproject.toml does not list: NVIDIA's Apex is not on the registry, and the owner of the GPU
# machine chooses FlashAttention.
NEVER_REQUIRED = {"apex", "flash_attn"}
# Namespace that several packages share -> the package that we use from it.
PROVIDED_BY = {"nvidia": ["nvidia-dali-cuda130"]}

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
METADATA = PROJECT["project"]
EXTRAS = METADATA["optional-dependencies"]


def test_extras_of_error_messages_are_those_of_pyproject_toml():
    modules = {
        "scikit-learn": "sklearn",
        "nvidia-dali-cuda130": "nvidia.dali",
        "transformers": "transformers.exporters",  # in the extra onnx: a newer version than without it
    }
    modules_of_extras = {}
    for extra, lines in EXTRAS.items():
        if extra not in ("dev", "docs"):  # no command imports these
            names = dict.fromkeys(Requirement(line).name for line in lines)
            modules_of_extras[extra] = tuple(modules.get(name, name.replace("-", "_")) for name in names)
    assert modules_of_extras == MODULES_OF_EXTRAS


def test_data_files_are_packaged_with_the_code():
    settings = PROJECT["tool"]["setuptools"]
    packages = setuptools.find_packages(str(REPOSITORY), **settings["packages"]["find"])
    assert len(packages) > 15
    for package in packages:
        files = [path for path in (REPOSITORY / package.replace(".", "/")).iterdir() if path.is_file()]
        others = {path.name for path in files if path.suffix != ".py"}
        assert others == {name for name in settings["package-data"].get(package, []) if "/" not in name}, package


def constraint_lines() -> list[Requirement]:
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def applies(requirement: Requirement, python: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"python_version": python})


def requirements(*extras: str) -> list[Requirement]:
    """Return the requirements of the project with these extras; `dev` names other extras as those of this project."""
    found = [Requirement(line) for line in METADATA["dependencies"]]
    found += [Requirement(line) for extra in extras for line in EXTRAS[extra]]
    if found[-1].name == METADATA["name"]:
        found += requirements(*sorted(found.pop().extras))
    return found


def third_party_imports(path: Path) -> set[str]:
    names = {name.split(".")[0] for name in imported_names(path.read_text(encoding="utf-8"))}
    own = {"megatron_neobert", "checkpoint_conversion", "tools", "benchmarks"}
    return names - set(sys.stdlib_module_names) - own - NEVER_REQUIRED


def test_python_range_is_3_11_to_3_13():
    supported = SpecifierSet(METADATA["requires-python"])
    assert [python for python in ("3.10", *PYTHONS, "3.14") if supported.contains(f"{python}.1")] == list(PYTHONS)


def test_package_called_apex_is_never_a_dependency():
    names = {requirement.name.lower() for requirement in requirements(*EXTRAS)}
    assert "apex" not in names | {requirement.name.lower() for requirement in constraint_lines()}


@pytest.mark.parametrize("python", PYTHONS)
def test_core_and_dev_requirements_have_one_pinned_version_in_range(python):
    pinned = [line for line in constraint_lines() if applies(line, python)]
    for requirement in requirements("dev"):
        if applies(requirement, python):
            name = canonicalize_name(requirement.name)
            (version,) = [str(line.specifier)[2:] for line in pinned if canonicalize_name(line.name) == name]
            assert requirement.specifier.contains(version), f"{name} {version} is not {requirement.specifier}"


def test_every_imported_package_is_declared():
    distributions = importlib.metadata.packages_distributions()
    declared = {canonicalize_name(line.name) for line in requirements(*EXTRAS)}
    missing = {}
    for module, path in MODULES.items():
        for name in third_party_imports(path):
            found = PROVIDED_BY.get(name) or distributions.get(name, [name])
            if not {canonicalize_name(provider) for provider in found} & declared:
                missing.setdefault(name, []).append(module)
    assert missing == {}


DOCKERFILE, DEFINITION = (
    (REPOSITORY / "containers" / name).read_text(encoding="utf-8") for name in ("Dockerfile", "neobert.def")
)
# Files that pyproject.toml reads or installs, and folders of commands.
NEEDED = {"megatron_neobert", "checkpoint_conversion", "tools", "benchmarks", "examples", "pyproject.toml", "setup.py"}
NEEDED |= {"constraints.txt", "README.md", "LICENSE"}


def found(pattern: str, text: str = DOCKERFILE) -> list[str]:
    return re.findall(pattern, text, flags=re.MULTILINE)


def test_container_recipes_use_one_image_copy_all_needed_files_and_do_not_run_as_root():
    assert found(r"^FROM (\S+)$") == found(r"^From: (\S+)$", DEFINITION) != []
    assert found(r"^USER (\S+)$")[-1:] not in ([], ["root"], ["0"])
    in_docker = [word for line in found(r"^COPY (.+)$") for word in line.split()[:-1]]
    (section,) = found(r"^%files\n((?:    .*\n)+)", DEFINITION)
    for copied in (in_docker, [line.split()[0] for line in section.splitlines()]):
        assert [source for source in copied if not (REPOSITORY / source).exists()] == []
        assert NEEDED - set(copied) == set()


def test_container_compiles_transformer_engine_at_a_version_that_pyproject_toml_allows():
    install = (REPOSITORY / "containers" / "install.sh").read_text(encoding="utf-8")
    (version,) = found(r"transformer-engine\[core_cu\$cuda,pytorch\]==([\d.]+)", install)
    lines = found(r'"(transformer-engine[^"]+)"', (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    assert lines and all(Requirement(line).specifier.contains(version) for line in lines)
