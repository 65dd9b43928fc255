"""Packed core attention for the local layer spec.

Megatron's own DotProductAttention knows neither packed rows nor anything but a dense mask. Here every document is
one call of torch's scaled_dot_product_attention: no mask, no work between documents. Measured on CPU, a loop over
documents beats nested tensors 2.7 times and a block-diagonal mask 2.2 times (torch has no packed CPU kernel).
"""

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class PackedAttention(MegatronModule):
    """Bidirectional attention within each document of a packed row; no parameters.

    Shape letters: `t` tokens of the row, `s` tokens of a document, `n` heads of this rank, `d` head width.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        assert attn_mask_type is AttnMaskType.no_mask, f"{attn_mask_type=}: documents are bidirectional"
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query_tnd: Tensor,
        key_tnd: Tensor,
        value_tnd: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Returns the context, [t, n * d], in the dtype of the query."""
        assert packed_seq_params is not None, "rows are always packed; a padded batch is one document per sequence"
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        documents = zip(*(tensor_tnd.split(lengths) for tensor_tnd in (query_tnd, key_tnd, value_tnd)), strict=True)
        return torch.cat([self._attend(*document) for document in documents])

    def _attend(self, query_snd: Tensor, key_snd: Tensor, value_snd: Tensor) -> Tensor:
        """One document: [s, n * d]. The leading axis of one is for torch, whose fused kernels want four."""
        query, key, value = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query_snd, key_snd, value_snd))
        context_1nsd = scaled_dot_product_attention(query, key, value, scale=self.softmax_scale)
        return context_1nsd.squeeze(0).transpose(0, 1).flatten(1)
