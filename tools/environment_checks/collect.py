"""Looks at the machine once and returns the facts. Reads files and starts child processes; changes nothing.

Packages are imported in child processes, all at once, with a time limit: a compiled library that does not fit its torch
may end the process that imports it.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from environment_checks.facts import Driver, Facts, Gpu, Precision, Requirement, Torch
from environment_checks.limits import read_disk, read_limits

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
SECONDS = 180  # for one import: on a cold network file system torch takes a minute

# Imported for real where they are installed, because being installed says little: package -> module. torch_probe.py
# does so with megatron-core, which imports torch.
IMPORTED = {
    "numpy": "numpy",
    "pyarrow": "pyarrow",
    "orjson": "orjson",
    "tokenizers": "tokenizers",
    "transformers": "transformers",
    "psutil": "psutil",
    "transformer-engine": "transformer_engine.pytorch",
    "flash-attn": "flash_attn",
    "nvidia-dali-cuda120": "nvidia.dali",
    "nvidia-dali-cuda130": "nvidia.dali",
    "nanotoken": "nanotoken",
    "gigatoken": "gigatoken",
}
# Shown when they are there, beside what setup.py names.
OTHERS = (
    "transformer-engine",
    "transformer-engine-torch",
    "transformer-engine-cu12",
    "transformer-engine-cu13",
    "flash-attn",
    "apex",
    "nvidia-dali-cuda120",
    "triton",
)
# Modules that a folder of the same name before them would replace.
WATCHED = ("torch", "numpy", "megatron", "megatron_neobert", "transformer_engine", "transformers", "tokenizers", "apex")


def collect(save: Path | None, variables: dict[str, str]) -> Facts:
    """Everything; some seconds, most of them torch's import.

    Args:
        save: A folder that a run will write to, or None.
        variables: The environment that training would be started with.
    """
    requirements = read_requirements(REPOSITORY / "setup.py")
    packages = read_versions(sorted({line.package for line in requirements} | set(OTHERS)))
    children = {name: start_import(module) for name, module in IMPORTED.items() if name in packages}
    probed = read_probe(start_python((HERE / "torch_probe.py").read_text(encoding="utf-8")))
    torch = torch_of(probed.get("describe_torch", {"error": probed["end"]}))
    imported = {name: import_error(child) for name, child in children.items()}
    if "megatron-core" in packages and not torch.error:  # it imports torch, whose error is enough
        imported["megatron-core"] = probed.get("describe_megatron", {"error": probed["end"]}).get("error", "")
    places = [("the current folder", Path())] + ([("--save", save)] if save is not None else [])
    return Facts(
        python=platform.python_version(),
        executable=sys.executable,
        platform=f"{platform.system()} {platform.release()}, {platform.machine()}",
        packages=packages,
        import_errors={name: error for name, error in imported.items() if error},
        project=str(probed.get("describe_project", {}).get("found", "")),
        repository=str(REPOSITORY),
        shadowed=find_shadowed(variables.get("PYTHONPATH", "")),
        foreign_apex=is_foreign_apex(),
        torch=torch,
        precisions=tuple(Precision(*line) for line in probed.get("describe_precisions", {}).get("found", ())),
        driver=read_driver(),
        disks=tuple(read_disk(flag, path) for flag, path in places),
        limits=read_limits(),
        variables=variables,
        requirements=requirements,
    )


def read_requirements(setup: Path) -> tuple[Requirement, ...]:
    """The lists of setup.py, read as text: it is the one place that says which versions fit."""
    found: list[Requirement] = []
    for node in ast.parse(setup.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in ("REQUIREMENTS", "EXTRAS"):
            lists = ast.literal_eval(node.value)
            by_extra = lists if isinstance(lists, dict) else {"": lists}
            found += [to_requirement(line, extra) for extra, lines in by_extra.items() for line in lines]
    return tuple(found)


def to_requirement(line: str, extra: str) -> Requirement:
    """Of "mteb>=2.26,<3; python_version >= '3.11'" and the like."""
    wanted, _, marker = line.partition(";")
    match = re.match(r"([\w.-]+)(?:\[[^\]]*\])?\s*(.*)", wanted)
    assert match is not None, f"{line=} in setup.py names no package"
    least = re.search(r"python_version >= '([\d.]+)'", marker)
    return Requirement(match.group(1), match.group(2).strip(), least.group(1) if least else "", extra)


def read_versions(names: list[str]) -> dict[str, str]:
    """Of those packages that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def start_python(source: str, *arguments: str) -> subprocess.Popen[str]:
    """With -c, so that the current folder comes first in sys.path, as it does for training."""
    return subprocess.Popen(
        [sys.executable, "-c", source, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )


def start_import(module: str) -> subprocess.Popen[str]:
    return start_python(f"import warnings; warnings.simplefilter('ignore'); import {module}")


def wait_for(child: subprocess.Popen[str]) -> tuple[str, str]:
    """Its output, and how it ended: empty when well."""
    try:
        output, errors = child.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        output, _ = child.communicate()
        return output, f"no end after {SECONDS} s"
    if child.returncode < 0:
        return output, f"the process was ended by {signal.Signals(-child.returncode).name}"
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return output, "" if child.returncode == 0 else (lines[-1] if lines else f"exit code {child.returncode}")


def import_error(child: subprocess.Popen[str]) -> str:
    return wait_for(child)[1]


def read_probe(child: subprocess.Popen[str]) -> dict[str, Any]:
    """What torch_probe.py answered by part, up to where it came; "end": why it came no further."""
    output, end = wait_for(child)
    answers = [json.loads(line[1:]) for line in output.splitlines() if line.startswith("@{")]
    return {**{answer["part"]: answer for answer in answers}, "end": end or "it gave no answer"}


def torch_of(answer: dict[str, Any]) -> Torch:
    if "error" in answer:
        return Torch(error=answer["error"])
    found = answer["found"]
    gpus = tuple(Gpu(name, tuple(capability), total, used) for name, capability, total, used in found.pop("gpus", ()))
    return Torch(**{**found, "gpus": gpus, "architectures": tuple(found.get("architectures", ()))})


def find_shadowed(pythonpath: str) -> dict[str, str]:
    """Modules of which a copy lies in the current folder or on PYTHONPATH, before the installed one."""
    found: dict[str, str] = {}
    for folder in [Path(), *(Path(entry) for entry in pythonpath.split(os.pathsep) if entry)]:
        for module in WATCHED:
            place = next((one for one in (folder / module, folder / f"{module}.py") if is_module(one)), None)
            own = place is not None and place.resolve().parent == REPOSITORY and module == "megatron_neobert"
            if place is not None and not own:
                found.setdefault(module, str(place.resolve()))
    return found


def is_module(place: Path) -> bool:
    """A package, a file, or megatron's folder `core`: megatron itself is a namespace."""
    return place.is_file() or (place / "__init__.py").is_file() or (place / "core" / "__init__.py").is_file()


def is_foreign_apex() -> bool:
    """Whether a package called apex lacks NVIDIA's parts; it is looked at, not imported."""
    found = importlib.util.find_spec("apex")
    if found is None or importlib.util.find_spec("amp_C") is not None:
        return False
    return not any((Path(folder) / "optimizers").is_dir() for folder in found.submodule_search_locations or ())


def read_driver() -> Driver:
    """The driver and its devices, whatever torch thinks of them."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return Driver()
    listed = run([command, "--query-gpu=driver_version,name", "--format=csv,noheader"])
    if listed.returncode != 0:
        return Driver(error=" ".join((listed.stdout + listed.stderr).split()) or "nvidia-smi failed")
    rows = [[cell.strip() for cell in line.split(",", 1)] for line in listed.stdout.splitlines() if "," in line]
    if not rows:
        return Driver(error="nvidia-smi lists no GPU")
    links = links_of(run([command, "topo", "-m"]).stdout) if len(rows) > 1 else ""
    return Driver(version=rows[0][0], gpus=tuple(row[1] for row in rows), links=links, error="")


def links_of(matrix: str) -> str:
    """How the first GPU is linked to the others: "NV18", or "NV12 PIX" where the links differ."""
    row = next((line.split() for line in matrix.splitlines() if line.startswith("GPU0")), [])
    kinds = {cell for cell in row[1:] if re.fullmatch(r"NV\d+|PIX|PXB|PHB|NODE|SYS", cell)}
    return " ".join(sorted(kinds))


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Its result; a command that hangs, as nvidia-smi does beside a broken driver, counts as failed."""
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=30, check=False)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"{Path(command[0]).name} did not answer within 30 s")
