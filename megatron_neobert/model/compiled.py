"""Pure functions of tensors, fused by Inductor where the tensors are on a GPU.

Eager, each operation of such a function reads and writes all of its tensors; on a GPU that is most of the time that a
step spends outside matrix products and attention (docs/performance.md). On a CPU they stay as they are written:
compiling takes longer than a test runs, and gains little there.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch


def compiled_on_cuda(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled at its first call on CUDA. It takes tensors alone and has no graph break.

    A second number of tokens compiles it once more, for any number (torch's automatic dynamic shapes).
    """

    @functools.cache
    def kernel() -> Callable[..., Any]:
        return torch.compile(function)

    @functools.wraps(function)
    def call(first: torch.Tensor, *others: torch.Tensor) -> Any:
        return (kernel() if first.is_cuda else function)(first, *others)

    return call
