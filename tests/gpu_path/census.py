"""Counts waits and copies of a training step on fake CUDA tensors, and keeps what autograd keeps."""

import collections
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed._tools.fake_collectives  # collectives for fake tensors
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Collectives that torch does not support for fake tensors.
COALESCED = {
    f"c10d.{name}_coalesced_.default" for name in ("allreduce", "allgather_into_tensor", "reduce_scatter_tensor")
}


class Census(TorchDispatchMode):
    """Counts the operations of a step, and returns 1 when the host reads a number from the device."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: collections.Counter[str] = collections.Counter()
        self.copies: collections.Counter[str] = collections.Counter()
        self.kept: dict[int, Tensor] = {}  # storage -> tensor that autograd keeps for backward
        self.is_inside_kernel = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        inputs = tensors_of((args, kwargs))
        if name == "aten._local_scalar_dense.default":
            self.waits[f"item: {calling_function()}"] += any(tensor.is_cuda for tensor in inputs)
            return 1.0 if inputs[0].dtype.is_floating_point else 1
        if name in ("aten._to_copy.default", "aten.copy_.default"):
            self.note_copy(name, args, kwargs)
        try:
            return FakeWork().boxed() if name in COALESCED else func(*args, **kwargs)
        except Exception as error:
            if "DynamicOutputShape" in type(error).__name__ or "DataDependent" in type(error).__name__:
                self.waits[f"{name}: {calling_function()}"] += 1
            raise

    def note_copy(self, name: str, args: Any, kwargs: Any) -> None:
        if name == "aten.copy_.default":
            source, target = args[1].device, args[0].device
            is_asynchronous = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        else:
            source, target = args[0].device, torch.device(kwargs.get("device") or args[0].device)
            is_asynchronous = kwargs.get("non_blocking", False)
        if source.type != target.type:
            counter = self.copies if is_asynchronous else self.waits
            counter[f"{source.type} to {target.type}: {calling_function()}"] += 1

    def keep(self, tensor: Tensor) -> Tensor:
        if tensor.is_cuda:
            self.kept[storage_of(tensor)] = tensor.detach()
        return tensor

    @contextlib.contextmanager
    def inside_kernel(self) -> Iterator[None]:
        outer, self.is_inside_kernel = self.is_inside_kernel, True
        try:
            yield
        finally:
            self.is_inside_kernel = outer

    def clear(self) -> None:
        self.waits.clear()
        self.copies.clear()


def calling_function() -> str:
    """Return the innermost running function of this project, megatron.core or Transformer Engine."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(
            ("megatron_neobert.", "megatron.core.", "transformer_engine.")
        ):
            path = Path(frame.f_code.co_filename)
            return f"{path.parent.name}/{path.name} {frame.f_code.co_name}"
        frame = frame.f_back
    return "somewhere else"


def tensors_of(tree: Any) -> list[Tensor]:
    """Return all tensors of a tree. A quantized tensor is replaced by the tensors it consists of."""
    tensors: list[Tensor] = []
    for leaf in tree_leaves(tree):
        if type(leaf).__module__.startswith("transformer_engine."):
            tensors += (value for value in vars(leaf).values() if isinstance(value, Tensor))
        elif isinstance(leaf, Tensor):
            tensors.append(leaf)
    return tensors


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
