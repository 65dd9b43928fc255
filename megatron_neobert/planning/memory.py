"""Memory of a rank by arithmetic, for the fullest rank.

Weights, gradients and optimizer state are exact. Activations are one formula: what Transformer Engine's layers keep of
a forward pass (docs/cluster.md states its error; tests/gpu_path counts tensors). FP8 counts as bfloat16. What CUDA and
NCCL take besides tensors is an assumption.
"""

from dataclasses import dataclass

from megatron_neobert.config.schema import Settings
from megatron_neobert.model.flops import count_parameters, moment_bytes

_STATISTIC_BYTES = 4  # a float32, as norms and attention keep some per token
_ASSUMED_CONTEXT_BYTES = 3 << 29  # 1.5 GiB: CUDA's context, NCCL's and cuBLAS's buffers, and gaps between tensors


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of one rank at the fullest moment of a training step."""

    stage: int  # of the pipeline, from 0
    weights: int
    gradients: int
    optimizer: int  # moments, and float32 main weights if the weights are bfloat16
    activations: int  # kept for the backward pass by the layers of all micro-batches in flight
    head: int  # kept by the head: mostly logits of the masked tokens
    work: int  # freed again when a layer or the head is done
    context: int = _ASSUMED_CONTEXT_BYTES

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.head + self.work + self.context


def plan_memory(settings: Settings, *, vocab_size: int, world_size: int, masked_tokens: int) -> RankMemory:
    """Return the memory of the fullest rank; `masked_tokens` are those of a micro-batch on a context-parallel rank."""
    tp, stages = settings.parallel.tensor_model_parallel_size, settings.parallel.pipeline_model_parallel_size
    padded = settings.model.padded_vocab_size(vocab_size, tensor_parallel=tp)
    layer, kept = layer_bytes(settings)
    logits = _element_bytes(settings) * masked_tokens * padded // tp
    ranks = []
    for stage in range(stages):
        # Source: megatron-core 0.16.1 pipeline_parallel/schedules.py, get_pp_rank_microbatches: the passes of the
        # warm-up, one for each later stage, and the pass that follows them.
        in_flight = min(stages - stage, settings.micro_batches_per_rank(world_size))
        head = logits if stage == stages - 1 else 0
        weights, gradients, optimizer = _state_bytes(settings, padded, stage=stage, world_size=world_size)
        ranks.append(
            RankMemory(
                stage=stage,
                weights=weights,
                gradients=gradients,
                optimizer=optimizer,
                activations=in_flight * settings.layers_per_stage * kept,
                head=head,
                work=max(layer, head),  # gradients of a layer's activations, or of the logits
            )
        )
    return max(ranks, key=lambda rank: rank.total)


def _element_bytes(settings: Settings) -> int:
    return 2 if settings.training.bf16 else 4


def layer_bytes(settings: Settings) -> tuple[int, int]:
    """Return the bytes of one layer's activations of a micro-batch, and those that it keeps for the backward pass.

    Norms: input, output, statistics. Attention: q, k, v, result, logsumexp. Feed-forward: both halves of SwiGLU and
    their product. The product of each is the next one's input. A recomputed layer keeps its input.
    """
    model, parallel = settings.model, settings.parallel
    hidden = _element_bytes(settings) * model.hidden_size
    norms = 2 * (2 * hidden + _STATISTIC_BYTES)
    attention = 4 * hidden + _STATISTIC_BYTES * model.num_attention_heads
    feed_forward = (3 if model.swiglu else 2) * _element_bytes(settings) * model.ffn_width
    ranks = parallel.context_parallel_size * parallel.tensor_model_parallel_size
    tokens = settings.tokens_per_micro_batch // ranks  # of a rank
    layer = tokens * (norms + attention + feed_forward)
    return layer, tokens * hidden if settings.compute.recompute_granularity == "full" else layer


def _state_bytes(settings: Settings, padded_vocab_size: int, *, stage: int, world_size: int) -> tuple[int, int, int]:
    """Return the bytes of weights, gradients and optimizer of a rank of a pipeline stage."""
    parallel, training, stages = settings.parallel, settings.training, settings.parallel.pipeline_model_parallel_size
    count = count_parameters(settings.model, vocab_size=padded_vocab_size)
    whole = count.blocks // stages
    whole += count.embedding + count.positions if stage == 0 else 0
    whole += count.final_norm + count.decoder if stage == stages - 1 else 0
    own = whole / parallel.tensor_model_parallel_size  # norms are not shared: a few thousand
    # Context-parallel ranks hold the same weights, and share the optimizer's work like data-parallel ones.
    replicas = settings.data_parallel_size(world_size) * parallel.context_parallel_size
    moments = moment_bytes(settings, whole, layers=settings.layers_per_stage)
    optimizer = own * (moments / whole + (4 if training.bf16 else 0))  # main weights, where the weights are not
    optimizer /= replicas if parallel.use_distributed_optimizer else 1
    return round(own * _element_bytes(settings)), round(own * 4), round(optimizer)
