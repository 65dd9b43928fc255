"""Masked-token loss over a vocabulary that tensor parallelism may split.

The batch may be filled up to a fixed number of masked positions; a label below 0 marks such a filler.
"""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_neobert.model.kernels import compiled_on_cuda


def masked_token_losses(logits_mv: Tensor, labels_m: Tensor, config: TransformerConfig) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of every masked token, and whether the likeliest token is the right one.

    Args:
        logits_mv: Logits of this rank's share of the vocabulary; overwritten by some kernels.
        labels_m: Original token ids; below 0 for a filler, whose loss, correctness and gradient are zero.

    Returns:
        losses_m in nats, fp32; correct_m, fp32 zeros and ones. A tie, not rare in bf16, counts as right.

    Collective: the tensor-parallel group.
    """
    columns = logits_mv.size(1)
    local_m = labels_m - parallel_state.get_tensor_model_parallel_rank() * columns
    here_m = (local_m >= 0) & (local_m < columns)
    if config.cross_entropy_loss_fusion:
        losses_m, correct_m = FusedCrossEntropy.apply(logits_mv, local_m.clamp(0, columns - 1), here_m)
        is_filler_m = labels_m < 0
        return losses_m.masked_fill(is_filler_m, 0.0), correct_m.masked_fill(is_filler_m, 0.0)
    correct_m = _is_likeliest(logits_mv, local_m.clamp(0, columns - 1), here_m)  # first: the loss works in place
    losses_1m = vocab_parallel_cross_entropy(logits_mv.unsqueeze(0), labels_m.unsqueeze(0))  # of a filler: finite
    return losses_1m.squeeze(0).masked_fill(labels_m < 0, 0.0), correct_m


@torch.no_grad()
def _is_likeliest(logits_mv: Tensor, column_m: Tensor, here_m: Tensor) -> Tensor:
    """1.0 where no other token has a larger logit than the label."""
    label_logits_m = logits_mv.gather(1, column_m.unsqueeze(1)).squeeze(1).masked_fill(~here_m, -torch.inf)
    best_m = logits_mv.amax(1)
    _reduce(label_logits_m, torch.distributed.ReduceOp.MAX)
    _reduce(best_m, torch.distributed.ReduceOp.MAX)
    return (label_logits_m >= best_m).float()


class FusedCrossEntropy(torch.autograd.Function):
    """Cross-entropy in three passes over the logits: largest, sum of exponentials, gradient; nothing else is stored.

    megatron.core's fused function writes the logits and their exponentials out in fp32, and rounds the gradient to
    bfloat16 for every dtype.
    """

    @staticmethod
    def forward(ctx: Any, logits_mv: Tensor, column_m: Tensor, here_m: Tensor) -> tuple[Tensor, Tensor]:
        """Losses and correctness, fp32, of the labels in these columns, which lie on this rank where `here_m` is set.

        Collective: forward, the tensor-parallel group.
        """
        largest_m = largest_logits(logits_mv)
        _reduce(largest_m, torch.distributed.ReduceOp.MAX)
        sums_2m = sum_exponentials(logits_mv, column_m, here_m, largest_m)
        _reduce(sums_2m, torch.distributed.ReduceOp.SUM)
        total_m, label_logits_m = sums_2m
        ctx.save_for_backward(logits_mv, column_m, here_m, largest_m, total_m)
        correct_m = (label_logits_m >= largest_m).float()
        ctx.mark_non_differentiable(correct_m)
        return total_m.log() + largest_m - label_logits_m, correct_m

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return logits_gradient(*ctx.saved_tensors, gradients[0]), None, None


@compiled_on_cuda
def largest_logits(logits_mv: Tensor) -> Tensor:
    return logits_mv.amax(1).float()


@compiled_on_cuda
def sum_exponentials(logits_mv: Tensor, column_m: Tensor, here_m: Tensor, largest_m: Tensor) -> Tensor:
    """Return for each position the sum of exp(logit - largest logit) and the label's logit or 0; [2, m] fp32."""
    total_m = (logits_mv.float() - largest_m.unsqueeze(1)).exp().sum(1)
    label_logits_m = logits_mv.gather(1, column_m.unsqueeze(1)).squeeze(1).float().masked_fill(~here_m, 0.0)
    return torch.stack([total_m, label_logits_m])


@compiled_on_cuda
def logits_gradient(
    logits_mv: Tensor, column_m: Tensor, here_m: Tensor, largest_m: Tensor, total_m: Tensor, gradient_m: Tensor
) -> Tensor:
    """Softmax less one at the label, times the gradient of the loss, in the dtype of the logits."""
    softmax_mv = (logits_mv.float() - largest_m.unsqueeze(1)).exp() / total_m.unsqueeze(1)
    columns_v = torch.arange(logits_mv.size(1), device=logits_mv.device)
    is_label_mv = (columns_v == column_m.unsqueeze(1)) & here_m.unsqueeze(1)
    return ((softmax_mv - is_label_mv.float()) * gradient_m.unsqueeze(1)).to(logits_mv.dtype)


def _reduce(tensor: Tensor, operation: Any) -> None:
    """Reduce in place over the tensor-parallel group. Collective: that group."""
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        torch.distributed.all_reduce(tensor, op=operation, group=parallel_state.get_tensor_model_parallel_group())
