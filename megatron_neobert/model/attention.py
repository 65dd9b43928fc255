"""Steps around the attention kernel: rotary angles, and the exchange between context-parallel ranks.

A context-parallel rank holds a contiguous slice of a packed row and all heads; attention needs whole documents but
not all heads. So tokens are exchanged for heads before the kernel and heads for tokens after it (DeepSpeed's Ulysses
scheme); documents need no padding. Queries and keys are rotated after the exchange, by angles that are computed once
per micro-batch, in fp32, and shared by all layers, with Transformer Engine's layers and without.

Letters: `t` tokens of the row (`t/c` of this rank), `n` heads of this tensor-parallel rank, `d` head width, `e` half of
it.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import all_to_all
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_neobert.errors import ConfigError
from megatron_neobert.model.kernels import compiled_on_cuda

_NO_ENGINE_KERNEL = (
    "Transformer Engine has no fused attention kernel for this model on this GPU, and its unfused one, which stores "
    "all scores, is never used. NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 prints its reasons; use --transformer-impl local, or "
    "install flash-attn."
)


@dataclass
class PackedRow(PackedSeqParams):
    """Document bounds of a row in the form that Megatron's layers pass on, and the rotary angle of each token."""

    # Cosines and sines of the whole row, [t, 1, e] fp32; None: the model has learned positions.
    rotation: tuple[Tensor, Tensor] | None = None


def pack_row(cu_seqlens_n: Tensor, max_seqlen: int, *, rotation: tuple[Tensor, Tensor] | None) -> PackedRow:
    return PackedRow(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens_n,
        cu_seqlens_kv=cu_seqlens_n,
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
        rotation=rotation,
    )


@compiled_on_cuda
def rotate(query_tnd: Tensor, key_tnd: Tensor, cosines_t1e: Tensor, sines_t1e: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the halves of each head of queries and keys in fp32; return the dtypes as given."""

    def turn(layer_tnd: Tensor) -> Tensor:
        first, second = layer_tnd.float().chunk(2, dim=-1)
        turned = (first * cosines_t1e - second * sines_t1e, second * cosines_t1e + first * sines_t1e)
        return torch.cat(turned, dim=-1).to(layer_tnd.dtype)

    return turn(query_tnd), turn(key_tnd)


def positions_in_documents(cu_seqlens_n: Tensor, *, slots: int) -> Tensor:
    """Return each token's place in its document, from 0; [t] int64, without asking the device for a number."""
    starts_t = torch.repeat_interleave(cu_seqlens_n[:-1], cu_seqlens_n.diff(), output_size=slots)
    return torch.arange(slots, device=cu_seqlens_n.device) - starts_t


class CoreAttention(MegatronModule):
    """Rotates queries and keys of a packed row and attends; no parameters.

    The kernel, a class, sees whole rows and this rank's share of the heads. Collective: the context-parallel group.
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
        *,
        kernel: type[torch.nn.Module],
    ) -> None:
        super().__init__(config=config)
        self.group = parallel_state.get_context_parallel_group()
        # A plain copy, since Megatron's checks ran already, for a kernel that sees a share of the heads.
        share: Any = copy.copy(config)
        share.num_attention_heads //= self.group.size()
        share.num_query_groups //= self.group.size()
        self.kernel = kernel(
            config=share,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type=attention_type,
            softmax_scale=softmax_scale,
        )

    def forward(
        self,
        query_tnd: Tensor,
        key_tnd: Tensor,
        value_tnd: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedRow | None = None,
    ) -> Tensor:
        """Returns the context of this rank's tokens, [t/c, n * d], in the dtype of the query."""
        assert isinstance(packed_seq_params, PackedRow), f"{type(packed_seq_params)=}: rows are always packed"
        heads = query_tnd.size(1)
        query, key, value = (self._gather_tokens(tensor) for tensor in (query_tnd, key_tnd, value_tnd))
        if packed_seq_params.rotation is not None:
            query, key = rotate(query, key, *packed_seq_params.rotation)
        try:
            context = self.kernel(
                query, key, value, None, attn_mask_type=attn_mask_type, packed_seq_params=packed_seq_params
            )
        except ValueError as error:
            if "No dot product attention backend" in str(error):  # Transformer Engine 2.9 to 2.20
                raise ConfigError(_NO_ENGINE_KERNEL) from error
            raise
        return self._gather_heads(
            context.unflatten(-1, (heads // self.group.size(), -1)) if context.dim() == 2 else context
        )

    def _gather_tokens(self, tensor_tnd: Tensor) -> Tensor:
        """[t/c, n, d] with all heads to [t, n/c, d] with all tokens."""
        ranks = self.group.size()
        if ranks == 1:
            return tensor_tnd
        by_receiver = tensor_tnd.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()
        return all_to_all(self.group, by_receiver).flatten(0, 1)

    def _gather_heads(self, context_tnd: Tensor) -> Tensor:
        """[t, n/c, d] back to [t/c, n * d]."""
        ranks = self.group.size()
        if ranks == 1:
            return context_tnd.flatten(1)
        by_sender = all_to_all(self.group, context_tnd.unflatten(0, (ranks, -1)).contiguous())
        return by_sender.transpose(0, 1).flatten(1)
