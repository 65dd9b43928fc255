"""Masked-token loss. Tensor-parallel ranks may share the vocabulary.

Batches can be filled up to a fixed number of masked positions. A filler has a label below 0.

Shapes: `m` masked positions of this rank, `v` this rank's share of the padded vocabulary.
"""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_neobert.model.kernels import compiled_on_cuda


def masked_token_losses(logits_mv: Tensor, labels_m: Tensor, config: TransformerConfig) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of each masked token, and whether the model predicts the token.

    Args:
        logits_mv: Logits of this rank's share of the vocabulary. They may be overwritten.
        labels_m: Original token ids; below 0 for a filler, an unused entry of a batch that is padded to capacity.

    Returns:
        losses_m: fp32, in nats; 0 for a filler.
        correct_m: fp32, 1 where no token has a larger logit than the label (ties are correct), else 0; 0 for a filler.

    Collective: the tensor-parallel group.
    """
    columns = logits_mv.size(1)
    column_m = labels_m - parallel_state.get_tensor_model_parallel_rank() * columns
    is_local_m = (column_m >= 0) & (column_m < columns)
    column_m, is_filler_m = column_m.clamp(0, columns - 1), labels_m < 0
    if config.cross_entropy_loss_fusion:
        losses_m, correct_m = FusedCrossEntropy.apply(logits_mv, column_m, is_local_m)
        return losses_m.masked_fill(is_filler_m, 0.0), correct_m.masked_fill(is_filler_m, 0.0)
    # Correctness comes first, because the loss overwrites the logits. Fillers count as wrong: no rank has their label.
    with torch.no_grad():
        label_logits_m = logits_mv.gather(1, column_m.unsqueeze(1)).squeeze(1).masked_fill(~is_local_m, -torch.inf)
        largest_m = logits_mv.amax(1)
        _reduce(label_logits_m, torch.distributed.ReduceOp.MAX)
        _reduce(largest_m, torch.distributed.ReduceOp.MAX)
        correct_m = (label_logits_m >= largest_m).float()
    # The loss of a filler is finite, so it can be replaced by zero.
    losses_1m = vocab_parallel_cross_entropy(logits_mv.unsqueeze(0), labels_m.unsqueeze(0))
    return losses_1m.squeeze(0).masked_fill(is_filler_m, 0.0), correct_m


class FusedCrossEntropy(torch.autograd.Function):
    """Cross-entropy that stores the logits for backward, but no fp32 tensor of the same size.

    The function makes three passes over the logits: maximum, sum of exponentials, and gradient. megatron.core's fused
    function writes logits and exponentials in fp32, and rounds the gradient to bfloat16 for every dtype.
    """

    @staticmethod
    def forward(ctx: Any, logits_mv: Tensor, column_m: Tensor, is_local_m: Tensor) -> tuple[Tensor, Tensor]:
        """Return two fp32 tensors [m]: losses in nats, and 1 where no logit exceeds the label's logit, else 0.

        Args:
            column_m: Column of each label that is in this rank's share of the vocabulary; any column for other labels.
            is_local_m: True where the label is in this rank's share.

        Collective: the tensor-parallel group.
        """
        largest_m = largest_logits(logits_mv)
        _reduce(largest_m, torch.distributed.ReduceOp.MAX)
        sums_2m = sum_exponentials(logits_mv, column_m, is_local_m, largest_m)
        _reduce(sums_2m, torch.distributed.ReduceOp.SUM)
        total_m, label_logits_m = sums_2m
        ctx.save_for_backward(logits_mv, column_m, is_local_m, largest_m, total_m)
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
def sum_exponentials(logits_mv: Tensor, column_m: Tensor, is_local_m: Tensor, largest_m: Tensor) -> Tensor:
    """Return fp32 [2, m]: the sum of exp(logit - largest_m), and the label's logit, 0 if the label is not local."""
    total_m = (logits_mv.float() - largest_m.unsqueeze(1)).exp().sum(1)
    label_logits_m = logits_mv.gather(1, column_m.unsqueeze(1)).squeeze(1).float().masked_fill(~is_local_m, 0.0)
    return torch.stack([total_m, label_logits_m])


@compiled_on_cuda
def logits_gradient(
    logits_mv: Tensor, column_m: Tensor, is_local_m: Tensor, largest_m: Tensor, total_m: Tensor, gradient_m: Tensor
) -> Tensor:
    """Return the gradient of the logits, in the logits' dtype: (softmax - one-hot label) x `gradient_m`.

    `gradient_m` is the gradient of the losses, `largest_m` the largest logit of the whole vocabulary, `total_m` the sum
    of exp(logit - largest_m). `column_m` is the label's column if `is_local_m` is True, and has no meaning otherwise.
    """
    softmax_mv = (logits_mv.float() - largest_m.unsqueeze(1)).exp() / total_m.unsqueeze(1)
    columns_v = torch.arange(logits_mv.size(1), device=logits_mv.device)
    is_label_mv = (columns_v == column_m.unsqueeze(1)) & is_local_m.unsqueeze(1)
    return ((softmax_mv - is_label_mv.float()) * gradient_m.unsqueeze(1)).to(logits_mv.dtype)


def _reduce(tensor: Tensor, operation: Any) -> None:
    """Reduce `tensor` in place over the tensor-parallel group. Collective: the tensor-parallel group."""
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        torch.distributed.all_reduce(tensor, op=operation, group=parallel_state.get_tensor_model_parallel_group())
