"""A faster import of megatron.core, for commands that train or convert.

CPU seconds from the start of a rank to a ready training loop: 6.3 before, 2.5 after (`python -X importtime`, one CPU
core, megatron-core 0.16.1, torch 2.13). The import skips Weights & Biases (2.0 s), which only megatron.core's inference
uses, and TorchInductor (1.8 s), which `torch.compile` loads when it decorates a function. The remaining 2.5 s are
mostly torch (1.2 s), its distributed tensors (0.6 s) and TorchDynamo (0.8 s), which torch's first optimizer loads.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch


def import_megatron() -> None:
    """Import megatron.core without Weights & Biases and TorchInductor. Do nothing if it is already imported."""
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
