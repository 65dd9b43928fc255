"""Imports go one way. The table below is the architecture; a module without a place in it is refused."""

import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Place:
    """A module may import modules of lower levels, and of its own group."""

    level: int
    group: str


PURE = Place(2, "pure")
# Longest matching prefix wins.
PLACES = {
    "megatron_neobert": Place(0, "version"),
    "megatron_neobert.text": Place(0, "errors"),
    "megatron_neobert.errors": Place(0, "errors"),
    "megatron_neobert.environment": Place(1, "environment"),
    "megatron_neobert.files": Place(1, "files"),
    "megatron_neobert.terminal": Place(1, "terminal"),
    "megatron_neobert.config": Place(1, "config"),
    "megatron_neobert.config_checks": Place(1, "config"),
    "megatron_neobert.compute_checks": Place(1, "config"),
    "megatron_neobert.compatibility": Place(1, "config"),
    "megatron_neobert.data_path": Place(1, "config"),
    "megatron_neobert.nodes": Place(1, "nodes"),
    "megatron_neobert.meeting": Place(2, "nodes"),
    "megatron_neobert.flags": Place(2, "flags"),
    "megatron_neobert.model.reference": PURE,
    "megatron_neobert.data.masking": PURE,
    "megatron_neobert.data.packing": PURE,
    "megatron_neobert.data.order": PURE,
    "megatron_neobert.data.philox": PURE,
    "megatron_neobert.training.flops": PURE,
    "megatron_neobert.distributed": Place(3, "platform"),
    "megatron_neobert.cpu_backend": Place(3, "platform"),
    "megatron_neobert.megatron_fixes": Place(3, "platform"),
    "megatron_neobert.megatron_imports": Place(3, "platform"),
    "megatron_neobert.model": Place(4, "model"),
    "megatron_neobert.data": Place(4, "data"),
    "megatron_neobert.training": Place(5, "training"),
    "megatron_neobert.checkpoint": Place(5, "training"),
    "megatron_neobert.evaluation": Place(6, "evaluation"),
    "megatron_neobert.huggingface": Place(0, "huggingface"),  # travels alone with an export
    "megatron_neobert.inspection": Place(7, "inspection"),
    "checkpoint_conversion": Place(7, "conversion"),
    "tools": Place(8, "commands"),
    "megatron_neobert.launch": Place(8, "commands"),
    "megatron_neobert.pretrain": Place(8, "commands"),
}


def place_of(module: str) -> Place:
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        # The package itself holds the version alone: a new module directly below it needs a line of its own.
        if prefix in PLACES and (prefix != "megatron_neobert" or length == len(parts)):
            return PLACES[prefix]
    raise AssertionError(f"{module} has no place in the table of tests/repo/test_import_direction.py; give it one")


def find_modules() -> dict[str, Path]:
    """Dotted name -> file, of everything outside tests."""
    modules = {}
    for top in ("megatron_neobert", "checkpoint_conversion", "tools"):
        for path in sorted((REPOSITORY / top).rglob("*.py")):
            parts = path.relative_to(REPOSITORY).with_suffix("").parts
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def imported_names(source: str, *, module: str, is_package: bool) -> set[str]:
    """Every module that the source imports, at its top or inside a function; `from a import b` gives a and a.b."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: len(module.split(".")) - node.level + is_package]
                base = ".".join([*parents, *([base] if base else [])])
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and re.fullmatch(r"megatron\.training[\w.]*", str(node.value)):
            names.add(node.value)  # importlib.import_module("megatron.training...")
    return names


def own_imports(names: set[str], known: set[str]) -> set[str]:
    """The modules of this repository among `names`."""
    return {name for name in names if name in known and name not in ("megatron_neobert", "checkpoint_conversion")}


def violations(module: str, imported: set[str]) -> list[str]:
    here = place_of(module)
    found = []
    for other in sorted(imported - {module}):
        there = place_of(other)
        if there.group == "commands":
            found.append(f"{module} imports {other}, a command; commands are not imported")
        elif there.level > here.level or (there.level == here.level and there.group != here.group):
            found.append(f"{module} (level {here.level}, {here.group}) imports {other} ({there.level}, {there.group})")
    return found


MODULES = find_modules()


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_only_what_lies_below_it(module):
    path = MODULES[module]
    names = imported_names(path.read_text(encoding="utf-8"), module=module, is_package=path.name == "__init__.py")
    assert violations(module, own_imports(names, set(MODULES))) == []


@pytest.mark.parametrize("module", MODULES)
def test_module_never_imports_megatron_training(module):
    names = imported_names(MODULES[module].read_text(encoding="utf-8"), module=module, is_package=False)
    assert [name for name in names if name == "megatron.training" or name.startswith("megatron.training.")] == []


def test_settings_import_the_standard_library_alone():
    source = MODULES["megatron_neobert.config"].read_text(encoding="utf-8")
    names = imported_names(source, module="megatron_neobert.config", is_package=False)
    assert {name.split(".")[0] for name in names} <= set(sys.stdlib_module_names)


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("megatron_neobert.errors", "megatron_neobert.config"),
        ("megatron_neobert.data.packing", "megatron_neobert.flags"),
        ("megatron_neobert.model.neobert", "megatron_neobert.data.batches"),
        ("megatron_neobert.data.batches", "megatron_neobert.model.loss"),
        ("megatron_neobert.training.step", "checkpoint_conversion.mapping"),
        ("megatron_neobert.huggingface.modeling_neobert", "megatron_neobert.config"),
        ("checkpoint_conversion.convert", "tools.preprocess_data"),
    ],
)
def test_planted_upward_import_is_a_violation(module, imported):
    assert len(violations(module, {imported})) == 1


def test_module_without_a_place_is_refused():
    with pytest.raises(AssertionError, match=r"megatron_neobert\.helpers has no place"):
        place_of("megatron_neobert.helpers")


@pytest.mark.parametrize(
    "source",
    [
        "import megatron.training",
        "from megatron.training import get_args",
        "from megatron import training",
        "def f():\n    from megatron.training.global_vars import get_args",
        "import importlib\nimportlib.import_module('megatron.training.checkpointing')",
    ],
)
def test_every_spelling_of_an_import_of_megatron_training_is_seen(source):
    names = imported_names(source, module="tools.x", is_package=False)
    assert any(name == "megatron.training" or name.startswith("megatron.training.") for name in names)


def test_relative_imports_are_resolved():
    names = imported_names("from ..data import batches", module="megatron_neobert.model.neobert", is_package=False)
    assert "megatron_neobert.data.batches" in names
