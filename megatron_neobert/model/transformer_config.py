"""Our settings as Megatron's TransformerConfig; the only module that knows both."""

import torch
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_neobert.config.schema import ParallelConfig, Settings
from megatron_neobert.model.kernels import choose_kernels, fp8_arguments


def to_transformer_config(settings: Settings) -> TransformerConfig:
    """NeoBERT as Megatron describes it: pre-norm, no biases, no dropout.

    Rotation is CoreAttention's (attention.py): the halves of a head, which suits every fused kernel. The published
    weights rotate adjacent pairs; the difference is a permutation of q and k rows, applied when weights are converted
    (checkpoint_conversion/mapping.py).
    """
    model, training = settings.model, settings.training
    kernels = choose_kernels(settings)
    dtype = torch.bfloat16 if training.bf16 else torch.float32
    fuses_loss = settings.compute.cross_entropy_loss_fusion
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
        cross_entropy_loss_fusion=torch.cuda.is_available() if fuses_loss is None else fuses_loss,
        cross_entropy_fusion_impl=settings.compute.cross_entropy_fusion_impl,
        **_layout_arguments(settings.parallel, settings),
        recompute_granularity=settings.compute.recompute_granularity,
        recompute_method=settings.compute.recompute_method,
        recompute_num_layers=settings.compute.recompute_num_layers,
        **fp8_arguments(settings.compute),
    )


def _layout_arguments(parallel: ParallelConfig, settings: Settings) -> dict:
    """How Megatron's layers and schedules share the work.

    Context parallelism is not among it: layers see a slice of tokens and need not know that it is one (attention.py).
    """
    arguments = {
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "sequence_parallel": parallel.sequence_parallel,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "pipeline_dtype": torch.bfloat16 if settings.training.bf16 else torch.float32,
        # By default the host waits for the device after every send and receive, for the sake of old releases of torch.
        "batch_p2p_sync": False,
    }
    if settings.virtual_stages_per_rank > 1:
        # With two stages both neighbours are one rank, and batched sends and receives of megatron.core 0.16.1 then
        # pair the wrong ones: equal shapes, wrong activations, no error.
        arguments |= {
            "virtual_pipeline_model_parallel_size": settings.virtual_stages_per_rank,
            "overlap_p2p_comm": True,
            "batch_p2p_comm": False,
        }
    return arguments
