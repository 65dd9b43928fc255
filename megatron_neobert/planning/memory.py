"""Memory of the rank that needs the most, computed from the settings.

Weights, gradients and optimizer state are exact. Activations follow a formula for the tensors that Transformer Engine's
layers keep for the backward pass, with a factor for local layers; docs/cluster.md states its error, and tests/gpu_path
counts the tensors. FP8 counts as bfloat16. The memory of CUDA and NCCL besides tensors is an assumption.
"""

from dataclasses import dataclass

from megatron_neobert.config.schema import Settings
from megatron_neobert.data.batches.windows import masked_capacity
from megatron_neobert.model.flops import count_parameters, moment_bytes

_STATISTIC_BYTES = 4  # float32; norms and attention keep statistics per token
_ASSUMED_CONTEXT_BYTES = 3 << 29  # 1.5 GiB: CUDA context, buffers of NCCL and cuBLAS, and fragmentation
_LOCAL_FACTOR = 1.126  # activations of local layers against Transformer Engine's, counted by tests/gpu_path


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes that one rank needs at the peak of a training step."""

    stage: int  # pipeline stage, from 0
    weights: int
    gradients: int
    optimizer: int  # moments, and float32 main weights if the weights are bfloat16
    activations: int  # kept by the layers for the backward pass, over all micro-batches in flight
    head: int  # logits of the masked tokens
    work: int  # temporary, while the backward pass of a layer or of the head runs
    context: int = _ASSUMED_CONTEXT_BYTES

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.head + self.work + self.context


def masked_tokens(settings: Settings) -> int:
    """Return the number of predicted tokens per micro-batch and context-parallel rank, padded as for a GPU."""
    tokens = settings.tokens_per_micro_batch // settings.parallel.context_parallel_size
    return masked_capacity(tokens, probability=settings.data.predicted_share)


def plan_memory(settings: Settings, *, vocab_size: int, world_size: int) -> RankMemory:
    """Return the memory of a rank in the pipeline stage that needs the most."""
    stages = range(settings.parallel.pipeline_model_parallel_size)
    plans = (plan_stage(settings, vocab_size=vocab_size, world_size=world_size, stage=stage) for stage in stages)
    return max(plans, key=lambda rank: rank.total)


def plan_stage(settings: Settings, *, vocab_size: int, world_size: int, stage: int) -> RankMemory:
    """Return the bytes that a rank of a pipeline stage needs at the peak of a training step."""
    tp, stages = settings.parallel.tensor_model_parallel_size, settings.parallel.pipeline_model_parallel_size
    padded = settings.model.padded_vocab_size(vocab_size, tensor_parallel=tp)
    layer, kept_by_layer = layer_bytes(settings)
    # Warm-up passes, one per later stage, and the pass after them.
    # Source: megatron-core 0.16.1 pipeline_parallel/schedules.py, get_pp_rank_microbatches.
    in_flight = min(stages - stage, settings.micro_batches_per_rank(world_size))
    head = _element_bytes(settings) * masked_tokens(settings) * padded // tp if stage == stages - 1 else 0
    count = count_parameters(settings.model, vocab_size=padded)
    stage_parameters = count.blocks // stages
    stage_parameters += count.embedding + count.positions if stage == 0 else 0
    stage_parameters += count.final_norm + count.decoder if stage == stages - 1 else 0
    # Norms are not split between tensor-parallel ranks; they are a few thousand parameters.
    parameters = stage_parameters / tp
    moments = moment_bytes(settings, stage_parameters, layers=settings.layers_per_stage)
    optimizer = parameters * (moments / stage_parameters + (4 if settings.training.bf16 else 0))
    if settings.use_distributed_optimizer:
        # Context-parallel ranks have the same weights, and share the optimizer state like data-parallel ranks.
        optimizer /= settings.data_parallel_size(world_size) * settings.parallel.context_parallel_size
    return RankMemory(
        stage=stage,
        weights=round(parameters * _element_bytes(settings)),
        gradients=round(parameters * 4),
        optimizer=round(optimizer),
        activations=in_flight * settings.layers_per_stage * kept_by_layer,
        head=head,
        work=max(layer, head),  # gradients of a layer's activations or of the logits
    )


def _element_bytes(settings: Settings) -> int:
    return 2 if settings.training.bf16 else 4


def layer_bytes(settings: Settings) -> tuple[int, int]:
    """Return a layer's activation bytes for a micro-batch on one rank: (all, kept for the backward pass).

    A recomputed layer keeps only its input; otherwise both numbers are equal. Norms count input, output and statistics;
    attention counts q, k, v, result and logsumexp; the feed-forward network counts both halves of SwiGLU and their
    product. A tensor that is the output of one part and the input of the next counts once.
    """
    model, parallel = settings.model, settings.parallel
    hidden = _element_bytes(settings) * model.hidden_size
    norms = 2 * (2 * hidden + _STATISTIC_BYTES)
    attention = 4 * hidden + _STATISTIC_BYTES * model.num_attention_heads
    feed_forward = (3 if model.swiglu else 2) * _element_bytes(settings) * model.ffn_width
    ranks = parallel.context_parallel_size * parallel.tensor_model_parallel_size
    tokens = settings.tokens_per_micro_batch // ranks  # per rank
    factor = _LOCAL_FACTOR if settings.compute.transformer_impl == "local" else 1
    layer = round(tokens * (norms + attention + feed_forward) * factor)
    return layer, tokens * hidden if settings.compute.recompute_granularity == "full" else layer
