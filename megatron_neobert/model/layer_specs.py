"""Which class fills each slot of a transformer layer: Transformer Engine's, or megatron.core's own and torch's.

Both compute the same with the same weights, and a checkpoint of one loads into the other: the local norms carry, in a
checkpoint, the names that they have in Transformer Engine's fused layers.
"""

from dataclasses import dataclass, field
from typing import Any

from megatron.core.extensions.transformer_engine import (
    TEDotProductAttention,
    TELayerNormColumnParallelLinear,
    TENorm,
    TERowParallelLinear,
)
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import nn

from megatron_neobert.config.schema import Settings
from megatron_neobert.model.attention import CoreAttention
from megatron_neobert.model.kernels import choose_kernels
from megatron_neobert.model.packed_kernels import FlashAttention, TorchAttention


class LocalRMSNorm(nn.RMSNorm):
    """Torch's, built as Megatron builds norms. Megatron's own wrapper refuses sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        _mark_for_gradient_reduction(self, config)


class LocalLayerNorm(nn.LayerNorm):
    """Torch's, built as Megatron builds norms; weight and bias."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        _mark_for_gradient_reduction(self, config)


def _mark_for_gradient_reduction(norm: nn.Module, config: TransformerConfig) -> None:
    """A norm that saw some of the tokens has some of the gradient; Megatron sums it over ranks where this is set."""
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Parts:
    """What an implementation puts into the slots of a layer."""

    norm_before_linear: Any
    first_linear: Any
    second_linear: Any
    final_norm: Any
    names_in_checkpoint: dict[str, str] = field(default_factory=dict)


# The names that norms of their own have in a checkpoint.
NORM_NAMES = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
_TRANSFORMER_ENGINE = _Parts(
    norm_before_linear=IdentityOp,  # part of the linear layer
    first_linear=TELayerNormColumnParallelLinear,
    second_linear=TERowParallelLinear,
    final_norm=TENorm,
)
_LOCAL_NORMS = {"RMSNorm": LocalRMSNorm, "LayerNorm": LocalLayerNorm}
_ATTENTION = {"transformer_engine": TEDotProductAttention, "torch": TorchAttention, "flash_attn": FlashAttention}


def layer_spec(settings: Settings) -> TransformerBlockSubmodules:
    """The layers of one pipeline stage, or of one model chunk of an interleaved pipeline; all are of one length."""
    kernels = choose_kernels(settings)
    norm = _LOCAL_NORMS[settings.model.normalization]
    parts = _Parts(norm, ColumnParallelLinear, RowParallelLinear, final_norm=norm, names_in_checkpoint=NORM_NAMES)
    if kernels.transformer_impl == "transformer_engine":
        parts = _TRANSFORMER_ENGINE
    layer = _layer(parts, attention=_ATTENTION[kernels.attention])
    # The final norm does not come from the layer's spec: without it here it would be the norm that Megatron finds.
    return TransformerBlockSubmodules(layer_specs=[layer] * settings.layers_per_stage, layer_norm=parts.final_norm)


def _layer(parts: _Parts, *, attention: type[nn.Module]) -> ModuleSpec:
    # The mask type "padding" is Transformer Engine's word for documents bounded by cu_seqlens; its default is causal.
    self_attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.padding},
        submodules=SelfAttentionSubmodules(
            linear_qkv=parts.first_linear,
            core_attention=ModuleSpec(module=CoreAttention, params={"kernel": attention}),
            linear_proj=parts.second_linear,
        ),
    )
    mlp = ModuleSpec(
        module=MLP, submodules=MLPSubmodules(linear_fc1=parts.first_linear, linear_fc2=parts.second_linear)
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=parts.norm_before_linear,
            self_attention=self_attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=parts.norm_before_linear,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=parts.names_in_checkpoint,
        ),
    )
