"""Our settings as Megatron's TransformerConfig and as the classes of its layers; the only module that knows both.

Transformer Engine's classes, or megatron.core's own and torch's: both compute the same with the same weights, and a
checkpoint of one loads into the other: the local norms carry, in a checkpoint, the names that they have in Transformer
Engine's fused layers.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import (
    TEDotProductAttention,
    TELayerNormColumnParallelLinear,
    TENorm,
    TERowParallelLinear,
)
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
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


def to_transformer_config(settings: Settings) -> TransformerConfig:
    """NeoBERT as Megatron describes it: pre-norm, no biases, no dropout.

    Rotation is CoreAttention's (attention.py): the halves of a head, which suits every fused kernel. The published
    weights rotate adjacent pairs; the difference is a permutation of q and k rows, applied when weights are converted
    (checkpoint_conversion/mapping.py).
    """
    model, training = settings.model, settings.training
    kernels = choose_kernels(settings)
    dtype = torch.bfloat16 if training.bf16 else torch.float32
    compute, parallel = settings.compute, settings.parallel
    recomputes_layers = compute.recompute_granularity == "full"
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_attention_heads,
        ffn_hidden_size=model.ffn_width,
        normalization=model.normalization,
        layernorm_epsilon=model.norm_epsilon,
        gated_linear_unit=model.swiglu,
        activation_func=torch.nn.functional.silu if model.swiglu else torch.nn.functional.gelu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # Weights are filled by initialization.py, equal for every layout; Megatron's own would depend on it.
        perform_initialization=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        bf16=training.bf16,
        params_dtype=dtype,
        # The loss is summed and divided once per iteration, by the masked tokens of all ranks and micro-batches.
        calculate_per_token_loss=training.loss_normalization == "global",
        # Fused variants are compiled by Inductor, which takes longer than a test runs.
        bias_activation_fusion=model.swiglu and torch.cuda.is_available(),
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=kernels.gradient_accumulation_fusion,
        attention_backend=AttnBackend[kernels.attention_backend],
        # Of loss.py. Eager on a CPU, with a vocabulary of 30,592, it takes 3.7 times as long as Megatron's own.
        cross_entropy_loss_fusion=torch.cuda.is_available(),
        # Context parallelism is not named: layers see a slice of tokens and need not know that (attention.py).
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        pipeline_dtype=dtype,
        # By default the host waits for the device after every send and receive, for the sake of old releases of torch.
        batch_p2p_sync=False,
        recompute_granularity=compute.recompute_granularity,
        recompute_method="uniform" if recomputes_layers else None,
        recompute_num_layers=1 if recomputes_layers else None,
        fp8=compute.fp8_format,
        fp8_recipe=compute.fp8_recipe,
        # Of the recipe "delayed". Megatron's default is the amax of the last iteration alone.
        fp8_amax_history_len=1024,
        fp8_amax_compute_algo="max",
    )


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
    """Modules of one implementation for the slots of a layer."""

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
    """Return the layers of a pipeline stage; all stages have the same number."""
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
