"""Command: can this machine train, with what, and what stands in the way?

    neobert check environment [--save runs/first] [--gpu-test]

Looks at Python, packages, GPUs, driver, shared memory and disk. Each line is ok, a warning or a problem, with its
remedy. Exit code 0: training can start (there may be warnings); 69: it cannot, or it would not use the GPUs that are
here. Runs where nothing is installed yet, with any Python from 3.8 on.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Optional

from megatron_neobert.cli import option
from megatron_neobert.errors import EXIT_UNAVAILABLE
from megatron_neobert.text import parse_json

OK, WARNING, PROBLEM = "ok", "warning", "problem"
PROJECT = "megatron-neobert"
PROBE = Path(__file__).with_name("environment_probe.py")
SECONDS = 300  # for the probe: on a cold network file system torch's import takes a minute
PREPARE = "run bash tools/prepare_environment.sh, which installs the tested versions of constraints.txt"
# Without these, or outside their ranges, a conversion or a figure fails, and training does not.
NOT_FOR_TRAINING = ("transformers", "huggingface_hub", "matplotlib", "tqdm")
# Extras whose packages are judged where they are installed.
EXTRAS = ("gpu", "fast", "dali", "wandb", "eval")
# Compiled for one major version of CUDA; the other build of the same package is the remedy.
BUILDS = {
    "transformer-engine-cu12": ("12", "transformer-engine[core_cu13,pytorch]==2.11.0"),
    "transformer-engine-cu13": ("13", "transformer-engine[core_cu12,pytorch]==2.11.0"),
    "nvidia-dali-cuda120": ("12", "nvidia-dali-cuda130"),
    "nvidia-dali-cuda130": ("13", "nvidia-dali-cuda120"),
}
# NCCL's ranks of one node talk through it, and so do torch's loader workers; Docker's default is 64 MiB.
LEAST_SHARED_MIB = 1024
# Four checkpoints of the 250M model (3.2 GiB each), of which a run keeps three, and some room.
LEAST_FREE_GIB = 16


class Finding(NamedTuple):
    """One line of the report."""

    level: str
    subject: str
    words: str
    remedy: str


@dataclass(frozen=True)
class EnvironmentOptions:
    """The command line of `neobert check environment`."""

    save: Optional[Path] = option(  # noqa: UP045  Python 3.8 evaluates it
        None, "folder that a run will write to: is it writable, is there room?", metavar="DIR"
    )
    gpu_test: bool = option(False, "also compute on every GPU, and between them")


def check_environment(options: EnvironmentOptions) -> int:
    """Check whether this machine can train, with what, and what prevents it.

    Returns:
        0 if training can start, or 69.
    """
    findings = list(find_all(options.save, gpu_test=options.gpu_test))
    for level, subject, words, remedy in findings:
        print(f"{level:<8}{subject}: {words}")
        if remedy:
            print(f"        -> {remedy}")
    problems, warnings = (sum(finding.level == level for finding in findings) for level in (PROBLEM, WARNING))
    if problems:
        print(f"{problems} problem(s) keep training from starting as it should; {warnings} warning(s).")
        return EXIT_UNAVAILABLE
    print(f"Training can start; {warnings} warning(s). For a report of a bug: python -m torch.utils.collect_env")
    return 0


def find_all(save: Path | None, *, gpu_test: bool) -> Iterator[Finding]:
    """Yield every finding about this machine; what a later check would only repeat is left out."""
    if not (3, 10) <= sys.version_info[:2] <= (3, 13):
        here = f"Python {platform.python_version()}"
        remedy = "activate an environment of one of them, or run bash tools/prepare_environment.sh, which makes .venv"
        yield Finding(PROBLEM, here, f"{sys.executable}; this project needs 3.10 to 3.13", remedy)
        return
    yield Finding(OK, f"Python {platform.python_version()}", sys.executable, "")
    installed = installed_packages()
    try:
        yield from requirement_findings(installed)
    except ModuleNotFoundError:  # packaging, which everything else needs too
        yield Finding(PROBLEM, "packages", "none of those that training needs is installed", PREPARE)
        return
    cuda = ""
    for answer in run_probe():
        if isinstance(answer, dict):
            cuda = answer["CUDA"]
        else:
            yield Finding(*answer)
    yield from trap_findings(installed, cuda)
    yield from machine_findings(os.environ)
    if save is not None:
        yield from folder_findings(save)
    if gpu_test:
        yield from (Finding(*answer) for answer in run_probe("--gpu-test"))


def installed_packages() -> dict[str, str]:
    """Return the versions of installed distributions by their names in lower case."""
    found = ((one.metadata["Name"], one.version) for one in importlib.metadata.distributions())
    return {name.lower(): version for name, version in found if name}


def run_probe(*flags: str) -> list[Any]:
    """Return what the probe found, up to where it came; then why it came no further."""
    command = [sys.executable, str(PROBE), *flags]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=False)
        output, end = ended.stdout, ""
        if ended.returncode < 0:
            end = f"the process was ended by {signal.Signals(-ended.returncode).name}"
    except subprocess.TimeoutExpired as late:
        output, end = (late.stdout or b"").decode(errors="replace"), f"no answer after {SECONDS} s"
    found = [parse_json(line[1:]) for line in output.splitlines() if line.startswith("@")]
    if end:
        remedy = "install the torch of constraints.txt in the build for this machine; see nvidia-smi -q for a GPU"
        found.append([PROBLEM, " ".join(["torch", *flags]), end, remedy])
    return found


def requirement_findings(installed: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what is installed against what this project asks for; an extra's packages count where they are installed.

    Raises:
        ModuleNotFoundError: There is not even `packaging`.
    """
    from packaging.requirements import Requirement

    try:
        stated = [Requirement(line) for line in importlib.metadata.requires(PROJECT) or ()]
    except importlib.metadata.PackageNotFoundError:
        yield Finding(PROBLEM, PROJECT, f"is not installed for {sys.executable}", PREPARE)
        return
    for wanted in stated:
        extras = [one for one in ("", *EXTRAS) if wanted.marker is None or wanted.marker.evaluate({"extra": one})]
        version = installed.get(wanted.name.lower())
        if not extras or (version is None and extras[0]):
            continue
        asked = f"{wanted.name}{wanted.specifier}"
        asked = f"the extra {extras[0]} of {PROJECT} asks for {asked}" if extras[0] else f"{PROJECT} asks for {asked}"
        level = WARNING if extras[0] or wanted.name in NOT_FOR_TRAINING else PROBLEM
        if version is None:
            yield Finding(level, wanted.name, f"is not installed; {asked}", PREPARE)
        elif not wanted.specifier.contains(version, prereleases=True):
            yield Finding(level, f"{wanted.name} {version}", f"does not fit: {asked}", PREPARE)


def trap_findings(installed: Mapping[str, str], cuda: str) -> Iterator[Finding]:
    """Yield packages that do not fit each other; `cuda` is the version that torch was built with, or nothing."""
    from packaging.version import Version

    def is_at_least(package: str, version: str) -> bool:
        return Version(installed.get(package, "0")) >= Version(version)

    if is_at_least("apex", "0.9"):
        why = "is the registry's project of that name and not NVIDIA's; Megatron would import it"
        remedy = "pip uninstall apex; NVIDIA's is optional and built from its repository"
        yield Finding(PROBLEM, f"apex {installed['apex']}", why, remedy)
    # Source: TransformerEngine 2.16 pytorch/module/base.py, set_extra_state.
    if is_at_least("transformer-engine", "2.16") and not is_at_least("megatron-core", "0.17"):
        why = "refuses the pickled state of --fp8-recipe delayed: such a run cannot be resumed"
        remedy = "use --fp8-recipe tensorwise or blockwise, or Transformer Engine 2.11.0"
        yield Finding(WARNING, f"transformer-engine {installed['transformer-engine']}", why, remedy)
    for package, (major, other) in BUILDS.items():
        if package in installed and cuda and cuda.split(".")[0] != major:
            why = f"is built for CUDA {major}, and torch brings CUDA {cuda}"
            level = WARNING if package.startswith("nvidia-dali") else PROBLEM  # DALI is used on request only
            yield Finding(level, f"{package} {installed[package]}", why, f"pip uninstall {package}; install {other}")


def machine_findings(variables: Mapping[str, str]) -> Iterator[Finding]:
    """Yield warnings about variables that a launcher left in this shell, and about too little shared memory."""
    if "RANK" in variables:
        why = "is what a launcher gives to one rank: a command started by hand takes itself for it"
        yield Finding(WARNING, f"RANK {variables['RANK']}", why, "unset RANK, WORLD_SIZE and LOCAL_RANK in this shell")
    folder = Path("/dev/shm")
    size = shutil.disk_usage(folder).total // 2**20 if folder.is_dir() else 0
    if size < LEAST_SHARED_MIB:
        why = "ranks of one node and loader workers exchange data through it"
        remedy = "start the container with --ipc=host or --shm-size=16g"
        yield Finding(WARNING, f"MiB of /dev/shm {size}", why, remedy)


def folder_findings(save: Path) -> Iterator[Finding]:
    """Yield whether a run can write its checkpoints to a folder, which may not exist yet."""
    nearest = save.absolute()
    while not os.path.lexists(nearest):  # a link to nothing does exist, and no folder can be made there
        nearest = nearest.parent
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        remedy = "name a folder, existing or new, on a disk that you may write to"
        yield Finding(PROBLEM, f"--save {save}", f"a run could not write a checkpoint below {nearest}", remedy)
        return
    ended = subprocess.run(["stat", "-f", "-c", "%T", nearest], capture_output=True, text=True, check=False)
    kind, free = ended.stdout.strip(), shutil.disk_usage(nearest).free // 2**30
    yield Finding(OK, f"--save {save}", f"{free} GiB free on a file system of kind {kind}", "")
    if free < LEAST_FREE_GIB:
        why = f"three checkpoints of the 250M model and one being written take {LEAST_FREE_GIB}"
        remedy = "free some, or lower --keep-last; --dry-run compares with the checkpoints of your own settings"
        yield Finding(WARNING, f"GiB free at --save {free}", why, remedy)
    if kind in ("tmpfs", "ramfs", "overlayfs"):
        remedy = "name a folder on a disk that stays, mounted into the container"
        yield Finding(WARNING, f"file system of --save {kind}", "is gone with the machine or the container", remedy)
