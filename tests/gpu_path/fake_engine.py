"""Transformer Engine on fake CUDA tensors: its own Python, and of each function of its extension the bytes it moves.

The functions are those of tests/emulated_engine, run for their shapes and checks. Each counts as one kernel, which
reads what its emulation touches and writes what that changes and returns. What a real kernel decides on the device, as
whether an update is skipped, is answered here in its place.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import emulated_engine
import torch
from census import Census, changed_by, storage_of, tensors_of
from emulated_engine import kernels
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

OVERWRITING = ("aten.copy_.default", "aten.fill_.Scalar", "aten.zero_.default")


class Kernel(TorchDispatchMode):
    """Which tensors from outside a function reads and writes, by their storages: views come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[tuple[int, int], Tensor] = {}
        self.written: dict[tuple[int, int], Tensor] = {}
        self.made: dict[int, Tensor] = {}  # in the device's memory only if it is a result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = str(func), kwargs or {}
        if name == "aten._local_scalar_dense.default":
            return 0
        if name == "aten.equal.default":
            return True
        result = func(*args, **kwargs)
        changed = {storage_of(tensor) for tensor in changed_by(func, args)}
        results = {storage_of(tensor): tensor for tensor in tensors_of(result)}
        for tensor in tensors_of((args, kwargs)):
            storage = storage_of(tensor)
            is_view = storage in results and storage not in changed
            results.pop(storage, None)
            if storage in self.made or is_view:
                continue
            if storage in changed:
                keep_largest(self.written, tensor)
            if storage not in changed or name not in OVERWRITING:
                keep_largest(self.read, tensor)
        self.made.update(results)
        return result


def keep_largest(tensors: dict[tuple[int, int], Tensor], tensor: Tensor) -> None:
    """Of views that begin at the same place; others are other parts of a buffer."""
    begin = storage_of(tensor), tensor.storage_offset() * tensor.itemsize
    if begin not in tensors or tensors[begin].nbytes < tensor.nbytes:
        tensors[begin] = tensor


def attend(q: Tensor, k: Tensor, v: Tensor, call: Any) -> Tensor:
    """In place of attention: a function of the same tensors with a result of the same shape."""
    return q * k * v


def install(census: Census, device: torch.device) -> None:
    """Lets `import transformer_engine.pytorch` succeed, its kernels noted in the census of the step."""

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            kernel = Kernel()
            with census.inside_kernel(), device, kernel:
                result = function(*args, **options)
            if function.__name__.startswith("fused_attn_"):  # backward also reads what `attend` has no use for
                for tensor in tensors_of((args, options)):
                    keep_largest(kernel.read, tensor)
            returned = {
                storage_of(tensor): tensor for tensor in tensors_of(result) if storage_of(tensor) in kernel.made
            }
            if kernel.read or kernel.written:
                census.note_kernel(
                    function.__name__, [*kernel.read.values()], [*kernel.written.values(), *returned.values()]
                )
            return result

        return call

    kernels._attend = attend
    emulated_engine.load_package(counted)
    attention = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention.utils")
    choose = attention.get_attention_backend  # it compares the class of the queries, which is that of fake tensors
    attention.get_attention_backend = lambda params: choose(dataclasses.replace(params, qkv_type=Tensor))
