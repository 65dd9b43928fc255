"""Conversion of our settings to Megatron's TransformerConfig and layer classes.

Layers are built from Transformer Engine's classes, or from classes of megatron.core and torch. Both compute the same
function and share checkpoints: local norms are stored under the names of Transformer Engine's fused layers.
"""

import torch
from megatron.core.extensions.transformer_engine import (
    TEDotProductAttention,
    TEFusedMLP,
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
from torch import Tensor, nn

from megatron_neobert.config.schema import Settings
from megatron_neobert.model.attention import CoreAttention, TorchAttention
from megatron_neobert.model.kernels import choose_kernels, compiled_on_cuda


def to_transformer_config(settings: Settings) -> TransformerConfig:
    """Return Megatron's configuration of NeoBERT: pre-norm, no biases, no dropout.

    Megatron's rotary embedding is off, because CoreAttention (attention.py) rotates the halves of each head. Published
    weights rotate adjacent channels, so conversion (checkpoint_conversion/mapping.py) permutes queries and keys.
    """
    model, training = settings.model, settings.training
    kernels = choose_kernels(settings)
    dtype = torch.bfloat16 if training.bf16 else torch.float32
    compute, parallel, has_cuda = settings.compute, settings.parallel, torch.cuda.is_available()
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
        # initialization.py sets the weights. Megatron's initial weights would depend on the layout.
        perform_initialization=False,
        use_cpu_initialization=not has_cuda,
        bf16=training.bf16,
        params_dtype=dtype,
        # Divide the summed loss once per iteration, by the masked tokens of all ranks and micro-batches.
        calculate_per_token_loss=training.loss_normalization == "global",
        # Inductor compiles the fused variant, which on CPU takes longer than a test.
        bias_activation_fusion=model.swiglu and has_cuda,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=kernels.gradient_accumulation_fusion,
        attention_backend=AttnBackend[kernels.attention_backend],
        # On a CPU, the fused loss (loss.py) takes 3.7 times as long as Megatron's unfused loss, with 30,592 ids.
        cross_entropy_loss_fusion=has_cuda,
        # context_parallel_size stays 1: CoreAttention exchanges tokens itself, and other layers work on any slice.
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        # Tensor-parallel ranks divide the tokens among themselves outside the matrix products.
        sequence_parallel=parallel.tensor_model_parallel_size > 1,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        pipeline_dtype=dtype,
        # The default makes the host wait for the device after every send and receive, which only old torch needs.
        batch_p2p_sync=False,
        recompute_granularity=compute.recompute_granularity,
        recompute_method="uniform" if recomputes_layers else None,
        recompute_num_layers=1 if recomputes_layers else None,
        fp8=compute.fp8_format,
        fp8_recipe=compute.fp8_recipe,
        # For the recipe "delayed". Megatron's default uses only the amax of the last iteration.
        fp8_amax_history_len=1024,
        fp8_amax_compute_algo="max",
    )


@compiled_on_cuda
def rms_norm(hidden_h: Tensor, weight_h: Tensor, eps: float) -> Tensor:
    """Apply torch's RMSNorm to the last dimension of `hidden_h`, [..., h]. Shape and dtype stay the same."""
    return torch.nn.functional.rms_norm(hidden_h, weight_h.shape, weight_h, eps)


class CompiledRMSNorm(nn.RMSNorm):
    """nn.RMSNorm, compiled on CUDA: torch's own kernels take 2.6 times as long there (docs/performance.md)."""

    def forward(self, hidden_h: Tensor) -> Tensor:
        """Return the normalised hidden states, in the shape and dtype of the input."""
        return rms_norm(hidden_h, self.weight, self.eps)


class LocalNorm:
    """RMSNorm or LayerNorm, built from Megatron's arguments. Megatron's own class refuses sequence parallelism."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float) -> nn.Module:  # type: ignore[misc]
        norm_class = CompiledRMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
        norm = norm_class(hidden_size, eps=eps, dtype=config.params_dtype)
        # With sequence parallelism, each rank's norm sees a part of the tokens. Megatron sums the gradients of
        # parameters with this attribute over the ranks.
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


# Names of the local norms' parameters -> names in a checkpoint.
NORM_NAMES = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
_ATTENTION = {"transformer_engine": TEDotProductAttention, "torch": TorchAttention}


def layer_spec(settings: Settings) -> TransformerBlockSubmodules:
    """Return Megatron's layer specification, the same for every pipeline stage: identical layers and a final norm."""
    kernels = choose_kernels(settings)
    norm: type
    if kernels.transformer_impl == "transformer_engine":
        norm, final_norm = IdentityOp, TENorm  # the linear layer includes the norm before it
        # The fused MLP computes SwiGLU and its cast to FP8 in one kernel. It has no blockwise FP8, and its GELU is an
        # approximation.
        mlp = TEFusedMLP if settings.model.swiglu and settings.compute.fp8_recipe != "blockwise" else MLP
        first_linear, second_linear, names_in_checkpoint = TELayerNormColumnParallelLinear, TERowParallelLinear, {}
    else:
        norm, final_norm, mlp = LocalNorm, LocalNorm, MLP
        first_linear, second_linear, names_in_checkpoint = ColumnParallelLinear, RowParallelLinear, NORM_NAMES
    self_attention = ModuleSpec(
        module=SelfAttention,
        # "padding" is Transformer Engine's name for documents bounded by cu_seqlens. The default is causal.
        params={"attn_mask_type": AttnMaskType.padding},
        submodules=SelfAttentionSubmodules(
            linear_qkv=first_linear,
            core_attention=ModuleSpec(module=CoreAttention, params={"kernel": _ATTENTION[kernels.attention]}),
            linear_proj=second_linear,
        ),
    )
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=self_attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=ModuleSpec(module=mlp, submodules=MLPSubmodules(linear_fc1=first_linear, linear_fc2=second_linear)),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=names_in_checkpoint,
        ),
    )
    # Without layer_norm, Megatron would choose the class of the final norm itself.
    return TransformerBlockSubmodules(layer_specs=[layer] * settings.layers_per_stage, layer_norm=final_norm)
