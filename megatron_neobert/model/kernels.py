"""Choice of the kernels that compute the model on this machine.

`detect_hardware` examines the GPU and the packages once. Its result and the settings decide which kernels are chosen.
Only `import_megatron` imports Megatron, because Megatron imports any package named apex, and `check_hardware` has to
refuse a wrong one first.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron_neobert.config.rules import FP8_BLOCK, HEAD_WIDTH_MULTIPLE, graph_obstacle
from megatron_neobert.config.schema import Settings
from megatron_neobert.errors import ConfigError, short_reason

Heads = Iterable[Tensor]  # queries, keys and values, [t, n, d] each
PackedAttention = Callable[..., Tensor]  # attend_with_torch, or a function with its arguments


@dataclass(frozen=True)
class Library:
    """An optional package: its version, or the reason why it cannot be used."""

    version: str | None = None
    problem: str = "not installed"


@dataclass(frozen=True)
class Hardware:
    """GPU and optional packages of this process. The defaults describe a machine without a GPU."""

    gpu: str | None = None
    capability: tuple[int, int] = (0, 0)
    transformer_engine: Library = Library()
    flash_attn: Library = Library()
    apex_weight_gradients: Library = Library()
    foreign_apex: str | None = None  # version of a package named apex that is not NVIDIA's


@dataclass(frozen=True)
class Kernels:
    """Kernels chosen for a run."""

    transformer_impl: str  # "transformer_engine" or "local"
    attention: str  # "transformer_engine" or "torch"
    attention_backend: str  # member of Megatron's AttnBackend, which selects Transformer Engine's kernel
    gradient_accumulation_fusion: bool  # by Apex, in all linear layers of megatron.core
    summary: str  # line for the log of a run


@functools.cache
def detect_hardware() -> Hardware:
    """Return the GPU and the optional packages of this process.

    With CUDA, import the packages and record failed imports.
    """
    if not torch.cuda.is_available():
        return Hardware(foreign_apex=_foreign_apex())
    capability = torch.cuda.get_device_capability()
    return Hardware(
        gpu=torch.cuda.get_device_name(),
        capability=capability,
        transformer_engine=_try_import("transformer_engine.pytorch", distribution="transformer-engine"),
        flash_attn=_find_flash_attention(capability),
        apex_weight_gradients=_try_import("fused_weight_gradient_mlp_cuda", distribution="apex"),
        foreign_apex=_foreign_apex(),
    )


def fp8_refusals() -> dict[str, str]:
    """Return {recipe: reason} for FP8 recipes that cannot run on this GPU. Transformer Engine must be installed."""
    from transformer_engine.pytorch import quantization

    checks = {
        "tensorwise": quantization.check_fp8_support,
        "delayed": quantization.check_fp8_support,
        "blockwise": quantization.check_fp8_block_scaling_support,
        "mxfp8": quantization.check_mxfp8_support,
    }
    results = {recipe: check() for recipe, check in checks.items()}
    return {recipe: reason for recipe, (is_possible, reason) in results.items() if not is_possible}


def _try_import(module: str, *, distribution: str) -> Library:
    # A package may be installed and fail to import, because it was built for another torch. It can raise any exception.
    try:
        importlib.import_module(module)
    except Exception as error:
        return Library(problem=f"{module} cannot be imported: {error}")
    return Library(version=_installed_version(distribution))


def _find_flash_attention(capability: tuple[int, int]) -> Library:
    """Find flash-attn for Transformer Engine or, if it is missing and the GPU is recent enough, flash-attn-4."""
    found = _try_import("flash_attn.flash_attn_interface", distribution="flash-attn")
    if found.version or capability < (9, 0):
        return found
    newer = _try_import("flash_attn.cute.interface", distribution="flash-attn-4")
    return newer if newer.version else found


def _installed_version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _foreign_apex() -> str | None:
    """Return the version of an installed package apex that is not NVIDIA's, or None. The package is not imported."""
    spec = importlib.util.find_spec("apex")
    if spec is None or importlib.util.find_spec("amp_C") is not None:
        return None
    if any((Path(folder) / "optimizers").is_dir() for folder in spec.submodule_search_locations or ()):
        return None
    return _installed_version("apex")


def choose_kernels(settings: Settings, hardware: Hardware | None = None) -> Kernels:
    """Choose kernels for settings that `check_hardware` has accepted. If `hardware` is None, examine this machine.

    For torch's attention in bfloat16 on a GPU, `choose_packed_attention` runs a kernel as a test.
    """
    hardware = hardware or detect_hardware()
    compute, bf16 = settings.compute, settings.training.bf16
    engine = compute.transformer_impl == "transformer_engine"
    if compute.transformer_impl == "auto":
        # Transformer Engine's only packed attention in float32 stores all scores.
        engine = bf16 and hardware.transformer_engine.version is not None
    width = settings.model.hidden_size // settings.model.num_attention_heads
    if engine and width % HEAD_WIDTH_MULTIPLE == 0:
        attention = "transformer_engine"
        names = {"auto": "Transformer Engine's choice", "flash": "FlashAttention", "fused": "cuDNN"}
        attention_name = names[compute.attention_backend]
    else:
        attention, attention_name = "torch", "torch, one document at a time"
        if hardware.gpu and bf16:
            _, attention_name = choose_packed_attention(width + -width % HEAD_WIDTH_MULTIPLE)
    precision = "bfloat16" if bf16 else "float32"
    if compute.fp8_format is not None:
        precision = f"FP8 {compute.fp8_format} {compute.fp8_recipe}"
    obstacle = graph_obstacle(settings, on_cuda=hardware.gpu is not None)
    launch = "; one CUDA graph per step" if obstacle is None else f"; no CUDA graph ({obstacle})"
    layers = f"Transformer Engine {hardware.transformer_engine.version}" if engine else "local layers"
    return Kernels(
        transformer_impl="transformer_engine" if engine else "local",
        attention=attention,
        attention_backend=compute.attention_backend if attention == "transformer_engine" else "auto",
        gradient_accumulation_fusion=hardware.apex_weight_gradients.version is not None,
        summary=f"kernels on {hardware.gpu or 'the CPU'} in {precision}: {layers}; attention by {attention_name}"
        + (launch if hardware.gpu else ""),
    )


@functools.cache
def choose_packed_attention(width: int) -> tuple[PackedAttention, str]:
    """Return a kernel, and the kernel's name, for packed attention in bfloat16 with `width` channels per head.

    The kernel is FlashAttention 4 if the package flash-attn-4 is installed, and if its context and gradients agree with
    fp32 attention on the current CUDA device. Otherwise the kernel is torch's FlashAttention 2. If flash-attn-4 is
    installed but does not work, the name includes the reason.
    """
    failure = ""
    try:
        importlib.import_module("flash_attn.cute.interface")  # before the check allocates memory of the GPU
        _check_packed_attention(attend_with_flash_attention_4, width)
        return attend_with_flash_attention_4, "FlashAttention 4"
    except ModuleNotFoundError:  # flash-attn 2 has a copy of this module, without the packages that the module imports
        pass
    except Exception as error:  # the package is a beta version, whose kernels are compiled at the first call
        failure = f"; FlashAttention 4 is installed and does not work here ({short_reason(error)})"
    return attend_with_torch, f"torch's packed kernel, FlashAttention 2{failure}"


def attend_with_torch(heads: Heads, cu_seqlens_n: Tensor, max_seqlen: int, *, scale: float, is_causal: bool) -> Tensor:
    """Return the context, [t, n, d], from torch's packed kernel. Needs CUDA, bfloat16, and d divisible by 8."""
    # Only CUDA needs this import, and some builds of torch do not have the module.
    from torch.nn.attention.varlen import varlen_attn

    arguments: Any = (*heads, cu_seqlens_n, cu_seqlens_n, max_seqlen, max_seqlen)
    window = (-1, 0) if is_causal else (-1, -1)  # tokens before and after the query; -1: all
    context_tnd: Any = varlen_attn(*arguments, scale=scale, window_size=window)
    return context_tnd


def attend_with_flash_attention_4(
    heads: Heads, cu_seqlens_n: Tensor, max_seqlen: int, *, scale: float, is_causal: bool
) -> Tensor:
    """Return the context, [t, n, d], from flash-attn-4. Raises ModuleNotFoundError if that package is missing."""
    from flash_attn.cute.interface import flash_attn_varlen_func

    context_tnd, _ = flash_attn_varlen_func(
        *heads,
        cu_seqlens_q=cu_seqlens_n,
        cu_seqlens_k=cu_seqlens_n,
        max_seqlen_q=max_seqlen,
        max_seqlen_k=max_seqlen,
        softmax_scale=scale,
        causal=is_causal,
    )
    return context_tnd


def _check_packed_attention(attend: PackedAttention, width: int) -> None:
    """Raise AssertionError if a packed kernel's context or gradients differ from fp32 for two small documents."""
    # On the CPU, because the state of the GPU's generator belongs to the run.
    numbers = torch.randn(3, 256, 2, width, generator=torch.Generator().manual_seed(0))
    heads = numbers.to(device="cuda", dtype=torch.bfloat16).requires_grad_()
    cu_seqlens_n = torch.tensor([0, 128, 256], dtype=torch.int32, device="cuda")
    for is_causal in (False, True):
        context: Any = attend(heads, cu_seqlens_n, 128, scale=width**-0.5, is_causal=is_causal)
        query, key, value = heads.float().unflatten(1, (2, 128)).transpose(2, 3)
        exact = scaled_dot_product_attention(query, key, value, is_causal=is_causal).transpose(1, 2).flatten(0, 1)
        gradients = [torch.autograd.grad(tensor.float().square().sum(), heads)[0] for tensor in (context, exact)]
        for actual, expected in ((context, exact), gradients):
            # On a CPU in bf16, contexts differ by 0.008, and gradients by 0.021 more than rtol allows; without bounds
            # between the documents, by 0.64 and 3.6.
            torch.testing.assert_close(actual.float(), expected.float(), rtol=5e-2, atol=5e-2)


def engine_attention() -> str | None:
    """Return the attention kernel that Transformer Engine chose, like "flash-attn 2.8.3"; None before its first use."""
    module = sys.modules.get("transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention")
    chosen: dict[str, Any] = getattr(module, "_attention_backends", {})  # in Transformer Engine 2.9 to 2.20
    if chosen.get("use_fused_attention"):
        return f"cuDNN ({chosen['fused_attention_backend']})"
    if chosen.get("use_flash_attention"):
        return f"flash-attn {chosen['flash_attention_backend']}"
    return "unfused" if chosen.get("use_unfused_attention") else None


def check_hardware(settings: Settings, hardware: Hardware | None = None) -> None:
    """Raise ConfigError with all reasons why this machine cannot run the settings. All ranks find the same reasons."""
    hardware, problems = hardware or detect_hardware(), list[str]()
    compute, backend = settings.compute, settings.compute.attention_backend
    if hardware.foreign_apex is not None:
        problems.append(
            f"The installed package apex {hardware.foreign_apex} is not NVIDIA Apex: it has neither apex.optimizers "
            "nor amp_C, and Megatron would import it. Run `pip uninstall apex`; NVIDIA's is optional and built from "
            "github.com/NVIDIA/apex."
        )
    engine_problem = ""
    if hardware.gpu is None:
        engine_problem = "this machine has no CUDA device"
    elif hardware.transformer_engine.version is None:
        engine_problem = f"{hardware.transformer_engine.problem} (pip install 'megatron-neobert[gpu]')"
    # config/rules.py refuses --transformer-impl local together with the other two settings.
    if engine_problem and compute.transformer_impl != "local":
        for name, default, remedy in (
            ("transformer_impl", "auto", "use --transformer-impl local"),
            ("attention_backend", "auto", "use --attention-backend auto"),
            ("fp8_format", None, "leave it out"),
        ):
            if (value := getattr(compute, name)) != default:
                flag = f"--{name.replace('_', '-')} {value}"
                problems.append(f"{flag} needs Transformer Engine: {engine_problem}; {remedy}.")
    if backend == "flash" and not engine_problem and hardware.flash_attn.version is None:
        problems.append(
            "--attention-backend flash needs flash-attn, or from compute capability 9.0 on flash-attn-4 "
            f"({hardware.flash_attn.problem}); install one, or use auto."
        )
    if hardware.gpu is None and compute.cuda_graph_impl == "full_iteration":
        problems.append("--cuda-graph-impl full_iteration needs a CUDA device; use --cuda-graph-impl auto.")
    gpu = f"{hardware.gpu} (compute capability {'.'.join(map(str, hardware.capability))})"
    if hardware.gpu and settings.training.bf16 and hardware.capability < (8, 0):
        problems.append(
            f"--bf16 needs compute capability 8.0 or higher for the packed attention kernels, not {gpu}; use --no-bf16."
        )
    if compute.fp8_format is not None and not engine_problem:
        recipe, refusals = compute.fp8_recipe, fp8_refusals()
        if recipe in refusals:
            possible = [name for name in FP8_BLOCK if name not in refusals]
            remedy = f"Use --fp8-recipe {' or '.join(possible)}." if possible else "Leave out --fp8-format."
            problems.append(f"--fp8-recipe {recipe} cannot run on {gpu}: {refusals[recipe]} {remedy}")
    if problems:
        raise ConfigError(problems)


# ---- import and compilation


def import_megatron() -> None:
    """Import megatron.core without Weights & Biases and TorchInductor. Do nothing if it is already imported.

    A rank is ready to train after 2.5 instead of 6.3 CPU seconds (`python -X importtime`, one core, megatron-core
    0.16.1, torch 2.13). Only megatron.core's inference uses Weights & Biases (2.0 s), and `torch.compile` loads
    TorchInductor (1.8 s) when it decorates a function. The rest is mostly torch (1.2 s), its distributed tensors
    (0.6 s) and TorchDynamo (0.8 s), which torch's first optimizer loads.
    """
    if "megatron.core" in sys.modules:
        return
    original_compile = torch.compile
    torch.compile = compile_at_first_call  # type: ignore[assignment]
    if "wandb" not in sys.modules:
        # "import wandb" now raises ImportError, which megatron.core catches.
        sys.modules["wandb"] = None  # type: ignore[assignment]
    try:
        import megatron.core.distributed
        import megatron.core.optimizer  # noqa: F401
    finally:
        torch.compile = original_compile
        if sys.modules["wandb"] is None:
            del sys.modules["wandb"]


def compile_at_first_call(function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    """Decorate a function like `torch.compile`, with or without options, but compile it only at its first call."""
    if function is None:
        return functools.partial(compile_at_first_call, **options)

    @functools.cache
    def compiled() -> Callable[..., Any]:
        return torch.compile(function, **options)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    return call


def compiled_on_cuda(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function of tensors. At the first call on CUDA, `torch.compile` compiles the function.

    The device of the first argument decides; on CPU the function runs eagerly. All arguments are positional. A call
    with another number of tokens compiles the function a second time, for all numbers (torch's automatic dynamic
    shapes).
    """

    # Without compilation, each operation reads and writes whole tensors. On a GPU that is most of the step's time
    # outside matrix products and attention (docs/performance.md).
    compiled = compile_at_first_call(function)

    @functools.wraps(function)
    def call(first: torch.Tensor, *rest: torch.Tensor) -> Any:
        return (compiled if first.is_cuda else function)(first, *rest)

    return call
