"""Counts waits, copies and collectives of a training step on fake CUDA tensors, and keeps what autograd keeps."""

import collections
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed._tools.fake_collectives  # collectives for fake tensors
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Collectives that torch does not support for fake tensors.
COALESCED = {
    f"c10d.{name}_coalesced_.default" for name in ("allreduce", "allgather_into_tensor", "reduce_scatter_tensor")
}

# Start of c10d's name of an operation -> its usual name.
OPERATIONS = {
    "allreduce": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "allgather": "all-gather",
    "alltoall": "all-to-all",
    "send": "send",
}


class Census(TorchDispatchMode):
    """Counts the operations of a step, and returns 1 when the host reads a number from the device."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: collections.Counter[str] = collections.Counter()
        self.copies: collections.Counter[str] = collections.Counter()
        self.sizes: dict[tuple[str, str], list[int]] = collections.defaultdict(list)  # bytes by group and operation
        self.kept: dict[int, Tensor] = {}  # storage -> tensor that autograd keeps for backward

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        inputs = tensors_of((args, kwargs))
        if name == "aten._local_scalar_dense.default":
            self.waits[f"item: {calling_function()}"] += any(tensor.is_cuda for tensor in inputs)
            return 1.0 if inputs[0].dtype.is_floating_point else 1
        if name in ("aten._to_copy.default", "aten.copy_.default"):
            self.note_copy(name, args, kwargs)
        if name.startswith("c10d."):
            self.note_collective(name.split(".")[1], args)
        return FakeWork().boxed() if name in COALESCED else func(*args, **kwargs)

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

    def note_collective(self, name: str, args: Any) -> None:
        """Record the bytes of the whole tensor: the input of a reduction, the output of a gather.

        What the plan leaves out is not recorded: scalars, receives, and groups other than these four.
        """
        from megatron.core import parallel_state  # torch must report a GPU before this import

        groups = {
            "tensor": parallel_state.get_tensor_model_parallel_group(),
            "context": parallel_state.get_context_parallel_group(),
            "pipeline": parallel_state.get_pipeline_model_parallel_group(),
            "data": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        (group,) = (ProcessGroup.unbox(arg) for arg in args if is_group(arg))
        label = next((label for label in groups if groups[label].group_name == group.group_name), None)
        size = max(sum(tensor.nbytes for tensor in tensors_of(arg)) for arg in args)
        if label is not None and group.size() > 1 and size >= 1024 and not name.startswith("recv"):
            usual = (OPERATIONS[start] for start in OPERATIONS if name.strip("_").startswith(start))
            self.sizes[label, next(usual, name)].append(size)

    def keep(self, tensor: Tensor) -> Tensor:
        if tensor.is_cuda:
            self.kept[storage_of(tensor)] = tensor.detach()
        return tensor


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
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def is_group(argument: Any) -> bool:
    return isinstance(argument, torch.ScriptObject) and argument._type().qualified_name().endswith("ProcessGroup")
