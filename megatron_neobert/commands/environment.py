"""Command: can this machine train, with what, and what stands in the way?

    neobert check environment [--save runs/first] [--gpu-test]

Looks at Python, packages, GPUs, driver, limits, disks and environment variables, and knows traps. Each line is ok, a
warning with its remedy, or a problem with its remedy. Exit code 0: training can start (there may be warnings); 69: it
cannot, or it would not use the GPUs that are here. Runs where nothing is installed yet, with any Python from 3.8 on.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
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
UNSET = "unset it"
# Without these, or outside their ranges, a conversion or a figure fails, and training does not.
NOT_FOR_TRAINING = ("transformers", "huggingface_hub", "matplotlib", "tqdm")
# Extras whose packages are judged where they are installed.
EXTRAS = ("gpu", "fast", "dali", "wandb", "eval")


class Bad(NamedTuple):
    """A known trap: for which values of a fact it is one, what it costs, and the way out."""

    subject: str  # a fact: a package's version, a number of the machine, an environment variable
    values: str  # ">=2.16,<3" of versions and numbers, "0 false off" of words
    level: str
    why: str
    remedy: str
    beside: tuple[str, str] = ("", "")  # another fact and its values that must hold as well


_ON, _OFF = "1 y yes true on", "0 n no false off"
_ENGINE_12 = "install transformer-engine[core_cu12,pytorch]==2.11.0"
_ENGINE_13 = "install transformer-engine[core_cu13,pytorch]==2.11.0"

# The ranges of setup.py, with their reasons beside them there, are read from the installed project.
KNOWN_BAD = (
    Bad("apex", ">=0.9", PROBLEM, "is the registry's project of that name and not NVIDIA's; Megatron would import it",
        "pip uninstall apex; NVIDIA's is optional and built from its repository"),
    # Source: TransformerEngine 2.16 pytorch/module/base.py, set_extra_state.
    Bad("transformer-engine", ">=2.16", WARNING, "refuses the pickled state of --fp8-recipe delayed: such a run cannot "
        "be resumed", "use --fp8-recipe tensorwise or blockwise, or Transformer Engine 2.11.0",
        beside=("megatron-core", "<0.17")),
    Bad("transformer-engine-cu12", ">=0", PROBLEM, "its kernels are for CUDA 12, and torch brings CUDA 13", _ENGINE_13,
        beside=("CUDA", ">=13")),
    Bad("transformer-engine-cu13", ">=0", PROBLEM, "its kernels are for CUDA 13, and torch brings CUDA 12", _ENGINE_12,
        beside=("CUDA", "<13")),
    Bad("nvidia-dali-cuda120", ">=0", WARNING, "is for CUDA 12, and torch brings CUDA 13",
        "pip install nvidia-dali-cuda130, and uninstall this one", beside=("CUDA", ">=13")),
    Bad("nvidia-dali-cuda130", ">=0", WARNING, "is for CUDA 13, and torch brings CUDA 12",
        "pip install nvidia-dali-cuda120, and uninstall this one", beside=("CUDA", "<13")),
    # Weights, gradients and Adam's moments of 250M parameters in float32 are 4 GB; batches and torch come on top.
    Bad("GiB of memory", "<8", WARNING, "the 250M model with its optimizer alone takes 4 GiB in float32",
        "use a larger machine"),
    # NCCL's ranks of one node talk through it, and so do torch's loader workers; Docker's default is 64 MiB.
    Bad("MiB of /dev/shm", "<1024", WARNING, "ranks of one node and loader workers exchange data through it",
        "start the container with --ipc=host or --shm-size=16g"),
    Bad("open files (ulimit -n)", "<4096", WARNING, "a corpus of many files and many workers need more",
        "ulimit -n 65536, or the container's --ulimit nofile"),
    Bad("KiB of locked memory (ulimit -l)", ">=0", WARNING, "InfiniBand registers much more",
        "ulimit -l unlimited, or the container's --ulimit memlock=-1", beside=("/dev/infiniband", "yes")),
    Bad("--save can be written to", "no", PROBLEM, "a run could not write a checkpoint",
        "name a folder, existing or new, on a disk that you may write to"),
    # Four checkpoints of the 250M model (3.2 GiB each), of which a run keeps three, and some room.
    Bad("GiB free at --save", "<16", WARNING, "three checkpoints of the 250M model and one being written take 16",
        "free some, or lower --keep-last; --dry-run compares with the checkpoints of your own settings"),
    Bad("file system of --save", "tmpfs ramfs overlayfs", WARNING, "is gone with the machine or the container",
        "name a folder on a disk that stays, mounted into the container"),
    Bad("CUDA_LAUNCH_BLOCKING", _ON, WARNING, "waits for every kernel: several times slower", UNSET),
    Bad("PYTORCH_NO_CUDA_MEMORY_CACHING", _ON, WARNING, "asks the driver for every tensor: many times slower", UNSET),
    Bad("TORCH_DISTRIBUTED_DEBUG", "detail", WARNING, "compares every collective between ranks: slow", UNSET),
    Bad("TORCHDYNAMO_DISABLE", _ON, WARNING, "leaves the kernels that torch.compile fuses unfused", UNSET),
    Bad("PYTORCH_JIT", _OFF, WARNING, "leaves the kernels that torch fuses unfused", UNSET),
    Bad("NVIDIA_TF32_OVERRIDE", "1", WARNING, "rounds float32 products to 10 bits", UNSET),
    Bad("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", _ON, WARNING, "rounds float32 products to 10 bits", UNSET),
    Bad("NCCL_P2P_DISABLE", "1", WARNING, "sends what NVLink could carry through the host's memory", UNSET),
    Bad("NCCL_SHM_DISABLE", "1", WARNING, "sends what shared memory could carry through the network", UNSET),
    Bad("NCCL_IB_DISABLE", "1", WARNING, "sends what InfiniBand could carry through TCP", UNSET),
    Bad("TORCH_NCCL_ASYNC_ERROR_HANDLING", _OFF, WARNING, "lets ranks wait for ever when one has died", UNSET),
    Bad("PYTHONOPTIMIZE", ">0", WARNING, "removes every assert, also those that guard tensors' shapes", UNSET),
    Bad("RANK", ">=0", WARNING, "is what a launcher gives to one rank: a command started by hand takes itself for it",
        "unset RANK, WORLD_SIZE and LOCAL_RANK in this shell"),
)  # fmt: skip


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
    facts = machine_facts(save)
    if not (3, 10) <= sys.version_info[:2] <= (3, 13):
        here = f"Python {platform.python_version()}"
        remedy = "activate an environment of one of them, or run bash tools/prepare_environment.sh, which makes .venv"
        yield Finding(PROBLEM, here, f"{sys.executable}; this project needs 3.10 to 3.13", remedy)
        return
    yield Finding(OK, f"Python {platform.python_version()}", sys.executable, "")
    try:
        yield from requirement_findings(facts)
    except ModuleNotFoundError:  # packaging, which everything else needs too
        yield Finding(PROBLEM, "packages", "none of those that training needs is installed", PREPARE)
        return
    probed = run_probe()
    facts.update(*(answer for answer in probed if isinstance(answer, dict)))
    yield from (Finding(*answer) for answer in probed if isinstance(answer, list))
    if save is not None:
        words = f"{facts['GiB free at --save']} GiB free on a file system of kind {facts['file system of --save']}"
        yield Finding(OK, f"--save {save}", words, "")
    yield from known_bad_findings({**os.environ, **facts})
    if gpu_test:
        yield from (Finding(*answer) for answer in run_probe("--gpu-test"))


# --- facts


def machine_facts(save: Path | None) -> dict[str, str]:
    """Return versions and numbers of this machine under the names of KNOWN_BAD, without limits that do not exist."""
    facts = {
        found.metadata["Name"].lower(): found.version
        for found in importlib.metadata.distributions()
        if found.metadata["Name"]
    }
    facts["GiB of memory"] = str(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**30)
    shared = Path("/dev/shm")
    facts["MiB of /dev/shm"] = str(shutil.disk_usage(shared).total // 2**20 if shared.is_dir() else 0)
    facts["/dev/infiniband"] = "yes" if Path("/dev/infiniband").is_dir() else "no"
    limits = {
        "open files (ulimit -n)": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "KiB of locked memory (ulimit -l)": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] // 1024,
    }
    facts.update({name: str(limit) for name, limit in limits.items() if limit >= 0})  # infinity is -1
    if save is not None:
        nearest = save.absolute()
        while not os.path.lexists(nearest):  # a link to nothing does exist, and no folder can be made there
            nearest = nearest.parent
        folder = nearest if nearest.is_dir() else nearest.parent
        writable = folder == nearest and os.access(folder, os.W_OK | os.X_OK)
        kind = subprocess.run(["stat", "-f", "-c", "%T", folder], capture_output=True, text=True, check=False)
        facts["--save can be written to"] = "yes" if writable else "no"
        facts["GiB free at --save"] = str(shutil.disk_usage(folder).free // 2**30)
        facts["file system of --save"] = kind.stdout.strip()
    return facts


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


# --- rules


def requirement_findings(facts: Mapping[str, str]) -> Iterator[Finding]:
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
        version = facts.get(wanted.name.lower())
        if not extras or (version is None and extras[0]):
            continue
        asked = f"{wanted.name}{wanted.specifier}"
        asked = f"the extra {extras[0]} of {PROJECT} asks for {asked}" if extras[0] else f"{PROJECT} asks for {asked}"
        level = WARNING if extras[0] or wanted.name in NOT_FOR_TRAINING else PROBLEM
        if version is None:
            yield Finding(level, wanted.name, f"is not installed; {asked}", PREPARE)
        elif not wanted.specifier.contains(version, prereleases=True):
            yield Finding(level, f"{wanted.name} {version}", f"does not fit: {asked}", PREPARE)


def known_bad_findings(facts: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the lines of the table that describe this environment."""
    for trap in KNOWN_BAD:
        value, (other, others) = facts.get(trap.subject, ""), trap.beside
        if _matches(value, trap.values) and (not other or _matches(facts.get(other, ""), others)):
            yield Finding(trap.level, f"{trap.subject} {value}", trap.why, trap.remedy)


def _matches(value: str, values: str) -> bool:
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion

    if values[0] not in "<>=!":
        return value.lower() in values.split()
    try:
        return bool(value) and SpecifierSet(values).contains(value, prereleases=True)
    except InvalidVersion:  # a variable with a word where numbers are harmful
        return False
