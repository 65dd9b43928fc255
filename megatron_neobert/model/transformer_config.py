"""Our settings as Megatron's TransformerConfig; the only place where both meet."""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_neobert.config import Settings


def to_transformer_config(settings: Settings) -> TransformerConfig:
    """NeoBERT as Megatron describes it: pre-RMSNorm, SwiGLU, no biases, no dropout.

    RoPE is half-rotation: every fused kernel likes it, and megatron.core 0.16.1 silently ignores
    `rotary_interleaved` on fused packed input. The published weights rotate adjacent pairs; the difference is a
    permutation of q and k rows, applied when weights are converted (checkpoint_conversion/mapping.py).
    """
    model, parallel, training = settings.model, settings.parallel, settings.training
    dtype = torch.bfloat16 if training.bf16 else torch.float32
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_attention_heads,
        ffn_hidden_size=model.swiglu_width,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_epsilon,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        rotary_interleaved=False,
        # Weights are filled by initialization.py, equal for every layout; Megatron's own would depend on it.
        perform_initialization=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        bf16=training.bf16,
        params_dtype=dtype,
        # The loss is summed and divided once per iteration, by the masked tokens of all ranks and micro-batches.
        calculate_per_token_loss=training.loss_normalization == "global",
        # Fused variants are compiled by Inductor, which takes longer than a test runs.
        bias_activation_fusion=torch.cuda.is_available(),
        bias_dropout_fusion=False,
        # Needs Apex for the output layer; gradients are accumulated in float32 with or without it.
        gradient_accumulation_fusion=False,
    )
