"""Imports go in one direction. LAYERS is the architecture: every module has a layer, and imports lower layers only."""

import ast
import sys
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

from commands import REPOSITORY


@dataclass(frozen=True)
class Layer:
    """A module may import modules of lower levels, and of the same group at its level."""

    level: int
    group: str


PURE = Layer(2, "pure")
# Prefix of a module -> its layer; the longest prefix counts.
LAYERS = {
    "megatron_neobert": Layer(0, "version"),
    "megatron_neobert.huggingface": Layer(0, "huggingface"),  # exported without the rest of the package
    "megatron_neobert.huggingface.auto_classes": Layer(1, "huggingface"),  # not exported
    "megatron_neobert.huggingface.checks": Layer(2, "huggingface"),
    "megatron_neobert.huggingface.folder_files": Layer(2, "huggingface"),
    "megatron_neobert.huggingface.hub": Layer(2, "huggingface"),
    "megatron_neobert.text": Layer(0, "errors"),
    "megatron_neobert.errors": Layer(0, "errors"),
    "megatron_neobert.cli": Layer(0, "errors"),
    "megatron_neobert.megatron_flags": Layer(0, "errors"),
    "megatron_neobert.config": Layer(1, "config"),
    "megatron_neobert.config.cli": Layer(2, "command line"),
    # Start-up and files, without torch. Modules that use Megatron have a higher layer.
    "megatron_neobert.runtime": Layer(1, "runtime"),
    "megatron_neobert.runtime.store": Layer(2, "runtime"),
    "megatron_neobert.model.reference": PURE,
    "megatron_neobert.model.flops": PURE,
    "megatron_neobert.data.batches.masking": PURE,
    "megatron_neobert.data.batches.packing": PURE,
    "megatron_neobert.data.batches.order": PURE,
    "megatron_neobert.data.batches.philox": PURE,
    "megatron_neobert.runtime.distributed": Layer(3, "platform"),
    "megatron_neobert.runtime.cpu_backend": Layer(3, "platform"),
    "megatron_neobert.runtime.megatron_patches": Layer(3, "platform"),
    "megatron_neobert.runtime.megatron_imports": Layer(3, "platform"),
    "megatron_neobert.runtime.signals": Layer(3, "platform"),
    "megatron_neobert.runtime.watcher": Layer(3, "platform"),
    "megatron_neobert.model": Layer(4, "model"),
    "megatron_neobert.data": Layer(4, "data"),
    "megatron_neobert.state": Layer(5, "training"),
    "megatron_neobert.training": Layer(5, "training"),
    "megatron_neobert.planning": Layer(5, "training"),  # a start prints the warnings of the plan
    "megatron_neobert.checkpoint": Layer(5, "training"),
    "megatron_neobert.evaluation": Layer(6, "evaluation"),
    "megatron_neobert.inspection": Layer(7, "inspection"),
    "checkpoint_conversion": Layer(7, "conversion"),
    "checkpoint_conversion.convert": Layer(9, "names"),  # started as a file of a checkout, it runs commands
    "tools": Layer(9, "names"),  # preprocess_data.py runs a command
    "tools.accept_gpu": Layer(8, "commands"),
    "tools.acceptance": Layer(7, "acceptance"),  # phases of tools/accept_gpu.py
    "benchmarks": Layer(8, "benchmarks"),
    "megatron_neobert.commands": Layer(8, "commands"),
    "megatron_neobert.launch": Layer(7, "launch"),
    "megatron_neobert.pretrain": Layer(7, "launch"),
    "megatron_neobert.api": Layer(8, "api"),
    "megatron_neobert.__main__": Layer(9, "names"),
}


def layer_of(module: str) -> Layer:
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        # The package itself has only the version, so every module directly below it needs its own line.
        if prefix in LAYERS and (prefix != "megatron_neobert" or length == len(parts)):
            return LAYERS[prefix]
    raise AssertionError(f"{module} has no layer in tests/repo/test_import_direction.py; add one")


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
