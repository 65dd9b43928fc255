"""Fixes for three defects of megatron.core: two make the host wait for the GPU, one delays the start of large runs.

1. The gradient norm is a Python number, so the host waits for the device; without Transformer Engine and Apex it waits
   once more per parameter. `norm_on_device` returns a tensor. 0.19 does so with some versions of Transformer Engine.
2. `finalize_model_grads` reads the number of tokens from the device. `finalize_gradients` does not, nor does 0.19.
3. All ranks wait in the store for each group of the run: 11,270 groups with 1,024 ranks, about twenty
   minutes. With `use_local_synchronization` a rank waits only for the 17 groups it is in.

tests/gpu_path tests the first two. Checkpoints do not use megatron.core's format for the state of its distributed
optimizer, which has another defect: it cuts the state at wrong offsets if a bucket before the last one is padded.
"""

import functools
import inspect
from collections.abc import Callable
from importlib.metadata import version
from typing import Any
from unittest import mock

import megatron.core.optimizer as megatron_optimizer
import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer import optimizer as base_optimizer
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import GroupName

from megatron_neobert.errors import ConfigError

# Source lines of megatron.core that a patch relies on. Both supported releases have them.
_EXPECTED_SOURCE = (
    (megatron_optimizer, "_get_megatron_optimizer_based_on_param_groups", "if USING_PYTORCH_OPTIMIZER:"),
    (megatron_optimizer, "_get_megatron_optimizer_based_on_param_groups", "adam_cls = Adam"),
    (parallel_state, "create_group", '"use_local_synchronization": use_local_synchronization,'),
    (base_optimizer.MegatronOptimizer, "get_grad_norm", "total_norm = get_grad_norm_fp32("),
    (base_optimizer.MegatronOptimizer, "clip_grad_norm", "grad_norm = get_grad_norm_fp32("),
    (base_optimizer.ChainedOptimizer, "get_grad_norm", "grad_norm = get_grad_norm_fp32("),
)
# Elements per fp32 sum on CPU. The error against fp64 is 1.5e-8, at the speed of a single sum over all elements.
_NORM_ELEMENTS = 1 << 15


def install() -> None:
    """Patch megatron.core's gradient norm and `create_group`. Callers use `finalize_gradients` directly. Idempotent."""
    if clip_grads.get_grad_norm_fp32 is norm_on_device:
        return
    check_sources()
    clip_grads.get_grad_norm_fp32 = base_optimizer.get_grad_norm_fp32 = norm_on_device
    create_group: Callable[..., Any] = parallel_state.create_group

    @functools.wraps(create_group)  # check_sources still finds megatron.core's source
    def create_own_group(ranks: list[int], **options: Any) -> Any:
        # With local synchronization, torch names a group by the number of groups of this rank, which may differ between
        # its members. All ranks come here for each group, so they can count it, as torch does otherwise.
        name = GroupName(str(distributed_c10d._world.group_count))
        distributed_c10d._world.group_count += 1
        if torch.distributed.get_rank() not in ranks:
            return None
        options["use_local_synchronization"] = True
        with mock.patch.object(distributed_c10d, "_process_group_name", lambda *_, **__: name):
            return create_group(ranks, **options)

    parallel_state.create_group = create_own_group


def check_sources() -> None:
    """Raise ConfigError if megatron.core lacks a source line or a signature that the patches rely on.

    With a different source, a run could silently clip gradients by a wrong norm.
    """
    problems = []
    for owner, name, line in _EXPECTED_SOURCE:
        try:
            source = inspect.getsource(getattr(owner, name))
        except (AttributeError, OSError):  # removed upstream, or installed without sources
            source = ""
        if line not in source:
            problems.append(f"{owner.__name__}.{name} does not contain {line!r}")
    parameters = list(inspect.signature(clip_grads.get_grad_norm_fp32).parameters)
    if parameters != list(inspect.signature(norm_on_device).parameters):
        problems.append(f"get_grad_norm_fp32 has the parameters {', '.join(parameters)}")
    if problems:
        raise ConfigError(
            f"megatron-core {version('megatron-core')} is not a version that this project corrects: {problems[0]}. "
            "Install the version that pyproject.toml names for this Python; another version can clip by wrong numbers."
        )


@torch.no_grad()
def norm_on_device(
    grads_for_norm: list[torch.Tensor],
    norm_type: float = 2.0,
    grad_stats_parallel_group: torch.distributed.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return the Euclidean norm of all gradients on all ranks of the group, as an fp64 scalar on the device.

    `norm_type` must be 2, the only value that Megatron passes here.

    Collective: `grad_stats_parallel_group`, or all ranks if it is None.
    """
    assert norm_type == 2.0, f"{norm_type=}: gradients are clipped by their Euclidean norm"
    tensors = grads_for_norm
    if not torch.cuda.is_available():
        # On CPU, torch sums a large tensor with a few fp32 accumulators. The norm of a normally distributed gradient of
        # 30,592 x 768 is off by 1.1e-3, or by 4e-4 if two ranks share it; in chunks, by 5e-8. A GPU sums in blocks.
        tensors = [chunk for grad in grads_for_norm for chunk in grad.reshape(-1).split(_NORM_ELEMENTS)]
    if tensors:
        square = torch.stack(torch._foreach_norm(tensors)).double().square().sum()
    else:
        square = torch.zeros((), dtype=torch.float64, device=torch.cuda.current_device())
    torch.distributed.all_reduce(square, group=grad_stats_parallel_group)
    return square.sqrt()


def finalize_gradients(model: list[Any], num_tokens: torch.Tensor | None = None, **options: Any) -> None:
    """Run megatron.core's `finalize_model_grads`, then divide the gradients in place by all ranks' number of tokens.

    Args:
        num_tokens: This rank's number of tokens. Replaced in place by the sum over the last pipeline stage's data- and
            context-parallel ranks. If None, the gradients are not divided.

    Collective: all ranks.
    """
    finalize_model_grads(model, None, **options)
    if num_tokens is None:
        return
    # Only the last pipeline stage computes the loss and counts tokens.
    last_stage = parallel_state.get_pipeline_model_parallel_last_rank()
    group = parallel_state.get_pipeline_model_parallel_group()
    torch.distributed.broadcast(num_tokens, src=last_stage, group=group)
    torch.distributed.all_reduce(num_tokens, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    for model_chunk in model:
        model_chunk.scale_gradients(1.0 / num_tokens.clamp(min=1))
