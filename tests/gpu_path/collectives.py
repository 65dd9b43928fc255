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
    "_reduce_scatter": "reduce-scatter",
    "reduce_scatter": "reduce-scatter",
    "_allgather": "all-gather",
    "allgather": "all-gather",
    "alltoall": "all-to-all",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "receive",
    "barrier": "barrier",
}
GROUPS: dict[str, Callable[[], ProcessGroup]] = {
    "tensor": parallel_state.get_tensor_model_parallel_group,
    "context": parallel_state.get_context_parallel_group,
    "pipeline": parallel_state.get_pipeline_model_parallel_group,
    "data": lambda: parallel_state.get_data_parallel_group(with_context_parallel=True),
}


class Collectives(TorchDispatchMode):
    """Records (group, operation, bytes) of every collective in `calls`. Groups of one rank do not count.

    The group is a key of GROUPS, or "all" for any other group. The bytes are those of the whole tensor: the input of a
    reduction, the output of a gather.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func.name().partition("::")
        if namespace == "c10d":
            self.note(next(OPERATIONS[start] for start in OPERATIONS if name.startswith(start)), args)
        return func(*args, **(kwargs or {}))

    def note(self, operation: str, args: Any) -> None:
        (group,) = (ProcessGroup.unbox(arg) for arg in args if is_group(arg))
        if group.size() > 1:
            name = next((name for name, get in GROUPS.items() if get().group_name == group.group_name), "all")
            sizes = [sum(leaf.nbytes for leaf in tree_leaves(arg) if isinstance(leaf, torch.Tensor)) for arg in args]
            self.calls.append((name, operation, max(sizes)))

    def totals(self, *, smallest: int = 0) -> list[tuple[str, str, int, int]]:
        """Return sorted (group, operation, calls, bytes) of all calls with at least `smallest` bytes."""
        calls: collections.Counter[tuple[str, str]] = collections.Counter()
        sizes: collections.Counter[tuple[str, str]] = collections.Counter()
        for group, operation, size in self.calls:
            if size >= smallest:
                calls[group, operation] += 1
                sizes[group, operation] += size
        return sorted((*key, calls[key], sizes[key]) for key in calls)


def is_group(argument: Any) -> bool:
    return isinstance(argument, torch.ScriptObject) and argument._type().qualified_name().endswith("ProcessGroup")
