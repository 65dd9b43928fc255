"""Counts the collectives of a block by group and operation, on fake CUDA tensors and on real ranks."""

import collections
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from torch._C._distributed_c10d import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Start of c10d's name of an operation -> its usual name.
OPERATIONS = {
    "allreduce": "all-reduce",
    "_reduce_scatter_base": "reduce-scatter",
    "reduce_scatter": "reduce-scatter",
    "_allgather_base": "all-gather",
    "allgather": "all-gather",
    "alltoall": "all-to-all",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "receive",
}
GROUPS: dict[str, Callable[[], ProcessGroup]] = {
    "tensor": parallel_state.get_tensor_model_parallel_group,
    "context": parallel_state.get_context_parallel_group,
    "pipeline": parallel_state.get_pipeline_model_parallel_group,
    "data": lambda: parallel_state.get_data_parallel_group(with_context_parallel=True),
}


class Collectives(TorchDispatchMode):
    """Counts calls and bytes of collectives by (group, operation). Groups of one rank do not count.

    The bytes of a call are those of its whole tensor: the input of a reduction, the output of a gather. The group is a
    key of GROUPS, or "all" for any other group.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: collections.Counter[tuple[str, str]] = collections.Counter()
        self.bytes: collections.Counter[tuple[str, str]] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func.name().partition("::")
        if namespace == "c10d":
            self.note(next(OPERATIONS[start] for start in OPERATIONS if name.startswith(start)), args)
        return func(*args, **(kwargs or {}))

    def note(self, operation: str, args: Any) -> None:
        group = next(ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject) and is_group(arg))
        if group.size() == 1:
            return
        sizes = [sum(leaf.nbytes for leaf in tree_leaves(arg) if isinstance(leaf, torch.Tensor)) for arg in args]
        key = next((name for name, get in GROUPS.items() if get().group_name == group.group_name), "all"), operation
        self.calls[key] += 1
        self.bytes[key] += max(sizes)


def is_group(argument: torch.ScriptObject) -> bool:
    return argument._type().qualified_name().endswith("ProcessGroup")
