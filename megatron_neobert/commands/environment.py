"""The command `neobert check environment`: reports whether this machine can train, and what prevents it.

    neobert check environment [--save runs/first] [--gpu-test]

It checks Python, packages, GPUs, shared memory and disk. Each line of the report is ok, a note on what the machine does
not support, a warning, or a problem with a remedy. Exit code 0: training can start, perhaps with warnings. 69: training
cannot start, or would not use the GPUs of this machine. The command needs Python 3.8 or newer, and no package.

Everything that imports torch runs in another process, because a compiled library that does not match torch can kill it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Optional

from megatron_neobert.cli import option
from megatron_neobert.errors import EXIT_UNAVAILABLE
from megatron_neobert.runtime.environment import installed_packages, normalize
from megatron_neobert.text import parse_json

OK, NOTE, WARNING, PROBLEM = "ok", "note", "warning", "problem"
PROJECT = "megatron-neobert"
# Timeout of a probe. Importing torch from a cold network file system takes a minute.
PROBE_SECONDS = 300
PREPARE = "run bash tools/prepare_environment.sh, which installs the tested versions of constraints.txt"
# Required packages that training does not use: conversions, figures and progress bars need them.
NOT_FOR_TRAINING = ("transformers", "huggingface_hub", "matplotlib", "tqdm")
# Extras whose packages are checked if they are installed.
EXTRAS = ("gpu", "fast", "dali", "wandb", "eval")
# NCCL ranks of one node and torch's loader workers use /dev/shm. Docker's default is 64 MiB.
LEAST_SHARED_MIB = 1024
# Three checkpoints of the 250M model and one being written, 3.2 GiB each, plus a margin.
LEAST_FREE_GIB = 16
# Distribution -> module. These are compiled for one torch, so an installed one can fail to import.
COMPILED = {
    "megatron-core": "megatron.core",
    "transformer-engine": "transformer_engine.pytorch",
    "flash-attn": "flash_attn.flash_attn_interface",
}


class Finding(NamedTuple):
    """One line of the report; `remedy` is empty if there is nothing to do."""

    level: str  # OK, WARNING, PROBLEM, or NOTE for what this machine does not support
    subject: str
    detail: str
    remedy: str = ""


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
    problems, warned = (sum(finding.level == level for finding in findings) for level in (PROBLEM, WARNING))
    if problems:
        print(f"Training cannot start as it should: {problems} problem(s), {warned} warning(s).")
        return EXIT_UNAVAILABLE
    print(f"Training can start; {warned} warning(s). For a bug report: python -m torch.utils.collect_env")
    return 0


def find_all(save: Path | None, *, gpu_test: bool) -> Iterator[Finding]:
    """Check this machine and yield all findings. Stop after a problem that would make all later checks fail."""
    python = f"Python {platform.python_version()}"
    if not (3, 10) <= sys.version_info[:2] <= (3, 13):
        remedy = "activate an environment with one of them, or run bash tools/prepare_environment.sh, which makes .venv"
        yield Finding(PROBLEM, python, f"{sys.executable}; this project needs 3.10 to 3.13", remedy)
        return
    yield Finding(OK, python, sys.executable)
    try:
        yield from package_findings(installed_packages())
    except ModuleNotFoundError:  # without `packaging`, Megatron-Core is not installed either
        yield Finding(PROBLEM, "packages", "the packages that training needs are not installed", PREPARE)
        return
    yield from run_probe("torch")
    folder = Path("/dev/shm")
    size = shutil.disk_usage(folder).total // 2**20 if folder.is_dir() else 0
    if size < LEAST_SHARED_MIB:
        detail = f"{size} MiB; ranks of one node and loader workers need {LEAST_SHARED_MIB}"
        yield Finding(WARNING, "/dev/shm", detail, "start the container with --ipc=host or --shm-size=16g")
    if save is not None:
        yield from folder_findings(save)
    if gpu_test:
        yield from run_probe("--gpu-test")


def package_findings(installed: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a warning or problem for each missing required package, and for each installed package of a wrong version.

    Packages of EXTRAS, and those not needed for training, give warnings. Raise ModuleNotFoundError without `packaging`.
    """
    from packaging.requirements import Requirement

    if installed.get("apex", "").startswith("0.9"):
        detail = "is an unrelated project of the package registry, not NVIDIA's Apex, and Megatron would import it"
        remedy = "pip uninstall apex; NVIDIA's Apex is optional and is built from its repository"
        yield Finding(PROBLEM, f"apex {installed['apex']}", detail, remedy)
    try:
        requirements = [Requirement(line) for line in importlib.metadata.requires(PROJECT) or ()]
    except importlib.metadata.PackageNotFoundError:
        yield Finding(WARNING, PROJECT, f"is not installed for {sys.executable}; packages are not checked", PREPARE)
        return
    for package in requirements:
        extras = [
            extra for extra in ("", *EXTRAS) if package.marker is None or package.marker.evaluate({"extra": extra})
        ]
        version = installed.get(normalize(package.name))
        if not extras or (version is None and extras[0]):
            continue
        source = f"the extra {extras[0]} of {PROJECT}" if extras[0] else PROJECT
        rule = f"{source} needs {package.name}{package.specifier}"
        level = WARNING if extras[0] or package.name in NOT_FOR_TRAINING else PROBLEM
        if version is None:
            yield Finding(level, package.name, f"is not installed; {rule}", PREPARE)
        elif not package.specifier.contains(version, prereleases=True):
            yield Finding(level, f"{package.name} {version}", f"is not supported: {rule}", PREPARE)


def folder_findings(save: Path) -> Iterator[Finding]:
    """Yield findings about saving checkpoints to a folder, which may not exist yet: permission and space."""
    nearest = save.absolute()
    while not os.path.lexists(nearest):  # True for a broken link, below which no folder can be created
        nearest = nearest.parent
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        remedy = "give a folder, existing or new, on a disk that you can write to"
        yield Finding(PROBLEM, f"--save {save}", f"a run cannot save checkpoints below {nearest}", remedy)
        return
    free = shutil.disk_usage(nearest).free // 2**30
    if free >= LEAST_FREE_GIB:
        yield Finding(OK, f"--save {save}", f"{free} GiB free")
    else:
        detail = f"{free} GiB free; three checkpoints of the 250M model and one being written take {LEAST_FREE_GIB}"
        remedy = "free some space, or lower --keep-last; --dry-run computes the size of your own checkpoints"
        yield Finding(WARNING, f"--save {save}", detail, remedy)


# --- another process


def run_probe(name: str) -> Iterator[Finding]:
    """Run the functions of PROBES[name] in another process and yield their findings. A crash or hang is a problem."""
    command, failure = [sys.executable, "-m", __spec__.name if __spec__ else __name__, name], ""
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=PROBE_SECONDS, check=False
        )
        output = ended.stdout
        if ended.returncode < 0:
            failure = f"the process was ended by {signal.Signals(-ended.returncode).name}"
    except subprocess.TimeoutExpired as error:
        output, failure = (error.stdout or b"").decode(errors="replace"), f"no answer after {PROBE_SECONDS} s"
    # Lines without @ are output of libraries.
    yield from (Finding(*parse_json(line[1:])) for line in output.splitlines() if line.startswith("@"))
    if failure:
        remedy = "install the torch version of constraints.txt, built for this machine; for a GPU, see nvidia-smi -q"
        yield Finding(PROBLEM, name, failure, remedy)


def send(*finding: str) -> None:
    """Print a finding as a line that `run_probe` reads."""
    print("\n@" + json.dumps(finding), flush=True)


def probe() -> None:
    """Send what torch is built for, its GPUs, the kernels of each precision, and packages that cannot be imported."""
    import torch

    send(OK, f"torch {torch.__version__}", f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}")
    probe_gpus()
    probe_precisions()
    for package, module in COMPILED.items():
        try:
            version = importlib.metadata.version(package)
            importlib.import_module(module)
        except importlib.metadata.PackageNotFoundError:
            continue
        except Exception as error:  # a broken package can raise any exception
            detail = f"is installed but cannot be imported: {type(error).__name__}: {error}"
            remedy = f"install it again for this Python and torch, or pip uninstall {package} if you do not need it"
            send(PROBLEM, f"{package} {version}", detail, remedy)


def probe_gpus() -> None:
    """Send the memory of each GPU that torch can use. A GPU of nvidia-smi that torch cannot use is a problem."""
    import torch

    with warnings.catch_warnings(record=True) as torch_warnings:
        warnings.simplefilter("always")
        for index in range(torch.cuda.device_count()):
            free, total = (amount / 2**30 for amount in torch.cuda.mem_get_info(index))
            detail = f"{free:.0f} of {total:.0f} GiB are free"
            send(OK, f"GPU {index}: {torch.cuda.get_device_name(index)}", detail)
    for warning in torch_warnings:  # torch has no kernels for this GPU
        send(PROBLEM, "GPU", " ".join(str(warning.message).split()), "install a build of torch for this GPU")
    if not torch.cuda.device_count():
        listed = ""
        if shutil.which("nvidia-smi"):
            listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
        if listed:
            detail = f"nvidia-smi lists {listed.partition(' (')[0]}, but torch cannot use it"
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
            remedy = f"install a driver and a torch for the same CUDA; CUDA_VISIBLE_DEVICES is {visible}"
            send(PROBLEM, "GPU", detail, remedy)
        else:
            send(OK, "GPU", "none: training runs on the CPU, over gloo")


def probe_precisions() -> None:
    """Send the kernels of each precision, or why it is not supported."""
    from megatron_neobert.config.schema import Settings
    from megatron_neobert.errors import ConfigError
    from megatron_neobert.model.kernels import check_hardware, choose_kernels

    bf16 = Settings().with_section("training", bf16=True)
    precisions = {"float32": Settings(), "bfloat16": bf16}
    for recipe in ("tensorwise", "blockwise"):
        precisions[f"FP8 {recipe}"] = bf16.with_section("compute", fp8_format="hybrid", fp8_recipe=recipe)
    for name, settings in precisions.items():
        try:
            check_hardware(settings)
            summary = choose_kernels(settings).summary
            send(OK, name, summary.split(": ", 1)[1])
        except ConfigError as error:
            level = PROBLEM if name == "float32" else NOTE
            send(level, name, f"not supported: {' '.join(error.problems)}")


def test_gpus() -> None:
    """Run `compute` in one process per GPU. Send a problem if there is no GPU or a process fails."""
    import torch
    from torch import multiprocessing

    ranks = torch.cuda.device_count()
    if not ranks:
        send(PROBLEM, "--gpu-test", "there is no GPU to test", "see above, or remove the flag")
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            multiprocessing.spawn(compute, ("cuda", ranks, f"{folder}/store"), nprocs=ranks)
        except Exception as error:  # the error of a rank, or the signal that ended it
            detail = f"a process failed: {str(error).strip().splitlines()[-1]}"
            send(PROBLEM, "--gpu-test", detail, "see nvidia-smi -q and the driver's log")


def compute(rank: int, device_type: str, ranks: int, store: str) -> None:
    """Check a bfloat16 matrix product on this rank, then a sum over all ranks, and send the results.

    Only rank 0 sends the result of the sum. A wrong result raises AssertionError.

    Args:
        device_type: "cuda", or "cpu" in tests, which communicates over gloo.
        store: Path of a new file that the ranks use to find each other.

    Collective: all ranks.
    """
    import torch
    import torch.distributed as dist

    is_cuda = device_type == "cuda"
    device = torch.device(device_type, rank) if is_cuda else torch.device(device_type)
    if is_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if is_cuda else "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    size = 4096 if is_cuda else 256
    left, right = torch.randn(2, size, size, device=device).div(size**0.5).bfloat16()
    product = left.float() @ right.float()
    error = float(((left @ right).float() - product).norm() / product.norm())
    assert error < 1e-2, f"{device}: the relative error of a bfloat16 product is {error:.1e}"
    send(OK, f"{device} bfloat16 product", f"relative error {error:.1e}")
    values = torch.full((2**20,), float(rank + 1), device=device)
    dist.all_reduce(values)  # collective: all ranks
    expected = ranks * (ranks + 1) / 2
    assert bool((values == expected).all()), f"a sum over {ranks} ranks is {values[0].item():g} instead of {expected:g}"
    if rank == 0:
        send(OK, f"sum over {ranks} rank(s)", f"{expected:g}")
    dist.destroy_process_group()


PROBES: dict[str, Callable[[], None]] = {"torch": probe, "--gpu-test": test_gpus}

if __name__ == "__main__":
    try:
        PROBES[sys.argv[1]]()
    except Exception as error:  # importing torch can raise any exception
        remedy = "install the torch version of constraints.txt, built for this machine"
        send(PROBLEM, "torch", f"cannot be used: {type(error).__name__}: {error}", remedy)
