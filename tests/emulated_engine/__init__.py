"""Transformer Engine on a CPU: its own released Python, with its compiled extension replaced by torch.

After `install`, `import transformer_engine.pytorch` loads the package's real sources. So classes, arguments, FP8
recipes, autograd functions and states are those of a GPU run. kernels.py and fp8.py emulate the extension's functions
that this model uses. The emulated device is an H200: compute capability 9.0, and FP8 products in the only layout that
Hopper supports, so that a missing transpose is an error here, too. FP8 numbers are real. Speed, memory, the device's
rounding, user buffers and cuDNN's choice of a backend are not emulated.

Source: transformer-engine-torch 2.11.0 and 2.20.2, csrc/extensions/pybind.cpp (names and order of arguments).
"""

import enum
import importlib
import importlib.machinery
import importlib.util
import itertools
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch.overrides import TorchFunctionMode

from emulated_engine import fp8, kernels
from megatron_neobert.runtime.cpu_backend import on_cpu

# Values of the settings section `compute`.
ENGINE, LOCAL = {"transformer_impl": "transformer_engine"}, {"transformer_impl": "local"}
FP8 = {name: {**ENGINE, "fp8_format": "hybrid", "fp8_recipe": name} for name in ("delayed", "tensorwise", "blockwise")}

GPU, CAPABILITY, CUDA = "NVIDIA H200", (9, 0), "13.0"
SOURCES = Path(sys.prefix) / "transformer_engine_sources"  # created by tools/prepare_environment.sh --dev

needs_sources = pytest.mark.skipif(
    not SOURCES.is_dir(), reason=f"no sources of Transformer Engine in {SOURCES}; see tools/prepare_environment.sh"
)

# Enums that Transformer Engine counts or copies. Of other enums it reads only members.
_ENUMS = {
    "DType": [*fp8.DTYPES, "kFloat4E2M1"],
    # Newer versions do not have the first, and compare their list with this one.
    "NVTE_Fused_Attn_Backend": ["NVTE_F16_max512_seqlen", "NVTE_F16_arbitrary_seqlen", "NVTE_FP8", "NVTE_No_Backend"],
    "FP8FwdTensors": [f"GEMM{n}_{what}" for n in (1, 2, 3) for what in ("INPUT", "WEIGHT", "OUTPUT")],
    "FP8BwdTensors": [f"GRAD_{what}{n}" for n in (1, 2, 3) for what in ("OUTPUT", "INPUT")],
}
_CLASSES = ("CommOverlap", "CommOverlapBase", "CommOverlapCore", "CommOverlapHelper", "CommOverlapP2P", "FP8TensorMeta")


class _Names:
    """An enum of the extension. Each name that Transformer Engine reads becomes a member."""

    def __init__(self) -> None:
        self._values = itertools.count()

    def __getattr__(self, name: str) -> "_Name":
        if name.startswith("_"):
            raise AttributeError(name)
        member = _Name(next(self._values))
        member.name = name
        setattr(self, name, member)
        return member


class _Name(int):
    name: str


class _Extension(types.ModuleType):
    """The module `transformer_engine_torch`."""

    def __init__(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        super().__init__("transformer_engine_torch")
        functions = {**vars(fp8), **vars(kernels)}
        self.__dict__.update(
            (name, wrap(value)) for name, value in functions.items() if isinstance(value, types.FunctionType)
        )
        self.__dict__.update((name, enum.IntEnum(name, members, start=0)) for name, members in _ENUMS.items())
        self.__dict__.update((name, type(name, (), {})) for name in _CLASSES)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Names() if name[0].isupper() else _not_emulated(name)
        setattr(self, name, value)
        return value


def _not_emulated(name: str) -> Callable[..., Any]:
    """Return a function that raises when it is called. Modules refer to more functions than this model calls."""

    def function(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"transformer_engine_torch.{name} has no emulation; write one in kernels.py or fp8.py")

    return function


class _OnCpu(TorchFunctionMode):
    """Replace "cuda" by "cpu" in all calls of torch."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None and (isinstance(device, int) or torch.device(device).type == "cuda"):
            kwargs["device"] = "cpu"
        args = tuple(torch.device("cpu") if isinstance(a, torch.device) and a.type == "cuda" else a for a in args)
        return function(*args, **kwargs)


def _asked_by_transformer_engine(callers: int = 1) -> bool:
    """Return whether the caller of the caller, `callers` levels up, is in Transformer Engine. Only it sees a GPU."""
    return sys._getframe(callers).f_globals.get("__name__", "").startswith("transformer_engine")


def install() -> None:
    """Emulate Transformer Engine in this process. Must be called before the first import of megatron.core."""
    assert not torch.cuda.is_available()
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    properties = types.SimpleNamespace(
        major=CAPABILITY[0], minor=CAPABILITY[1], multi_processor_count=132, name=GPU, total_memory=139 << 30
    )
    cuda: Any = torch.cuda
    cuda.get_device_properties = lambda device=None: properties
    cuda.get_device_capability = lambda device=None: CAPABILITY
    cuda.get_device_name = lambda device=None: GPU
    cuda.is_current_stream_capturing = lambda: False
    cuda.current_stream = lambda device=None: MagicMock()
    torch.version.cuda = CUDA
    cuda.is_available = _asked_by_transformer_engine
    is_cuda = torch._C.TensorBase.is_cuda
    seems_cuda = property(lambda self: _asked_by_transformer_engine(2) or is_cuda.__get__(self))
    torch.Tensor.is_cuda = seems_cuda  # type: ignore[assignment]
    load_package()
    _OnCpu().__enter__()
    torch.empty = on_cpu(torch.empty)  # the mode is not active in backward


def load_package(wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function) -> None:
    """Import `transformer_engine` over the emulated extension. torch must already report a GPU.

    Args:
        wrap: Wraps each function of kernels.py and fp8.py.
    """
    assert "megatron.core" not in sys.modules, "megatron.core looks for Transformer Engine when it is imported"
    if "F16_max512_seqlen" not in (SOURCES / "transformer_engine/pytorch/cpp_extensions/fused_attn.py").read_text():
        _ENUMS["NVTE_Fused_Attn_Backend"].remove("NVTE_F16_max512_seqlen")
    sys.modules["transformer_engine_torch"] = _Extension(wrap)
    if importlib.util.find_spec("triton") is None:  # torch's builds for CPUs do not include it
        importlib.import_module("torch._dynamo")  # before, or it would use the replacement
        # Triton kernels can be defined, and not launched.
        for name in ("triton", "triton.language", "triton.language.core", "triton.language.standard"):
            sys.modules[name] = MagicMock(__path__=[], __version__="3.5.0")
    else:
        os.environ["TRITON_INTERPRET"] = "1"  # before the import, which defines functions
        knobs = importlib.import_module("triton.knobs")
        knobs.runtime.interpret = True  # also in child processes with another environment
    sys.path.insert(0, str(SOURCES))
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # do not load the CUDA libraries
    # The package's __init__ would load compiled libraries, so import its submodules through an empty package first.
    package = types.ModuleType("transformer_engine")
    package.__path__ = [str(SOURCES / "transformer_engine")]
    package.__spec__ = importlib.machinery.ModuleSpec("transformer_engine", None, is_package=True)
    sys.modules["transformer_engine"] = package
    common: Any = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda framework: None
    del sys.modules["transformer_engine"]
    importlib.import_module("transformer_engine").common = common
