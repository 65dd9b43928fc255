"""The command `neobert check environment`: reports whether this machine can train, and what prevents it.

    neobert check environment [--save runs/first] [--gpu-test]

It checks Python, packages, GPUs, driver, shared memory and disk. Each line of the report is ok, a note on what the
machine does not support, a warning, or a problem with a remedy. Exit code 0: training can start, perhaps with warnings.
69: training cannot start, or would not use the GPUs of this machine. The command needs Python 3.8 or newer, and no
package.
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
# Timeout of the probe. Importing torch from a cold network file system takes a minute.
PROBE_SECONDS = 300
PREPARE = "run bash tools/prepare_environment.sh, which installs the tested versions of constraints.txt"
# Required packages that training does not use: conversions, figures and progress bars need them.
NOT_FOR_TRAINING = ("transformers", "huggingface_hub", "matplotlib", "tqdm")
# Extras whose packages are checked if they are installed.
EXTRAS = ("gpu", "fast", "dali", "wandb", "eval")
# Package compiled for one major version of CUDA -> that version, and the package for the other version.
BUILDS = {
    "transformer-engine-cu12": ("12", "transformer-engine[core_cu13,pytorch]==2.11.0"),
    "transformer-engine-cu13": ("13", "transformer-engine[core_cu12,pytorch]==2.11.0"),
    "nvidia-dali-cuda120": ("12", "nvidia-dali-cuda130"),
    "nvidia-dali-cuda130": ("13", "nvidia-dali-cuda120"),
}
# NCCL ranks of one node and torch's loader workers use /dev/shm. Docker's default is 64 MiB.
LEAST_SHARED_MIB = 1024
# Three checkpoints of the 250M model and one being written, 3.2 GiB each, plus a margin.
LEAST_FREE_GIB = 16


class Finding(NamedTuple):
    """One line of the report; `remedy` is empty if there is nothing to do."""

    level: str  # OK, WARNING, PROBLEM, or "note" for what this machine does not support
    subject: str
    detail: str
    remedy: str


@dataclass(frozen=True)
class EnvironmentOptions:
    """Options of `neobert check environment`."""

    save: Optional[Path] = option(  # noqa: UP045  Python 3.8 cannot evaluate `Path | None`
        None, "also check whether a run can save checkpoints to this folder", metavar="DIR"
    )
    gpu_test: bool = option(False, "also compute on every GPU, and communicate between them")


def check_environment(options: EnvironmentOptions) -> int:
    """Check whether this machine can train, and report its packages, GPUs and limits.

    Returns:
        0 if training can start, perhaps with warnings; otherwise 69.
    """
    findings = list(find_all(options.save, gpu_test=options.gpu_test))
    for level, subject, detail, remedy in findings:
        print(f"{level:<8}{subject}: {detail}")
        if remedy:
            print(f"        -> {remedy}")
    problems, warnings = (sum(finding.level == level for finding in findings) for level in (PROBLEM, WARNING))
    if problems:
        print(f"Training cannot start as it should: {problems} problem(s), {warnings} warning(s).")
        return EXIT_UNAVAILABLE
    print(f"Training can start; {warnings} warning(s). For a bug report: python -m torch.utils.collect_env")
    return 0


def find_all(save: Path | None, *, gpu_test: bool) -> Iterator[Finding]:
    """Check this machine and yield all findings. Stop after a problem that would make all later checks fail."""
    python = f"Python {platform.python_version()}"
    if not (3, 10) <= sys.version_info[:2] <= (3, 13):
        remedy = "activate an environment with one of them, or run bash tools/prepare_environment.sh, which makes .venv"
        yield Finding(PROBLEM, python, f"{sys.executable}; this project needs 3.10 to 3.13", remedy)
        return
    yield Finding(OK, python, sys.executable, "")
    installed = installed_packages()
    try:
        yield from requirement_findings(installed)
    except ModuleNotFoundError:  # without `packaging`, Megatron-Core is not installed either
        yield Finding(PROBLEM, "packages", "the packages that training needs are not installed", PREPARE)
        return
    cuda = ""
    for answer in run_probe():
        if isinstance(answer, dict):
            cuda = answer["CUDA"]
        else:
            yield Finding(*answer)
    yield from conflict_findings(installed, cuda)
    yield from machine_findings(os.environ)
    if save is not None:
        yield from folder_findings(save)
    if gpu_test:
        yield from (Finding(*answer) for answer in run_probe("--gpu-test"))


def installed_packages() -> dict[str, str]:
    """Return the versions of installed distributions, by their names in lower case."""
    distributions = ((package.metadata["Name"], package.version) for package in importlib.metadata.distributions())
    return {name.lower(): version for name, version in distributions if name}


def run_probe(*flags: str) -> list[Any]:
    """Run environment_probe.py with `flags` and return its JSON answers. A crash or hang adds a problem at the end."""
    command = [sys.executable, str(PROBE), *flags]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=PROBE_SECONDS, check=False
        )
        output, failure = ended.stdout, ""
        if ended.returncode < 0:
            failure = f"the process was ended by {signal.Signals(-ended.returncode).name}"
    except subprocess.TimeoutExpired as error:
        output, failure = (error.stdout or b"").decode(errors="replace"), f"no answer after {PROBE_SECONDS} s"
    answers = [parse_json(line[1:]) for line in output.splitlines() if line.startswith("@")]
    if failure:
        remedy = "install the torch version of constraints.txt, built for this machine; for a GPU, see nvidia-smi -q"
        answers.append([PROBLEM, " ".join(["torch", *flags]), failure, remedy])
    return answers


def requirement_findings(installed: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a warning or problem for each missing required package, and for each installed package of a wrong version.

    Packages of EXTRAS, and those not needed for training, give warnings. Raise ModuleNotFoundError without `packaging`.
    """
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(line) for line in importlib.metadata.requires(PROJECT) or ()]
    except importlib.metadata.PackageNotFoundError:
        yield Finding(WARNING, PROJECT, f"is not installed for {sys.executable}; packages are not checked", PREPARE)
        return
    for package in requirements:
        extras = [
            extra for extra in ("", *EXTRAS) if package.marker is None or package.marker.evaluate({"extra": extra})
        ]
        version = installed.get(package.name.lower())
        if not extras or (version is None and extras[0]):
            continue
        source = f"the extra {extras[0]} of {PROJECT}" if extras[0] else PROJECT
        rule = f"{source} needs {package.name}{package.specifier}"
        level = WARNING if extras[0] or package.name in NOT_FOR_TRAINING else PROBLEM
        if version is None:
            yield Finding(level, package.name, f"is not installed; {rule}", PREPARE)
        elif not package.specifier.contains(version, prereleases=True):
            yield Finding(level, f"{package.name} {version}", f"is not supported: {rule}", PREPARE)


def conflict_findings(installed: Mapping[str, str], cuda: str) -> Iterator[Finding]:
    """Yield a warning or problem for each installed package that does not work with another or with torch's CUDA.

    Args:
        cuda: Version of CUDA that torch was built with, such as 12.8; empty for a CPU build.
    """
    from packaging.version import Version

    def is_at_least(package: str, version: str) -> bool:
        return Version(installed.get(package, "0")) >= Version(version)

    if is_at_least("apex", "0.9"):
        detail = "is an unrelated project of the package registry, not NVIDIA's Apex, and Megatron would import it"
        remedy = "pip uninstall apex; NVIDIA's Apex is optional and is built from its repository"
        yield Finding(PROBLEM, f"apex {installed['apex']}", detail, remedy)
    # Source: TransformerEngine 2.16 pytorch/module/base.py, set_extra_state.
    if is_at_least("transformer-engine", "2.16") and not is_at_least("megatron-core", "0.17"):
        detail = "refuses the pickled state of --fp8-recipe delayed, so a run with this recipe cannot be resumed"
        remedy = "use --fp8-recipe tensorwise or blockwise, or Transformer Engine 2.11.0"
        yield Finding(WARNING, f"transformer-engine {installed['transformer-engine']}", detail, remedy)
    for package, (major, replacement) in BUILDS.items():
        if package in installed and cuda and cuda.split(".")[0] != major:
            detail = f"is built for CUDA {major}, and torch for CUDA {cuda}"
            remedy = f"pip uninstall {package}; install {replacement}"
            level = WARNING if package.startswith("nvidia-dali") else PROBLEM  # DALI is optional
            yield Finding(level, f"{package} {installed[package]}", detail, remedy)


def machine_findings(variables: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a warning if `variables` (the environment) has RANK, and one if /dev/shm is below 1 GiB or missing."""
    if "RANK" in variables:
        detail = "is set by a launcher for one rank; a command started from this shell takes itself for that rank"
        yield Finding(
            WARNING, f"RANK {variables['RANK']}", detail, "unset RANK, WORLD_SIZE and LOCAL_RANK in this shell"
        )
    folder = Path("/dev/shm")
    size = shutil.disk_usage(folder).total // 2**20 if folder.is_dir() else 0
    if size < LEAST_SHARED_MIB:
        detail = f"{size} MiB; ranks of one node and loader workers need {LEAST_SHARED_MIB}"
        yield Finding(WARNING, "/dev/shm", detail, "start the container with --ipc=host or --shm-size=16g")


def folder_findings(save: Path) -> Iterator[Finding]:
    """Yield findings about saving checkpoints to a folder, which may not exist yet: permission, space, file system."""
    nearest = save.absolute()
    while not os.path.lexists(nearest):  # True for a broken link, below which no folder can be created
        nearest = nearest.parent
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        remedy = "give a folder, existing or new, on a disk that you can write to"
        yield Finding(PROBLEM, f"--save {save}", f"a run cannot save checkpoints below {nearest}", remedy)
        return
    ended = subprocess.run(["stat", "-f", "-c", "%T", nearest], capture_output=True, text=True, check=False)
    file_system, free = ended.stdout.strip(), shutil.disk_usage(nearest).free // 2**30
    yield Finding(OK, f"--save {save}", f"{free} GiB free on a file system of type {file_system}", "")
    if free < LEAST_FREE_GIB:
        detail = f"{free} GiB free; three checkpoints of the 250M model and one being written take {LEAST_FREE_GIB}"
        remedy = "free some space, or lower --keep-last; --dry-run computes the size of your own checkpoints"
        yield Finding(WARNING, f"--save {save}", detail, remedy)
    if file_system in ("tmpfs", "ramfs", "overlayfs"):
        detail = f"its file system, {file_system}, is deleted with the machine or the container"
        yield Finding(
            WARNING, f"--save {save}", detail, "give a folder on a permanent disk, mounted into the container"
        )
