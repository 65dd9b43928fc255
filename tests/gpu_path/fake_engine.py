"""Transformer Engine on fake CUDA tensors: its own Python, over the functions of tests/emulated_engine.

What a real kernel decides on the device, as whether an update is skipped, is answered here in its place.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import emulated_engine
import torch
from census import Census
from emulated_engine import kernels
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Kernel(TorchDispatchMode):
    """Answers what a kernel would ask the device for its own use, which is no wait of the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answers = {"aten._local_scalar_dense.default": 0, "aten.equal.default": True}
        return answers[str(func)] if str(func) in answers else func(*args, **(kwargs or {}))


def attend(q: Tensor, k: Tensor, v: Tensor, call: Any) -> Tensor:
    """In place of attention: a function of the same tensors with a result of the same shape."""
    return q * k * v


def install(census: Census, device: torch.device) -> None:
    """Lets `import transformer_engine.pytorch` succeed, its kernels run inside the census of the step."""

    def as_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            with census.inside_kernel(), device, Kernel():
                return function(*args, **options)

        return call

    kernels._attend = attend
    emulated_engine.load_package(as_kernel)
    attention = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention.utils")
    choose = attention.get_attention_backend  # it compares the class of the queries, which is that of fake tensors
    attention.get_attention_backend = lambda params: choose(dataclasses.replace(params, qkv_type=Tensor))
