"""Choice of the kernels that compute the model on this machine, with the reasons against others.

`detect_hardware` looks once; the rules are functions of what it found and of the settings. Megatron is not imported
here: it imports any package called apex, and the wrong package of that name has to be refused first.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_neobert.config.rules import FP8_BLOCK, HEAD_WIDTH_MULTIPLE
from megatron_neobert.config.schema import Settings
from megatron_neobert.errors import ConfigError


@dataclass(frozen=True)
class Library:
    """An optional package: its version, or why it cannot serve."""

    version: str | None = None
    why_not: str = "not installed"


@dataclass(frozen=True)
class Hardware:
    """Hardware and packages of this process. The default is a machine without a GPU."""

    gpu: str | None = None
    capability: tuple[int, int] = (0, 0)
    transformer_engine: Library = Library()
    flash_attn: Library = Library()
    apex_weight_gradients: Library = Library()
    apex_optimizers: Library = Library()
    foreign_apex: str | None = None  # version of a package that is called apex and is not NVIDIA's


@dataclass(frozen=True)
class Kernels:
    """Chosen kernels."""

    transformer_impl: str  # "transformer_engine" or "local"
    attention: str  # "transformer_engine", "torch" or "flash_attn"
    attention_backend: str  # the name in Megatron's AttnBackend, with which it steers Transformer Engine
    gradient_accumulation_fusion: bool  # by Apex, in all of Megatron's own linear layers
    summary: str  # a line for the start of a run


@functools.cache
def detect_hardware() -> Hardware:
    """Return what is here; packages for CUDA are tried only where there is CUDA."""
    if not torch.cuda.is_available():
        return Hardware(foreign_apex=_foreign_apex())
    engine = _try_import("transformer_engine.pytorch", distribution="transformer-engine")
    return Hardware(
        gpu=torch.cuda.get_device_name(),
        capability=torch.cuda.get_device_capability(),
        transformer_engine=engine,
        flash_attn=_try_import("flash_attn", distribution="flash-attn"),
        apex_weight_gradients=_try_import("fused_weight_gradient_mlp_cuda", distribution="apex"),
        apex_optimizers=_try_import("apex.optimizers", distribution="apex"),
        foreign_apex=_foreign_apex(),
    )


def fp8_refusals() -> dict[str, str]:
    """Return the FP8 recipes that the installed Transformer Engine cannot run on this GPU, with its reasons."""
    from transformer_engine.pytorch import quantization

    checks = {
        "tensorwise": quantization.check_fp8_support,
        "delayed": quantization.check_fp8_support,
        "blockwise": quantization.check_fp8_block_scaling_support,
        "mxfp8": quantization.check_mxfp8_support,
    }
    answers = {recipe: check() for recipe, check in checks.items()}
    return {recipe: reason for recipe, (is_possible, reason) in answers.items() if not is_possible}


def _try_import(module: str, *, distribution: str) -> Library:
    """Found by importing it: a compiled package that fits another torch is installed and of no use."""
    try:
        importlib.import_module(module)
    except (ImportError, OSError) as error:
        return Library(why_not=f"{module} cannot be imported: {error}")
    return Library(version=_installed_version(distribution) or "of unknown version")


def _installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _foreign_apex() -> str | None:
    """Version of a package called apex without NVIDIA's parts; it is looked at, not imported."""
    found = importlib.util.find_spec("apex")
    if found is None or importlib.util.find_spec("amp_C") is not None:
        return None
    if any((Path(folder) / "optimizers").is_dir() for folder in found.submodule_search_locations or ()):
        return None
    return _installed_version("apex") or "of unknown version"


def choose_kernels(settings: Settings, hardware: Hardware | None = None) -> Kernels:
    """Return the kernels that serve these settings here; `check_hardware` refuses impossible ones."""
    hardware = detect_hardware() if hardware is None else hardware
    compute = settings.compute
    bf16 = settings.training.bf16
    engine = uses_engine(settings, hardware)
    width = settings.model.hidden_size // settings.model.num_attention_heads
    if engine and width % HEAD_WIDTH_MULTIPLE == 0:
        attention = "transformer_engine"
        names = {"auto": "Transformer Engine's choice", "flash": "flash-attn", "fused": "cuDNN"}
        attention_name = names[compute.attention_backend]
    elif compute.attention_backend == "flash":
        attention, attention_name = "flash_attn", f"flash-attn {hardware.flash_attn.version}"
    else:
        attention = "torch"
        attention_name = "torch's packed kernel" if hardware.gpu and bf16 else "torch document by document"
    precision = "bfloat16" if bf16 else "float32"
    if compute.fp8_format is not None:
        precision = f"FP8 {compute.fp8_format} {compute.fp8_recipe}"
    # In the order in which Megatron takes them; torch's through FusedAdam of training/optimizer.py.
    optimizer = "Apex" if hardware.apex_optimizers.version is not None else "torch"
    if hardware.transformer_engine.version is not None:
        optimizer = "Transformer Engine"
    parts = [
        f"Transformer Engine {hardware.transformer_engine.version}" if engine else "local layers",
        f"attention by {attention_name}",
        precision,
        f"Adam by {optimizer}",
    ]
    return Kernels(
        transformer_impl="transformer_engine" if engine else "local",
        attention=attention,
        attention_backend=compute.attention_backend if attention == "transformer_engine" else "auto",
        gradient_accumulation_fusion=hardware.apex_weight_gradients.version is not None,
        summary=f"kernels on {hardware.gpu or 'CPU'}: {', '.join(parts)}",
    )


def uses_engine(settings: Settings, hardware: Hardware) -> bool:
    """True if the layers are Transformer Engine's."""
    if settings.compute.transformer_impl == "auto":
        # In float32 Transformer Engine has no packed attention but one that writes out all scores.
        return settings.training.bf16 and hardware.transformer_engine.version is not None
    return settings.compute.transformer_impl == "transformer_engine"


def engine_attention() -> str | None:
    """Return the name of Transformer Engine's kernel for attention; None before its first call and without it."""
    module = sys.modules.get("transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention")
    chosen: dict[str, Any] = getattr(module, "_attention_backends", {})  # of 2.9 to 2.20
    if chosen.get("use_fused_attention"):
        return f"cuDNN ({chosen['fused_attention_backend']})"
    if chosen.get("use_flash_attention"):
        return f"flash-attn {chosen['flash_attention_backend']}"
    return "unfused" if chosen.get("use_unfused_attention") else None


def check_hardware(settings: Settings, hardware: Hardware | None = None) -> None:
    """Refuse with every reason what was asked for by name and this machine lacks. All ranks find the same."""
    hardware = detect_hardware() if hardware is None else hardware
    foreign_apex = (
        f"The installed package apex {hardware.foreign_apex} is not NVIDIA Apex: it has neither apex.optimizers nor "
        "amp_C. The registry's package of that name is another project, and Megatron would import it. Run `pip "
        "uninstall apex`; NVIDIA's is optional and built from github.com/NVIDIA/apex."
    )
    problems = [
        *([foreign_apex] if hardware.foreign_apex is not None else []),
        *engine_problems(settings, hardware),
        *attention_problems(settings, hardware),
        *precision_problems(settings, hardware),
    ]
    if problems:
        raise ConfigError(problems)


def engine_problems(settings: Settings, hardware: Hardware) -> Iterator[str]:
    """Yield what the settings want of Transformer Engine by name, and how to do without it."""
    compute = settings.compute
    if compute.transformer_impl == "local":
        return  # rules.py refuses the contradictions
    if hardware.gpu is None:
        missing = "this machine has no CUDA device"
    elif hardware.transformer_engine.version is None:
        missing = f"{hardware.transformer_engine.why_not} (pip install 'megatron-neobert[gpu]')"
    else:
        return
    if compute.transformer_impl == "transformer_engine":
        what = "--transformer-impl transformer_engine"
        yield f"{what} needs Transformer Engine: {missing}; use --transformer-impl local."
    if compute.attention_backend == "fused":
        yield f"--attention-backend fused needs Transformer Engine: {missing}; use --attention-backend auto."
    if compute.fp8_format is not None:
        yield f"--fp8-format {compute.fp8_format} needs Transformer Engine: {missing}; leave it out."


def attention_problems(settings: Settings, hardware: Hardware) -> Iterator[str]:
    if settings.compute.attention_backend != "flash":
        return
    if hardware.gpu is None:
        yield "--attention-backend flash needs a CUDA device, and this machine has none; use auto."
    elif hardware.flash_attn.version is None:
        yield (
            f"--attention-backend flash needs the package flash-attn ({hardware.flash_attn.why_not}); install it, or "
            "use auto."
        )


def precision_problems(settings: Settings, hardware: Hardware) -> Iterator[str]:
    if hardware.gpu is None:
        return
    here = f"{hardware.gpu} (compute capability {'.'.join(map(str, hardware.capability))})"
    if settings.training.bf16 and hardware.capability < (8, 0):
        yield (
            f"--bf16 needs compute capability 8.0 or higher for the packed attention kernels, not {here}; use "
            "--no-bf16."
        )
    if settings.compute.fp8_format is None or hardware.transformer_engine.version is None:
        return
    recipe, refusals = settings.compute.fp8_recipe, fp8_refusals()
    if recipe in refusals:
        possible = [name for name in FP8_BLOCK if name not in refusals]
        remedy = f"Use --fp8-recipe {' or '.join(possible)}." if possible else "Leave out --fp8-format."
        yield f"--fp8-recipe {recipe} cannot run on {here}: {refusals[recipe]} {remedy}"


def compiled_on_cuda(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of tensors without graph breaks at its first call on CUDA.

    Eager, each operation of such a function reads and writes all of its tensors; on a GPU that is most of the time that
    a step spends outside matrix products and attention (docs/performance.md). On a CPU compiling gains little. A second
    number of tokens compiles the function once more, for any number (torch's automatic dynamic shapes).
    """

    @functools.cache
    def kernel() -> Callable[..., Any]:
        return torch.compile(function)

    @functools.wraps(function)
    def call(first: torch.Tensor, *others: torch.Tensor) -> Any:
        return (kernel() if first.is_cuda else function)(first, *others)

    return call
