"""Transformer Engine on fake CUDA tensors: its own Python, and the bytes that each function of its extension moves.

The functions are those of tests/emulated_engine, which run for their shapes and checks. Each one counts as a kernel
that reads the tensors its emulation reads, and writes the tensors its emulation changes and returns. Decisions that a
real kernel makes on the device, such as skipping an update, have a fixed result here.
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
    """Records the tensors that a function reads and writes, without the tensors that it creates, by their storages."""

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[tuple[int, int], Tensor] = {}
        self.written: dict[tuple[int, int], Tensor] = {}
        self.created: dict[int, Tensor] = {}

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
            if storage in self.created or is_view:
                continue
            if storage in changed:
                keep_largest(self.written, tensor)
            if storage not in changed or name not in OVERWRITING:
                keep_largest(self.read, tensor)
        self.created.update(results)
        return result


def keep_largest(tensors: dict[tuple[int, int], Tensor], tensor: Tensor) -> None:
    """Add a tensor, unless a larger view with the same start is there. Other views are other parts of a buffer."""
    begin = storage_of(tensor), tensor.storage_offset() * tensor.itemsize
    if begin not in tensors or tensors[begin].nbytes < tensor.nbytes:
        tensors[begin] = tensor


def attend(q: Tensor, k: Tensor, v: Tensor, call: Any) -> Tensor:
    """Replace attention by a function with the same inputs and the same shape of the result."""
    return q * k * v


def install(census: Census, device: torch.device) -> None:
    """Import transformer_engine.pytorch with an extension whose kernels are counted in `census`."""

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            kernel = Kernel()
            with census.inside_kernel(), device, kernel:
                result = function(*args, **options)
            if function.__name__.startswith("fused_attn_"):  # backward reads more than `attend` does
                for tensor in tensors_of((args, options)):
                    keep_largest(kernel.read, tensor)
            returned = {
                storage_of(tensor): tensor for tensor in tensors_of(result) if storage_of(tensor) in kernel.created
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
    choose = attention.get_attention_backend  # compares the class of the queries, which are fake tensors
    attention.get_attention_backend = lambda params: choose(dataclasses.replace(params, qkv_type=Tensor))
