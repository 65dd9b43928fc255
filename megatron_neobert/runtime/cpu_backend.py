"""Lets megatron.core run on CPU tensors over gloo; does nothing where CUDA is present.

megatron.core names the device "cuda" in a few dozen places. They are redirected one by one, when `install` is
called, and not by a hook on every operation: the cost per operation is zero, and a device mistake in our own code
still shows. What runs afterwards is the code of a GPU run: the same data parallelism, distributed optimizer,
schedules and checkpoints.
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
    """Redirects CUDA calls of megatron.core to the CPU; a second call, or CUDA, makes it do nothing."""
    if torch.cuda.is_available() or torch.cuda.current_device is _current_device:
        return
    torch.cuda.current_device = _current_device  # type: ignore[assignment]
    torch.cuda.synchronize = lambda device=None: None  # CPU operations have finished when they return
    ordered: Any = types.SimpleNamespace(wait_stream=lambda stream: None, wait_event=lambda event: None)
    torch.cuda.current_stream = lambda device=None: ordered  # they run in the order of their calls
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    # Megatron keeps states of CUDA's random numbers for each group of ranks; there are none here.
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    torch.cuda.get_rng_state = random._get_cuda_rng_state = lambda *args, **kwargs: torch.empty(0, dtype=torch.uint8)
    random._set_cuda_rng_state = lambda *args, **kwargs: None
    _name_tensor_types_as_cuda()
    _orthogonalize_in_float32()
    namespace = types.ModuleType("torch")  # a copy, whose factories take "cuda" for "cpu"
    namespace.__dict__.update(torch.__dict__)
    for name in ("tensor", "zeros", "ones", "empty", "full"):
        setattr(namespace, name, _on_cpu(getattr(torch, name)))
    for name in _MODULES_THAT_NAME_CUDA:
        module: Any = importlib.import_module(name)
        assert module.torch is torch, f"{name} no longer imports torch by that name; look what its megatron.core does"
        module.torch = namespace


def _current_device() -> torch.device:
    """Every caller in megatron.core hands the answer on as `device=`."""
    return torch.device("cpu")


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def build(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return factory(*args, device="cpu" if device == "cuda" else device, **kwargs)

    return build


def _name_tensor_types_as_cuda() -> None:
    """megatron.core's optimizers sort parameters by `param.type()`, "torch.cuda.FloatTensor" and the like."""
    original = torch.Tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if isinstance(answer, str) and caller.startswith("megatron.core.optimizer"):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    torch.Tensor.type = type_name  # type: ignore[assignment,method-assign]


class _StaysFloat32(torch.Tensor):
    def bfloat16(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).float().clone()  # which the caller divides in place


def _orthogonalize_in_float32() -> None:
    """torch's Muon orthogonalizes in bfloat16, for which most CPUs have no instructions: 16 times slower on AVX2."""
    muon: Any = importlib.import_module("torch.optim._muon")
    newton_schulz = muon._zeropower_via_newtonschulz
    muon._zeropower_via_newtonschulz = lambda grad, *args: newton_schulz(grad.as_subclass(_StaysFloat32), *args)
