"""Imports go one way. The table below is the architecture; a module without a place in it is refused."""

import ast
import sys
from dataclasses import dataclass
from graphlib import TopologicalSorter
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
    "megatron_neobert.huggingface": Place(0, "huggingface"),  # travels alone with an export
    "megatron_neobert.huggingface.auto_classes": Place(1, "huggingface"),  # which does not
    "megatron_neobert.huggingface.checks": Place(2, "huggingface"),
    "megatron_neobert.text": Place(0, "errors"),
    "megatron_neobert.errors": Place(0, "errors"),
    "megatron_neobert.cli": Place(0, "errors"),
    "megatron_neobert.config": Place(1, "config"),
    "megatron_neobert.config.cli": Place(2, "command line"),
    # Start-up and files need no torch; what touches Megatron comes later.
    "megatron_neobert.runtime": Place(1, "runtime"),
    "megatron_neobert.runtime.store": Place(2, "runtime"),
    "megatron_neobert.model.reference": PURE,
    "megatron_neobert.model.flops": PURE,
    "megatron_neobert.data.batches.masking": PURE,
    "megatron_neobert.data.batches.packing": PURE,
    "megatron_neobert.data.batches.order": PURE,
    "megatron_neobert.data.batches.philox": PURE,
    "megatron_neobert.runtime.distributed": Place(3, "platform"),
    "megatron_neobert.runtime.cpu_backend": Place(3, "platform"),
    "megatron_neobert.runtime.megatron_patches": Place(3, "platform"),
    "megatron_neobert.runtime.megatron_imports": Place(3, "platform"),
    "megatron_neobert.runtime.signals": Place(3, "platform"),
    "megatron_neobert.model": Place(4, "model"),
    "megatron_neobert.data": Place(4, "data"),
    "megatron_neobert.state": Place(5, "training"),
    "megatron_neobert.training": Place(5, "training"),
    "megatron_neobert.planning": Place(6, "planning"),
    "megatron_neobert.checkpoint": Place(5, "training"),
    "megatron_neobert.evaluation": Place(6, "evaluation"),
    "megatron_neobert.inspection": Place(7, "inspection"),
    "checkpoint_conversion": Place(7, "conversion"),
    "checkpoint_conversion.convert": Place(9, "names"),  # of commands; as a file of the checkout it starts them too
    "tools": Place(9, "names"),  # preprocess_data.py, which Megatron users look for
    "tools.accept_gpu": Place(8, "commands"),
    "tools.acceptance": Place(7, "acceptance"),  # the phases of a command, no command itself
    "benchmarks": Place(8, "benchmarks"),
    "megatron_neobert.commands": Place(8, "commands"),
    "megatron_neobert.launch": Place(8, "commands"),
    "megatron_neobert.pretrain": Place(8, "commands"),
    "megatron_neobert.__main__": Place(9, "names"),
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
    for top in ("megatron_neobert", "checkpoint_conversion", "tools", "benchmarks"):
        for path in sorted((REPOSITORY / top).rglob("*.py")):
            parts = path.relative_to(REPOSITORY).with_suffix("").parts
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def imported_names(source: str) -> set[str]:
    """Every module that the source imports, at its top or inside a function; `from a import b` gives a and a.b."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: imports name their module in full"
            names |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


NAMESPACES = ("megatron_neobert", "checkpoint_conversion", "megatron_neobert.commands")  # `from` these imports modules


def own_imports(names: set[str], known: set[str]) -> set[str]:
    """The modules of this repository among `names`."""
    return {name for name in names if name in known and name not in NAMESPACES}


def violations(module: str, imported: set[str]) -> list[str]:
    here = place_of(module)
    found = []
    for other in sorted(imported - {module}):
        there = place_of(other)
        if there.group == "commands" and here.group != "names":
            found.append(f"{module} imports {other}, a command; commands are not imported")
        elif there.level > here.level or (there.level == here.level and there.group != here.group):
            found.append(f"{module} (level {here.level}, {here.group}) imports {other} ({there.level}, {there.group})")
    return found


MODULES = find_modules()


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_only_modules_below_it(module):
    names = imported_names(MODULES[module].read_text(encoding="utf-8"))
    assert violations(module, own_imports(names, set(MODULES))) == []


def test_no_module_imports_itself_by_way_of_others():
    graph = {
        module: own_imports(imported_names(path.read_text(encoding="utf-8")), set(MODULES)) - {module}
        for module, path in MODULES.items()
    }
    TopologicalSorter(graph).prepare()  # raises where there is a circle


def test_settings_import_the_standard_library_alone():
    """So do the phases, which are resolved from them."""
    modules = {f"megatron_neobert.{name}" for name in ("cli", "config.schema", "config.phases", "errors", "text")}
    names = set().union(*(imported_names(MODULES[module].read_text(encoding="utf-8")) for module in modules))
    others = {name for name in names if not any(f"{name}.".startswith(f"{module}.") for module in modules)}
    others -= set(NAMESPACES) | {"megatron_neobert.config"}
    assert {name.split(".")[0] for name in others} - {"argcomplete"} <= set(sys.stdlib_module_names)
