"""Imports go in one direction. LAYERS is the architecture: every module has a layer, and imports lower layers only."""

import ast
import sys
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

from commands import REPOSITORY


class Layer(NamedTuple):
    """A module may import modules of lower levels, and of the same group at its level.

    `modules` are prefixes; the longest prefix of a module counts. A prefix with a point follows "megatron_neobert".
    """

    level: int
    group: str
    modules: str


LAYERS = [
    Layer(0, "version", "megatron_neobert"),
    Layer(0, "huggingface", ".huggingface"),  # exported without the rest of the package, except the next two lines
    Layer(1, "huggingface", ".huggingface.auto_classes"),
    Layer(2, "huggingface", ".huggingface.checks .huggingface.folder_files .huggingface.hub"),
    Layer(0, "errors", ".text .errors .cli .megatron_flags"),
    Layer(1, "config", ".config"),
    Layer(2, "command line", ".config.cli"),
    Layer(1, "runtime", ".runtime"),  # start-up and files, without torch
    Layer(2, "runtime", ".runtime.store"),
    Layer(2, "pure", ".model.reference .model.flops"),
    Layer(2, "pure", ".data.batches.masking .data.batches.packing .data.batches.order .data.batches.philox"),
    Layer(3, "platform", ".runtime.distributed .runtime.cpu_backend .runtime.megatron_patches"),
    Layer(3, "platform", ".runtime.signals .runtime.watcher"),
    Layer(4, "model", ".model"),
    Layer(4, "data", ".data"),
    Layer(5, "training", ".state .training .checkpoint .planning"),  # a start prints the warnings of the plan
    Layer(6, "evaluation", ".evaluation"),
    Layer(7, "inspection", ".inspection"),
    Layer(7, "conversion", "checkpoint_conversion"),
    Layer(7, "acceptance", "tools.acceptance"),  # phases of tools/accept_gpu.py
    Layer(7, "launch", ".launch .pretrain"),
    Layer(8, "benchmarks", "benchmarks"),
    Layer(8, "commands", ".commands tools.accept_gpu"),
    Layer(8, "api", ".api"),
    Layer(9, "names", ".__main__ tools checkpoint_conversion.convert"),  # files of a checkout that run commands
]
PREFIXES = {
    f"megatron_neobert{name}" if name.startswith(".") else name: layer
    for layer in LAYERS
    for name in layer.modules.split()
}


def layer_of(module: str) -> Layer:
    longest = max((prefix for prefix in PREFIXES if f"{module}.".startswith(f"{prefix}.")), key=len)
    # The package itself has only the version, so every module directly below it needs its own prefix.
    missing = longest == "megatron_neobert" != module
    assert not missing, f"{module} has no layer in tests/repo/test_import_direction.py; add one"
    return PREFIXES[longest]


def find_modules() -> dict[str, Path]:
    """Return the file of each module outside tests, by its dotted name."""
    modules = {}
    for top in ("megatron_neobert", "checkpoint_conversion", "tools", "benchmarks"):
        for path in sorted((REPOSITORY / top).rglob("*.py")):
            parts = path.relative_to(REPOSITORY).with_suffix("").parts
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def imported_names(source: str) -> set[str]:
    """Return all modules that a source imports, also inside functions; `from a import b` gives a and a.b."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: relative imports are not allowed"
            names |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


NAMESPACES = ("megatron_neobert", "checkpoint_conversion")  # packages: `from` them imports modules


def own_imports(names: set[str], known: set[str]) -> set[str]:
    """Return the names that are modules of this repository."""
    return {name for name in names if name in known and name not in NAMESPACES}


def violations(module: str, imported: set[str]) -> list[str]:
    layer = layer_of(module)
    messages = []
    for name in sorted(imported - {module}):
        lower = layer_of(name)
        if lower.group == "commands" and layer.group != "names":
            messages.append(f"{module} imports {name}, a command; commands are not imported")
        elif lower.level > layer.level or (lower.level == layer.level and lower.group != layer.group):
            messages.append(
                f"{module} (level {layer.level}, {layer.group}) imports {name} ({lower.level}, {lower.group})"
            )
    return messages


MODULES = find_modules()


def test_modules_import_only_lower_layers():
    found = []
    for module, path in MODULES.items():
        found += violations(module, own_imports(imported_names(path.read_text(encoding="utf-8")), set(MODULES)))
    assert len(MODULES) > 100 and found == []


def test_imports_have_no_cycle():
    graph = {
        module: own_imports(imported_names(path.read_text(encoding="utf-8")), set(MODULES)) - {module}
        for module, path in MODULES.items()
    }
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_settings_and_phases_import_only_the_standard_library():
    names = ("cli", "config.schema", "config.phases", "errors", "megatron_flags", "text")
    modules = {f"megatron_neobert.{name}" for name in names}
    imported = set().union(*(imported_names(MODULES[module].read_text(encoding="utf-8")) for module in modules))
    others = {name for name in imported if not any(f"{name}.".startswith(f"{module}.") for module in modules)}
    others -= set(NAMESPACES) | {"megatron_neobert.config"}
    assert {name.split(".")[0] for name in others} - {"argcomplete"} <= set(sys.stdlib_module_names)
