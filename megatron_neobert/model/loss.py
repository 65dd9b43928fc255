"""Masked-token loss over a vocabulary that tensor parallelism may split.

The batch may be filled up to a fixed number of masked positions; a label below 0 marks such a filler.
"""

import torch
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import te_parallel_cross_entropy
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


def masked_token_losses(logits_mv: Tensor, labels_m: Tensor, config: TransformerConfig) -> tuple[Tensor, Tensor]:
    """Cross-entropy of every masked token, and whether the likeliest token is the right one.

    Args:
        logits_mv: Logits of this rank's share of the vocabulary; overwritten.
        labels_m: Original token ids; below 0 for a filler, whose loss, correctness and gradient are zero.
        config: Selects the kernel that computes the loss.

    Returns:
        losses_m in nats, fp32; correct_m, fp32 zeros and ones.

    Collective: the tensor-parallel group.
    """
    correct_m = _is_likeliest(logits_mv, labels_m)  # first: the loss below works in place
    losses_1m = _cross_entropy(logits_mv.unsqueeze(0), labels_m.unsqueeze(0), config)
    return losses_1m.squeeze(0).masked_fill(labels_m < 0, 0.0), correct_m


def _cross_entropy(logits_1mv: Tensor, labels_1m: Tensor, config: TransformerConfig) -> Tensor:
    """Of a filler something finite, without an error."""
    group = parallel_state.get_tensor_model_parallel_group()
    if not config.cross_entropy_loss_fusion:
        return vocab_parallel_cross_entropy(logits_1mv, labels_1m)
    if config.cross_entropy_fusion_impl == "native":
        return fused_vocab_parallel_cross_entropy(logits_1mv, labels_1m, group)
    # Without is_cg_capturable the backward pass asks the device whether the incoming gradient is one.
    return te_parallel_cross_entropy(logits_1mv, labels_1m, group, is_cg_capturable=True)


@torch.no_grad()
def _is_likeliest(logits_mv: Tensor, labels_m: Tensor) -> Tensor:
    """1.0 where no other token has a larger logit than the label; a tie, not rare in bf16, counts as right."""
    group = parallel_state.get_tensor_model_parallel_group()
    columns = logits_mv.size(1)
    local_m = labels_m - parallel_state.get_tensor_model_parallel_rank() * columns
    here_m = (local_m >= 0) & (local_m < columns)
    label_logits_m = logits_mv.gather(1, local_m.clamp(0, columns - 1).unsqueeze(1)).squeeze(1)
    label_logits_m = label_logits_m.masked_fill(~here_m, -torch.inf)
    best_m = logits_mv.amax(1)
    if group.size() > 1:
        torch.distributed.all_reduce(label_logits_m, op=torch.distributed.ReduceOp.MAX, group=group)
        torch.distributed.all_reduce(best_m, op=torch.distributed.ReduceOp.MAX, group=group)
    return (label_logits_m >= best_m).float()
