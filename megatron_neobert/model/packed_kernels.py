"""Attention kernels of the local layers: bidirectional within each document of a packed row, no parameters.

On CUDA in bfloat16 a row is one call of a variable-length kernel: torch's own (FlashAttention 2, built in), or the
package flash-attn. Neither asks the device for a number. Elsewhere every document is one call of torch's
scaled_dot_product_attention: no mask, no work between documents. Measured on CPU, a loop over documents beats nested
tensors 2.7 times and a block-diagonal mask 2.2 times (torch has no packed CPU kernel).

Letters: `t` tokens of the row, `s` tokens of a document, `n` heads of this rank, `d` head width.
"""

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from megatron_neobert.config.rules import HEAD_WIDTH_MULTIPLE


class TorchAttention(MegatronModule):
    """Torch's kernels; for other dtypes than bfloat16 on CUDA the loop over documents waits for their lengths."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
    ) -> None:
        super().__init__(config=config)
        assert attn_mask_type is AttnMaskType.padding, f"{attn_mask_type=}: documents are bidirectional"
        assert attention_type == "self", f"{attention_type=}: an encoder attends to itself"
        assert softmax_scale is None, f"{softmax_scale=}: the kernels scale by the head width"

    def forward(
        self,
        query_tnd: Tensor,
        key_tnd: Tensor,
        value_tnd: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Returns the context, [t, n * d], in the dtype of the query."""
        assert packed_seq_params is not None, "rows are always packed; a padded batch is one document per sequence"
        return self.attend(query_tnd, key_tnd, value_tnd, packed_seq_params)

    def attend(self, query_tnd: Tensor, key_tnd: Tensor, value_tnd: Tensor, row: PackedSeqParams) -> Tensor:
        if query_tnd.is_cuda and query_tnd.dtype is torch.bfloat16:
            return _attend_packed(query_tnd, key_tnd, value_tnd, row)
        return attend_by_document(query_tnd, key_tnd, value_tnd, row.cu_seqlens_q)


class FlashAttention(TorchAttention):
    """The kernel of the package flash-attn; CUDA and bfloat16 alone."""

    def attend(self, query_tnd: Tensor, key_tnd: Tensor, value_tnd: Tensor, row: PackedSeqParams) -> Tensor:
        from flash_attn import flash_attn_varlen_func  # an optional package that is large and slow to import

        context_tnd: Tensor = flash_attn_varlen_func(query_tnd, key_tnd, value_tnd, *_bounds(row))
        return context_tnd.flatten(1)


def attend_by_document(query_tnd: Tensor, key_tnd: Tensor, value_tnd: Tensor, cu_seqlens_n: Tensor) -> Tensor:
    """One call per document, of those with a token: [t, n * d]."""
    lengths = [length for length in cu_seqlens_n.diff().tolist() if length]
    documents = zip(*(tensor_tnd.split(lengths) for tensor_tnd in (query_tnd, key_tnd, value_tnd)), strict=True)
    return torch.cat([_attend(*document) for document in documents])


def _attend(query_snd: Tensor, key_snd: Tensor, value_snd: Tensor) -> Tensor:
    """One document: [s, n * d]. The leading axis of one is for torch, whose fused kernels want four."""
    query, key, value = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query_snd, key_snd, value_snd))
    context_1nsd = scaled_dot_product_attention(query, key, value)
    return context_1nsd.squeeze(0).transpose(0, 1).flatten(1)


def _attend_packed(query_tnd: Tensor, key_tnd: Tensor, value_tnd: Tensor, row: PackedSeqParams) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # CUDA alone needs it, and older builds of torch lack it

    width = query_tnd.size(-1)
    missing = -width % HEAD_WIDTH_MULTIPLE
    if not missing:
        context_tnd: Any = varlen_attn(query_tnd, key_tnd, value_tnd, *_bounds(row))
        return context_tnd.flatten(1)
    # Channels of zeros change no product of a query and a key, but the scale has to be that of the true width.
    query, key, value = (pad(tensor, (0, missing)) for tensor in (query_tnd, key_tnd, value_tnd))
    context_tnd = varlen_attn(query, key, value, *_bounds(row), scale=width**-0.5)
    return context_tnd[:, :, :width].flatten(1)


def _bounds(row: PackedSeqParams) -> tuple[Any, ...]:
    """Return the document bounds as positional arguments of variable-length kernels: starts twice, longest twice."""
    return row.cu_seqlens_q, row.cu_seqlens_kv, row.max_seqlen_q, row.max_seqlen_kv
