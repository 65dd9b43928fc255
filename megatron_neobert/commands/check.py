"""The commands `neobert check environment` (can this machine train?) and `check parity` (are the models the same?).

`check environment` needs no package. Everything that imports torch runs in another process, because a compiled library
that does not match torch can kill it. `check parity` takes half a minute on one core and 4 GB of memory for 28 x 768.
"""

import importlib
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_neobert.cli import option
from megatron_neobert.errors import EXIT_UNAVAILABLE, ConfigError
from megatron_neobert.runtime.environment import installed_packages

if TYPE_CHECKING:  # --help must not import torch
    from checkpoint_conversion.compare import Comparison

PROJECT = "megatron-neobert"
# Timeout of the process that imports torch, which takes a minute from a cold network file system.
PROBE_SECONDS = 300
PREPARE = "run bash tools/prepare_environment.sh, which installs the tested versions of constraints.txt"
# Distribution -> module. These are compiled for one torch, so an installed one can fail to import.
COMPILED = {
    "megatron-core": "megatron.core",
    "transformer-engine": "transformer_engine.pytorch",
    "flash-attn": "flash_attn.flash_attn_interface",
}


class Finding(NamedTuple):
    """One line of the report. A finding with a remedy is a problem."""

    subject: str
    detail: str
    remedy: str = ""


@dataclass(frozen=True)
class EnvironmentOptions:
    save: Path | None = option(None, "also check whether a run can save checkpoints to this folder", metavar="DIR")


def check_environment(options: EnvironmentOptions) -> int:
    """Check whether this machine can train, and report packages, kernels and the folder for checkpoints.

    Return 0 if training can start; otherwise 69.
    """
    can_train = show(package_findings())
    if can_train:  # otherwise the other process would only repeat the problem
        command, code, failure = [sys.executable, "-m", __spec__.name if __spec__ else __name__], 1, ""
        sys.stdout.flush()
        try:
            code = subprocess.run(command, stderr=subprocess.DEVNULL, timeout=PROBE_SECONDS, check=False).returncode
        except subprocess.TimeoutExpired:
            failure = f"no answer after {PROBE_SECONDS} s"
        if code < 0:
            failure = f"the process was ended by {signal.Signals(-code).name}"
        if failure:
            remedy = (
                "install the torch version of constraints.txt, built for this machine; for a GPU, see nvidia-smi -q"
            )
            show([Finding("torch", failure, remedy)])
        can_train = code == 0
    if options.save is not None:
        can_train = show(folder_findings(options.save)) and can_train
    print(f"Training {'can' if can_train else 'cannot'} start. For a bug report: python -m torch.utils.collect_env")
    return 0 if can_train else EXIT_UNAVAILABLE


def show(findings: Iterable[Finding]) -> bool:
    """Print the findings, and return True if none of them is a problem."""
    has_problem = False
    for subject, detail, remedy in findings:
        has_problem = has_problem or bool(remedy)
        print(f"{'problem' if remedy else 'ok':<8}{subject}: {detail}")
        if remedy:
            print(f"        -> {remedy}")
    return not has_problem


def package_findings() -> Iterator[Finding]:
    """Yield the version of Python, and a problem for each package that is missing or has an unsuitable version."""
    yield Finding(f"Python {platform.python_version()}", sys.executable)
    try:
        from packaging.requirements import Requirement
        from packaging.utils import canonicalize_name

        requirements = [Requirement(line) for line in importlib.metadata.requires(PROJECT) or ()]
    except (ModuleNotFoundError, importlib.metadata.PackageNotFoundError):
        yield Finding("packages", f"{PROJECT} or its requirements are not installed for {sys.executable}", PREPARE)
        return
    installed = installed_packages()
    for package in requirements:
        version = installed.get(canonicalize_name(package.name), "")
        if package.marker is not None and not package.marker.evaluate({"extra": ""}):
            continue
        if not version or not package.specifier.contains(version, prereleases=True):
            rule = f"{PROJECT} needs {package.name}{package.specifier}"
            yield Finding(f"{package.name} {version or 'is not installed'}", rule, PREPARE)


def folder_findings(save: Path) -> Iterator[Finding]:
    """Yield the free space of a folder, which may not exist yet, or a problem if a run cannot write there."""
    nearest = save.absolute()
    while not os.path.lexists(nearest):  # True for a broken link, below which no folder can be created
        nearest = nearest.parent
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        remedy = "give a folder, existing or new, on a disk that you can write to"
        yield Finding(f"--save {save}", f"a run cannot save checkpoints below {nearest}", remedy)
    else:
        yield Finding(f"--save {save}", f"{shutil.disk_usage(nearest).free // 2**30} GiB free")


def torch_findings() -> Iterator[Finding]:
    """Yield findings about torch and its GPUs, about each compiled package, and about the kernels for each precision.

    A broken torch can raise any exception.
    """
    import torch

    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    yield Finding(f"torch {torch.__version__}", f"{cuda}; {', '.join(devices) or 'no GPU'}")
    if not devices and shutil.which("nvidia-smi"):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
        if listed:
            remedy = "install a driver and a torch for the same CUDA, and look at CUDA_VISIBLE_DEVICES"
            yield Finding("GPU", f"nvidia-smi lists {listed.partition(' (')[0]}, but torch cannot use it", remedy)
    for package, module in COMPILED.items():
        try:
            version = importlib.metadata.version(package)
            importlib.import_module(module)
        except importlib.metadata.PackageNotFoundError:
            continue
        except Exception as error:  # a broken package can raise any exception
            detail = f"is installed but cannot be imported: {type(error).__name__}: {error}"
            remedy = f"install it again for this Python and torch, or pip uninstall {package} if you do not need it"
            yield Finding(f"{package} {version}", detail, remedy)
        else:
            yield Finding(f"{package} {version}", f"{module} can be imported")
    from megatron_neobert.config.schema import Settings
    from megatron_neobert.model.kernels import check_hardware, choose_kernels

    bf16 = Settings().with_section("training", bf16=True)
    fp8 = bf16.with_section("compute", fp8_format="hybrid")
    for name, settings in {"float32": Settings(), "bfloat16": bf16, "FP8": fp8}.items():
        try:
            check_hardware(settings)
            yield Finding(name, choose_kernels(settings).summary.split(": ", 1)[1])
        except ConfigError as error:
            reason = f"not supported: {' '.join(error.problems)}" if devices else "needs a GPU and Transformer Engine"
            yield Finding(name, reason, PREPARE if name == "float32" else "")


# --- parity


@dataclass(frozen=True, kw_only=True)
class ParityOptions:
    num_layers: int = option(28, "layers of the compared model", minimum=1)
    hidden_size: int = option(768, "hidden size", minimum=1)
    num_attention_heads: int = option(12, "attention heads", minimum=1)
    vocab_size: int = option(30522, "size of the vocabulary", minimum=1)
    step: bool = option(False, "also compare loss and gradients of a training step, with every kernel")
    json: Path | None = option(None, "also write the figures to this file", metavar="FILE")


def check_parity(options: ParityOptions) -> int:
    """Compare the Megatron model with the reference and the exported models: exit 0 if all agree, else 1.

    Models agree if their differences are within tolerance. All weights are random. If a deliberately wrong model is not
    detected, the exit code is also 1. With `options.step`, a training step is compared too; kernels that cannot run
    here are printed and do not count. The differences are printed, and written to the file `options.json` if it is
    given. Raise ConfigError if the heads do not divide the hidden size into even widths.
    """
    from megatron_neobert.config.rules import find_record_problems
    from megatron_neobert.config.schema import ModelConfig, Settings
    from megatron_neobert.runtime.atomic_files import replace_file

    settings = Settings(
        model=ModelConfig(
            num_layers=options.num_layers,
            hidden_size=options.hidden_size,
            num_attention_heads=options.num_attention_heads,
        )
    )
    if problems := find_record_problems(settings):
        raise ConfigError(problems)

    # Imported here, because torch takes seconds.
    from checkpoint_conversion.compare import to_table
    from checkpoint_conversion.parity import CONTROL, LENGTHS, measure_parity, measure_steps

    comparisons: dict[str, Comparison] = {}
    unexpected = []
    for name, comparison, tolerance in measure_parity(settings, vocab_size=options.vocab_size):
        comparisons[name] = comparison
        # A control must differ by more than 100 times the tolerance of the others.
        is_control = name.startswith(CONTROL)
        if comparison.within(100 * tolerance if is_control else tolerance) == is_control:
            unexpected.append(name)
    print(f"logits, compared with the padded reference:\n{to_table(comparisons)}")
    figures: dict[str, Any] = {name: asdict(comparison) for name, comparison in comparisons.items()}
    if options.step:
        figures |= {"step": {}, "not run": {}}
        columns = "relative loss, 1 - cosine of the gradient, tensor"
        print(f"\na step of {sum(LENGTHS):,} tokens, compared with the reference in fp32 on the CPU ({columns}):")
        for name, gap, step_tolerance in measure_steps(settings, vocab_size=options.vocab_size):
            if isinstance(gap, str):
                figures["not run"][name] = gap
                print(f"{name}: not run: {gap}")
                continue
            figures["step"][name] = asdict(gap)
            is_control = name.startswith(CONTROL)
            if gap.within(100 if is_control else 1, step_tolerance) == is_control:
                unexpected.append(name)
            print(f"{name:<42} {gap.loss:8.1e} {gap.gradient:8.1e}  {gap.tensor}", flush=True)
    if options.json is not None:
        replace_file(options.json, json.dumps(figures, indent=2) + "\n")
    print(f"NOT as expected: {', '.join(unexpected)}" if unexpected else "as expected, including the controls")
    return 1 if unexpected else 0


if __name__ == "__main__":
    try:
        can_train = show(torch_findings())
    except Exception as error:
        can_train = show([Finding("torch", f"cannot be used: {type(error).__name__}: {error}", PREPARE)])
    sys.exit(not can_train)
