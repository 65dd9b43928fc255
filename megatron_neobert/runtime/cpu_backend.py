"""Patches that let megatron.core run on CPU tensors over gloo. With CUDA, nothing is patched.

megatron.core uses the device "cuda" literally in a few dozen places. `install` redirects these places and no others:
operations get no slower, and our own code still fails if it uses a wrong device. Data parallelism, distributed
optimizer, schedules and checkpoints are the code of a GPU run.
"""

import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

# Modules of megatron.core 0.16.1 that create tensors with the literal device="cuda".
_MODULES_THAT_NAME_CUDA = (
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.utils",
)


def install() -> None:
    """Patch torch so that megatron.core runs on the CPU. Do nothing if CUDA is present, or if called again."""
    if torch.cuda.is_available() or torch.cuda.current_device is _current_device:
        return
    torch.cuda.current_device = _current_device  # type: ignore[assignment]
    # CPU operations run in call order and have finished when they return, so there is nothing to wait for.
    torch.cuda.synchronize = lambda device=None: None
    stream: Any = types.SimpleNamespace(wait_stream=lambda stream: None, wait_event=lambda event: None)
    torch.cuda.current_stream = lambda device=None: stream
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    # Megatron stores CUDA random states per group of ranks. On CPU they are empty.
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    torch.cuda.get_rng_state = random._get_cuda_rng_state = lambda *args, **kwargs: torch.empty(0, dtype=torch.uint8)
    random._set_cuda_rng_state = lambda *args, **kwargs: None
    # Megatron's optimizers expect CUDA types, such as "torch.cuda.FloatTensor".
    original_type = torch.Tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original_type(self, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if isinstance(result, str) and caller.startswith("megatron.core.optimizer"):
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    torch.Tensor.type = type_name  # type: ignore[assignment,method-assign]
    # torch's Muon orthogonalizes in bfloat16, which is 16 times slower than float32 on CPUs with AVX2.
    muon: Any = importlib.import_module("torch.optim._muon")
    newton_schulz = muon._zeropower_via_newtonschulz
    muon._zeropower_via_newtonschulz = lambda grad, *args: newton_schulz(grad.as_subclass(_StaysFloat32), *args)
    # A copy of torch whose factories replace "cuda" by "cpu".
    namespace = types.ModuleType("torch")
    namespace.__dict__.update(torch.__dict__)
    for name in ("tensor", "zeros", "ones", "empty", "full"):
        setattr(namespace, name, on_cpu(getattr(torch, name)))
    for name in _MODULES_THAT_NAME_CUDA:
        module: Any = importlib.import_module(name)
        assert module.torch is torch, f"{name} no longer has a global named torch; adapt _MODULES_THAT_NAME_CUDA"
        module.torch = namespace


def _current_device() -> torch.device:
    # torch returns an index, but every caller in megatron.core passes the result as `device=`.
    return torch.device("cpu")


def on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a function that creates tensors, such as `torch.empty`. The wrapper replaces the device "cuda" by "cpu"."""

    def build(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return factory(*args, device="cpu" if device == "cuda" else device, **kwargs)

    return build


class _StaysFloat32(torch.Tensor):
    def bfloat16(self) -> torch.Tensor:
        # A copy, because the caller divides the result in place.
        return self.as_subclass(torch.Tensor).float().clone()
