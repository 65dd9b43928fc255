"""What is known to go wrong, as tables: pairs of packages, and environment variables.

A new trap is a new line here, with the remedy, and a case in tests/unit/tools/test_environment_rules.py. Ranges that
setup.py states are not repeated: packages.py reads them there.
"""

from __future__ import annotations

from dataclasses import dataclass

from environment_checks.facts import PROBLEM, WARNING


@dataclass(frozen=True)
class Pair:
    """Versions that do not go together; an empty range is every version. "python" and "cuda" count as packages."""

    first: str
    first_versions: str
    second: str
    second_versions: str
    status: str
    why: str
    remedy: str


PAIRS = (
    # Source: TransformerEngine 2.16 pytorch/module/base.py, set_extra_state.
    Pair(
        "transformer-engine",
        ">=2.16",
        "megatron-core",
        "<0.17",
        WARNING,
        "it refuses the pickled state of --fp8-recipe delayed, so that such a run cannot be resumed",
        "use --fp8-recipe tensorwise or blockwise, or Transformer Engine 2.11.0",
    ),
    Pair(
        "transformer-engine-cu12",
        "",
        "cuda",
        ">=13",
        PROBLEM,
        "its kernels are for CUDA 12, and torch brings CUDA 13",
        "pip uninstall transformer-engine-cu12, and install transformer-engine[core_cu13,pytorch]==2.11.0",
    ),
    Pair(
        "transformer-engine-cu13",
        "",
        "cuda",
        "<13",
        PROBLEM,
        "its kernels are for CUDA 13, and torch brings CUDA 12",
        "pip uninstall transformer-engine-cu13, and install transformer-engine[core_cu12,pytorch]==2.11.0",
    ),
    Pair(
        "nvidia-dali-cuda120",
        "",
        "cuda",
        ">=13",
        WARNING,
        "DALI for CUDA 12 beside torch for CUDA 13",
        "pip install nvidia-dali-cuda130, and uninstall nvidia-dali-cuda120",
    ),
    Pair(
        "nvidia-dali-cuda130",
        "",
        "cuda",
        "<13",
        WARNING,
        "DALI for CUDA 13 beside torch for CUDA 12",
        "pip install nvidia-dali-cuda120, and uninstall nvidia-dali-cuda130",
    ),
)


@dataclass(frozen=True)
class Variable:
    """An environment variable that does harm with one of these values; no values: with any but the harmless ones."""

    name: str
    values: tuple[str, ...]
    status: str
    cost: str
    remedy: str = "unset it"
    harmless: tuple[str, ...] = ("",)

    def is_harmful(self, value: str) -> bool:
        return value.lower() in self.values if self.values else value not in self.harmless


_ON = ("1", "y", "yes", "true", "on")
_OFF = ("0", "n", "no", "false", "off")

VARIABLES = (
    Variable("CUDA_LAUNCH_BLOCKING", _ON, WARNING, "waits for every kernel: several times slower"),
    Variable("PYTORCH_NO_CUDA_MEMORY_CACHING", _ON, WARNING, "asks the driver for every tensor: many times slower"),
    Variable("TORCH_DISTRIBUTED_DEBUG", ("detail",), WARNING, "compares every collective between ranks: slow"),
    Variable("TORCHDYNAMO_DISABLE", _ON, WARNING, "leaves the kernels that torch.compile fuses unfused"),
    Variable("PYTORCH_JIT", _OFF, WARNING, "leaves the kernels that torch fuses unfused"),
    Variable("NVIDIA_TF32_OVERRIDE", ("1",), WARNING, "rounds float32 products to 10 bits"),
    Variable("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", _ON, WARNING, "rounds float32 products to 10 bits"),
    Variable("NCCL_P2P_DISABLE", ("1",), WARNING, "sends what NVLink could carry through the host's memory"),
    Variable("NCCL_SHM_DISABLE", ("1",), WARNING, "sends what shared memory could carry through the network"),
    Variable("NCCL_IB_DISABLE", ("1",), WARNING, "sends what InfiniBand could carry through TCP"),
    Variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", _OFF, WARNING, "lets the other ranks wait for ever when one has died"),
    Variable("NCCL_ASYNC_ERROR_HANDLING", _OFF, WARNING, "lets the other ranks wait for ever when one has died"),
    Variable("NVTE_FUSED_ATTN", ("0",), WARNING, "keeps Transformer Engine from cuDNN's attention, Hopper's fastest"),
    Variable(
        "PYTHONOPTIMIZE",
        (),
        WARNING,
        "removes every assert, also those that guard tensors' shapes",
        harmless=("", "0"),
    ),
    Variable(
        "RANK",
        (),
        WARNING,
        "is what a launcher gives to one rank: a command started by hand takes itself for a part of that run",
        "unset RANK, WORLD_SIZE and LOCAL_RANK in this shell",
    ),
)
