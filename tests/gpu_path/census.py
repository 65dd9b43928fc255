"""What a training step does to a device that is not there: waits, copies, kernels, and the bytes that these move."""

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

# Of the collectives those that torch does not know for fake tensors; nothing is left of them but their inputs.
COALESCED = {
    f"c10d.{name}_coalesced_.default" for name in ("allreduce", "allgather_into_tensor", "reduce_scatter_tensor")
}
GATHERING = {f"aten.{name}" for name in ("gather.default", "index.Tensor", "index_select.default", "embedding.default")}
FREE = ("aten.empty", "aten.detach", "aten._unsafe_view", "prim.", "aten.new_empty")  # they move nothing


class Census(TorchDispatchMode):
    """Counts what a step does to the device, and answers in its place where a number is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: collections.Counter[str] = collections.Counter()
        self.copies: collections.Counter[str] = collections.Counter()
        self.bytes: collections.Counter[str] = collections.Counter()
        self.kernels: collections.Counter[str] = collections.Counter()
        self.kept: dict[int, Tensor] = {}  # by its storage, what autograd keeps for a backward pass
        self.is_inside_kernel = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        inputs = tensors_of((args, kwargs))
        on_device = any(tensor.is_cuda for tensor in inputs)
        if name == "aten._local_scalar_dense.default":
            self.waits[f"item: {place()}"] += on_device
            return 1.0 if inputs[0].dtype.is_floating_point else 1
        if name in ("aten._to_copy.default", "aten.copy_.default"):
            self.note_copy(name, args, kwargs)
        try:
            result = FakeWork().boxed() if name in COALESCED else func(*args, **kwargs)
        except Exception as error:
            if "DynamicOutputShape" in type(error).__name__ or "DataDependent" in type(error).__name__:
                self.waits[f"{name}: {place()}"] += 1
            raise
        outputs = tensors_of(result)
        if (on_device or any(tensor.is_cuda for tensor in outputs)) and not self.is_inside_kernel:
            storages = {storage_of(tensor) for tensor in inputs}
            is_view = not func._schema.is_mutable and any(storage_of(tensor) in storages for tensor in outputs)
            if not is_view and not name.startswith(FREE):
                returned = {storage_of(tensor) for tensor in outputs}
                changed = [tensor for tensor in changed_by(func, args) if storage_of(tensor) not in returned]
                self.note_kernel(name, inputs, [*outputs, *changed])
        return result

    def note_copy(self, name: str, args: Any, kwargs: Any) -> None:
        if name == "aten.copy_.default":
            source, target = args[1].device, args[0].device
            is_asynchronous = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        else:
            source, target = args[0].device, torch.device(kwargs.get("device") or args[0].device)
            is_asynchronous = kwargs.get("non_blocking", False)
        if source.type != target.type:
            what = f"{source.type} to {target.type}: {place()}"
            (self.copies if is_asynchronous else self.waits)[what] += 1

    def note_kernel(self, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        if name in GATHERING:  # reads as much as it writes
            inputs = outputs
        elif name == "aten.index_put_.default":  # writes the values alone
            inputs, outputs = inputs[-1:], inputs[-1:]
        # An expanded tensor repeats what its storage has once.
        self.bytes[name] += sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in (*inputs, *outputs))
        self.kernels[name] += 1

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
        for counter in (self.waits, self.copies, self.bytes, self.kernels):
            counter.clear()


def place() -> str:
    """The innermost function of the project, of megatron.core or of Transformer Engine that is running."""
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
    """Its tensors; of those that are quantized, what they are made of."""
    found: list[Tensor] = []
    for leaf in tree_leaves(tree):
        if type(leaf).__module__.startswith("transformer_engine."):
            found += (part for part in vars(leaf).values() if isinstance(part, Tensor))
        elif isinstance(leaf, Tensor):
            found.append(leaf)
    return found


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def changed_by(func: Any, args: Any) -> list[Tensor]:
    """The arguments that an operation writes into."""
    pairs = zip(func._schema.arguments, args, strict=False)
    return [tensor for argument, value in pairs if argument.is_write for tensor in tensors_of(value)]
