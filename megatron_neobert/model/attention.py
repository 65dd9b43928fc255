"""Rotary embedding and context parallelism around an attention kernel, and the kernel of the local layers.

A context-parallel rank holds a contiguous slice of the micro-batch's tokens and all heads, but attention needs whole
documents. An all-to-all before the kernel exchanges heads for tokens, and another one after the kernel exchanges them
back (DeepSpeed Ulysses), so documents need no padding. Queries and keys are rotated between the two. The fp32 angles
are computed once per micro-batch and shared by all layers, with and without Transformer Engine.

Shapes: `t` tokens of the micro-batch (`t/c` on one context-parallel rank), `s` tokens of a document, `n` heads of this
tensor-parallel rank, `d` head width, `e` half the head width.
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
from torch.nn.functional import pad, scaled_dot_product_attention

from megatron_neobert.config.rules import HEAD_WIDTH_MULTIPLE
from megatron_neobert.errors import ConfigError
from megatron_neobert.model.kernels import choose_packed_attention, compiled_on_cuda

_NO_ENGINE_KERNEL = (
    "Transformer Engine has no fused attention kernel for this model on this GPU; NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 "
    "prints its reasons. Use --transformer-impl local, or install flash-attn."
)


@dataclass
class RotaryPackedSeqParams(PackedSeqParams):
    """Megatron's description of packed documents, extended by the tokens' rotary angles and the kind of attention."""

    # Cosines and sines of all tokens, [t, 1, e], fp32; None for a model with learned positions.
    rotation: tuple[Tensor, Tensor] | None = None
    is_causal: bool = False


@compiled_on_cuda
def rotate(query_tnd: Tensor, key_tnd: Tensor, cosines_t1e: Tensor, sines_t1e: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the halves of each head in fp32. Return queries and keys in the dtypes of the inputs."""

    def rotate_halves(heads_tnd: Tensor) -> Tensor:
        first, second = heads_tnd.float().chunk(2, dim=-1)
        rotated = (first * cosines_t1e - second * sines_t1e, second * cosines_t1e + first * sines_t1e)
        return torch.cat(rotated, dim=-1).to(heads_tnd.dtype)

    return rotate_halves(query_tnd), rotate_halves(key_tnd)


class CoreAttention(MegatronModule):
    """Rotary embedding, context-parallel exchange and attention kernel, without parameters.

    Args:
        kernel: Class of the attention kernel, which computes all tokens for this rank's share of the heads.
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
        # copy.copy does not repeat Megatron's checks of the config.
        kernel_config: Any = copy.copy(config)
        kernel_config.num_attention_heads //= self.group.size()
        kernel_config.num_query_groups //= self.group.size()
        self.kernel = kernel(
            config=kernel_config,
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
        packed_seq_params: RotaryPackedSeqParams | None = None,
    ) -> Tensor:
        """Return the context of this rank's tokens, [t/c, n * d], in the dtype of the query.

        For t tokens on c context-parallel ranks, queries, keys and values are [t/c, n, d]: n heads of width d. The
        caller must not rotate queries and keys. `packed_seq_params` is required: it contains the rotation, the
        documents of all ranks and the kind of attention. The arguments about masks and bias have no effect. Raise
        ConfigError if Transformer Engine has no fused attention kernel for this model on this GPU.

        Collective: the context-parallel group.
        """
        assert isinstance(packed_seq_params, RotaryPackedSeqParams), f"{type(packed_seq_params)=}: always packed"
        heads = query_tnd.size(1)
        query, key, value = (self._gather_tokens(tensor) for tensor in (query_tnd, key_tnd, value_tnd))
        if packed_seq_params.rotation is not None:
            query, key = rotate(query, key, *packed_seq_params.rotation)
        try:
            mask_type = AttnMaskType.padding_causal if packed_seq_params.is_causal else AttnMaskType.padding
            context = self.kernel(
                query, key, value, None, attn_mask_type=mask_type, packed_seq_params=packed_seq_params
            )
        except ValueError as error:
            if "No dot product attention backend" in str(error):  # message of Transformer Engine 2.9 to 2.20
                raise ConfigError(_NO_ENGINE_KERNEL) from error
            raise
        return self._gather_heads(context.reshape(len(context), heads // self.group.size(), -1))

    def _gather_tokens(self, heads_tnd: Tensor) -> Tensor:
        """Exchange heads for tokens: [t/c, n, d] becomes [t, n/c, d]. Collective: the context-parallel group."""
        ranks = self.group.size()
        if ranks == 1:
            return heads_tnd
        by_receiver = heads_tnd.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()
        return all_to_all(self.group, by_receiver).flatten(0, 1)

    def _gather_heads(self, context_tnd: Tensor) -> Tensor:
        """Exchange tokens for heads: [t, n/c, d] becomes [t/c, n * d]. Collective: the context-parallel group."""
        ranks = self.group.size()
        if ranks == 1:
            return context_tnd.flatten(1)
        by_sender = all_to_all(self.group, context_tnd.unflatten(0, (ranks, -1)).contiguous())
        return by_sender.transpose(0, 1).flatten(1)


class TorchAttention(MegatronModule):
    """Attention kernel of the local layers: bidirectional within each document of a micro-batch, without parameters.

    On CUDA in bfloat16, a micro-batch is one call of FlashAttention, which does not wait for the device;
    `kernels.choose_packed_attention` chooses the version. Otherwise, each document is one call of torch's
    scaled_dot_product_attention, and on CUDA the host waits for the lengths of the documents. On CPU, this loop is 2.7
    times faster than nested tensors and 2.2 times faster than a block-diagonal mask; torch has no packed kernel for
    CPUs.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
    ) -> None:
        super().__init__(config=config)
        assert attn_mask_type is AttnMaskType.padding, f"{attn_mask_type=}: the default is bidirectional"
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
        """Return the context, [t, n * d], in the dtype of the query.

        Each token attends to its whole document or, if `attn_mask_type` is padding_causal, to no later tokens.
        `packed_seq_params`, the document bounds, is required. `attention_mask` is not used.
        """
        assert packed_seq_params is not None, "a micro-batch is always packed"
        is_causal = attn_mask_type is AttnMaskType.padding_causal
        if query_tnd.is_cuda and query_tnd.dtype is torch.bfloat16:
            width = query_tnd.size(-1)
            # Zero channels do not change the product of a query and a key. The scale is computed from the true width.
            padding = -width % HEAD_WIDTH_MULTIPLE
            heads = [pad(tensor, (0, padding)) if padding else tensor for tensor in (query_tnd, key_tnd, value_tnd)]
            attend, _ = choose_packed_attention(width + padding)
            bounds = (packed_seq_params.cu_seqlens_q, packed_seq_params.max_seqlen_q)
            context_tnd = attend(heads, *bounds, scale=width**-0.5, is_causal=is_causal)
            return context_tnd[:, :, :width].flatten(1)
        bounds_n = packed_seq_params.cu_seqlens_q
        return attend_by_document(query_tnd, key_tnd, value_tnd, bounds_n, is_causal=is_causal)


def attend_by_document(
    query_tnd: Tensor, key_tnd: Tensor, value_tnd: Tensor, cu_seqlens_n: Tensor, *, is_causal: bool = False
) -> Tensor:
    """Return the context, [t, n * d], with one kernel call per document. Empty documents are skipped."""
    lengths = [length for length in cu_seqlens_n.diff().tolist() if length]
    documents = zip(*(tensor_tnd.split(lengths) for tensor_tnd in (query_tnd, key_tnd, value_tnd)), strict=True)
    contexts = []
    for document in documents:
        # Torch's fused kernels need four dimensions, [1, n, s, d].
        query, key, value = (tensor_snd.transpose(0, 1).unsqueeze(0) for tensor_snd in document)
        context = scaled_dot_product_attention(query, key, value, is_causal=is_causal)
        contexts.append(context.squeeze(0).transpose(0, 1).flatten(1))
    return torch.cat(contexts)
