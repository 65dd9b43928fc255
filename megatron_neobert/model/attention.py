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

    Shape letters: `t` tokens of the row, `n` heads of this rank, `d` head width.
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
        documents = zip(query_tnd.split(lengths), key_tnd.split(lengths), value_tnd.split(lengths), strict=True)
        context_tnd = torch.cat(
            [
                scaled_dot_product_attention(
                    query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), scale=self.softmax_scale
                ).transpose(0, 1)
                for query, key, value in documents
            ]
        )
        return context_tnd.flatten(1)
