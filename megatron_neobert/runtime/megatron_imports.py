"""Imports megatron.core in a third of the time; called first by commands that train or convert.

Measured with `python -X importtime` on one CPU core, megatron-core 0.16.1 and torch 2.13, CPU seconds of a rank's start
from nothing to a ready loop: 6.3 before, 2.5 after. What goes: 2.0 s for Weights & Biases, which only megatron.core's
inference code would use, and 1.8 s for TorchInductor, which `torch.compile` loads as soon as it decorates a function.
The rest is torch (1.2 s) and its distributed tensors (0.6 s). What cannot go: torch's first optimizer loads TorchDynamo
(0.8 s).
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch


def import_megatron() -> None:
    """Makes megatron.core importable at no further cost; a second call does nothing."""
    if "megatron.core" in sys.modules:
        return
    compile_now, had_wandb = torch.compile, "wandb" in sys.modules
    torch.compile = _compile_at_first_call  # type: ignore[assignment]
    if not had_wandb:
        sys.modules["wandb"] = None  # type: ignore[assignment]  # "import wandb" raises ImportError, which is expected
    try:
        import megatron.core.distributed
        import megatron.core.optimizer  # noqa: F401
    finally:
        torch.compile = compile_now
        if not had_wandb:
            del sys.modules["wandb"]


def _compile_at_first_call(function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    """`torch.compile` as a decorator, postponed until the function is called."""
    if function is None:
        return functools.partial(_compile_at_first_call, **options)

    @functools.cache
    def compiled() -> Callable[..., Any]:
        return torch.compile(function, **options)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    return call
