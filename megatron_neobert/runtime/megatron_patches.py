"""Two defects of megatron.core 0.16.1 that change numbers without an error, fixed on CPU and GPU alike.

1. Optimizer state in the `fully_reshardable` checkpoint format is cut at wrong offsets as soon as a gradient buffer
   has several buckets and one before the last is padded (overlap_grad_reduce with a hidden size that is no multiple
   of 128, or a data-parallel size that is no power of two). Later releases count as `_offsets_without_padding` does.
2. Without Transformer Engine and Apex, a distributed optimizer cannot load its state: torch's AdamW keeps one `step`
   tensor per parameter, the loader hands all parameters the same one, and every update then counts it up once per
   parameter. `FusedAdam` keeps the step in the parameter group, as Transformer Engine's optimizer of that name does,
   so the loader takes the branch that a GPU run takes and checkpoints are interchangeable.

Proof: tests/distributed/test_resume.py.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import megatron.core.optimizer as megatron_optimizer
import torch
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.optim.adam import adam


def install() -> None:
    """Puts both fixes in place; a second call does nothing."""
    if getattr(DistributedOptimizer, "has_bucket_fix", False):
        return
    DistributedOptimizer.has_bucket_fix = True
    DistributedOptimizer.sharded_param_state_fully_reshardable = _with_bucket_padding_removed(
        DistributedOptimizer.sharded_param_state_fully_reshardable
    )
    if not distrib_optimizer.HAVE_APEX_OR_TE:
        megatron_optimizer.Adam = distrib_optimizer.Adam = FusedAdam
        megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
        distrib_optimizer.HAVE_APEX_OR_TE = True
        distrib_optimizer.USING_TE_OPTIMIZER = True


def _with_bucket_padding_removed(method: Callable[..., Any]) -> Callable[..., Any]:
    def sharded_param_state(self: DistributedOptimizer, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for buffer in self.buffers:
                stack.enter_context(_offsets_without_padding(buffer))
            return method(self, *args, **kwargs)

    return sharded_param_state


@contextlib.contextmanager
def _offsets_without_padding(buffer: Any) -> Iterator[None]:
    """Counts a parameter's place without the padding that ends the buckets before it, as the gathered state does."""
    removed, padding_before = 0, []
    for bucket in buffer.buckets:
        padding_before.append(removed)
        removed += bucket.grad_data.numel() - bucket.numel_unpadded
    original = buffer.param_index_map
    buffer.param_index_map = {
        param: (start - padding_before[bucket], end - padding_before[bucket], bucket)
        for param, (start, end, bucket) in original.items()
    }
    try:
        yield
    finally:
        buffer.param_index_map = original


class FusedAdam(torch.optim.Optimizer):
    """Adam or AdamW on torch's fused kernel, with the state layout of Transformer Engine's FusedAdam.

    State per parameter: `exp_avg`, `exp_avg_sq`; per group: `step`, counted once for all its parameters.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,  # in a CUDA graph, which this is never part of
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [param for param in group["params"] if param.grad is not None]
            states = [self._state_of(param) for param in params]
            adam(
                params,
                [param.grad for param in params],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                # torch counts these up itself before the update
                [torch.full((), float(group["step"] - 1), device=param.device) for param in params],
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
                decoupled_weight_decay=self.adam_w_mode,
            )

    def _state_of(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        state = self.state[param]
        if not state:
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        return state
