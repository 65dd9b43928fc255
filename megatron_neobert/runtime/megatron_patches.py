"""Defects of megatron.core, fixed on CPU and GPU alike: two change numbers without an error, two wait for the device.

1. Optimizer state in the `fully_reshardable` checkpoint format is cut at wrong offsets as soon as a gradient buffer
   has several buckets and one before the last is padded (overlap_grad_reduce with a hidden size that is no multiple
   of 128, or a data-parallel size that is no power of two). 0.19.2 does the same.
2. Without Transformer Engine and Apex, a distributed optimizer cannot load its state: torch's AdamW keeps one `step`
   tensor per parameter, the loader hands all parameters the same one, and every update then counts it up once per
   parameter. 0.19.2 fails an assertion. `FusedAdam` of training/optimizer.py, which takes the branch of a GPU run, is
   the way round this.
3. The gradient norm is a Python number: the host waits for it, and without Transformer Engine and Apex once more for
   each parameter. `norm_on_device` leaves it on the device. megatron.core 0.19 does so with some Transformer Engines.
4. `finalize_model_grads` asks the device whether any token was counted. `scale_by_tokens` needs no answer;
   megatron.core 0.19 has the same.

Proof: tests/distributed/test_resume.py of the first two, tests/gpu_path of the others.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import megatron.core.optimizer as megatron_optimizer
import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer import optimizer as base_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_neobert.errors import ConfigError

# Functions of megatron.core and a part of their source, the same in both supported releases, that a patch relies on.
_RELIED_ON = (
    (DistributedOptimizer, "sharded_param_state_fully_reshardable", ") in buffer.param_index_map.items():"),
    (DistributedOptimizer, "sharded_param_state_fully_reshardable", "[state_key][param_world_start:param_world_end]"),
    (DistributedOptimizer, "get_parameter_state_dp_zero", "offset_in_world_tensors += gbuf_world_numel_unpadded"),
    (DistributedOptimizer, "state_dict", "elif USING_TE_OPTIMIZER or USING_APEX_OPTIMIZER:"),
    (DistributedOptimizer, "load_state_dict", "if not HAVE_APEX_OR_TE:"),
    (megatron_optimizer, "_get_megatron_optimizer_based_on_param_groups", "if USING_PYTORCH_OPTIMIZER:"),
    (megatron_optimizer, "_get_megatron_optimizer_based_on_param_groups", "adam_cls = Adam"),
    (base_optimizer.MegatronOptimizer, "get_grad_norm", "total_norm = get_grad_norm_fp32("),
    (base_optimizer.MegatronOptimizer, "clip_grad_norm", "grad_norm = get_grad_norm_fp32("),
    (base_optimizer.ChainedOptimizer, "get_grad_norm", "grad_norm = get_grad_norm_fp32("),
)
_NORM_ELEMENTS = 1 << 15  # in one fp32 sum on CPU: 1.5e-8 from fp64, and as fast as one sum over all


def install() -> None:
    """Put the first and the third fix in place; the others are called by name. A second call does nothing."""
    if getattr(DistributedOptimizer, "has_bucket_fix", False):
        return
    refuse_other_upstream()
    DistributedOptimizer.has_bucket_fix = True
    DistributedOptimizer.sharded_param_state_fully_reshardable = _with_bucket_padding_removed(
        DistributedOptimizer.sharded_param_state_fully_reshardable
    )
    clip_grads.get_grad_norm_fp32 = base_optimizer.get_grad_norm_fp32 = norm_on_device


def refuse_other_upstream() -> None:
    """Refuse a megatron.core whose sources differ: it would not fail, but train with wrong numbers."""
    problem = next(_find_changes(), None)
    if problem is not None:
        raise ConfigError(
            f"megatron-core {version('megatron-core')} is not a version that this project corrects: {problem}. "
            "Install the version that setup.py names for this Python; another one can save or clip wrong numbers."
        )


def _find_changes() -> Iterator[str]:
    """Yield the differences between the installed megatron.core and the sources that the patches were written for."""
    for owner, name, text in _RELIED_ON:
        try:
            source = inspect.getsource(getattr(owner, name))
        except (AttributeError, OSError):  # gone, or installed without sources
            source = ""
        if text not in source:
            yield f"{owner.__name__}.{name} does not hold {text!r}"
    taken = inspect.signature(clip_grads.get_grad_norm_fp32).parameters
    if list(taken) != list(inspect.signature(norm_on_device).parameters):
        yield f"get_grad_norm_fp32 takes {', '.join(taken)}"


def _with_bucket_padding_removed(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def sharded_param_state(self: DistributedOptimizer, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for buffer in self.buffers:
                stack.enter_context(_offsets_without_padding(buffer))
            return method(self, *args, **kwargs)

    return sharded_param_state


@contextlib.contextmanager
def _offsets_without_padding(buffer: Any) -> Iterator[None]:
    """Count a parameter's offset without the padding that ends the buckets before it, as the gathered state does.

    Offsets that fit the sum of the unpadded buckets have no padding in them: no bucket before the last is padded, or
    this megatron.core counts without padding itself.
    """
    unpadded = sum(bucket.numel_unpadded for bucket in buffer.buckets)
    if max(end for _, end, _ in buffer.param_index_map.values()) <= unpadded:
        yield
        return
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


@torch.no_grad()
def norm_on_device(
    grads_for_norm: list[torch.Tensor],
    norm_type: float = 2.0,
    grad_stats_parallel_group: torch.distributed.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return the norm over all gradients of the group's ranks: an fp64 scalar on the device, which is not waited for.

    On CPU, torch adds a whole tensor up with a few running sums in fp32: the norm of a 30,592 x 768 gradient of normal
    numbers is off by 1.1e-3, and by 4e-4 in two halves, so layouts differed. In parts: 5e-8. A GPU sums by blocks.

    Collective: the group.
    """
    assert norm_type == 2.0, f"{norm_type=}: gradients are clipped by their Euclidean norm"
    parts = grads_for_norm
    if not torch.cuda.is_available():
        parts = [part for grad in grads_for_norm for part in grad.reshape(-1).split(_NORM_ELEMENTS)]
    if parts:
        square = torch.stack(torch._foreach_norm(parts)).double().square().sum()
    else:
        square = torch.zeros((), dtype=torch.float64, device=torch.cuda.current_device())
    torch.distributed.all_reduce(square, group=grad_stats_parallel_group)
    return square.sqrt()


def scale_by_tokens(model: list[Any], num_tokens: torch.Tensor | None = None, **options: Any) -> None:
    """megatron.core's `finalize_model_grads`, the division by the tokens of all ranks without asking how many.

    Collective: all ranks.
    """
    finalize_model_grads(model, None, **options)
    if num_tokens is None:
        return
    last_stage = parallel_state.get_pipeline_model_parallel_last_rank()  # the loss is known there alone
    group = parallel_state.get_pipeline_model_parallel_group()
    torch.distributed.broadcast(num_tokens, src=last_stage, group=group)
    torch.distributed.all_reduce(num_tokens, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    for model_chunk in model:
        model_chunk.scale_gradients(1.0 / num_tokens.clamp(min=1))
