"""Memory of a rank by arithmetic, for the fullest rank.

Weights, gradients and optimizer state are exact. Activations are one formula: what Transformer Engine's layers keep in
a forward pass (docs/memory.md states its error; tests/unit/planning/test_memory.py counts tensors). FP8 counts as
bfloat16. What CUDA and NCCL take besides tensors is an assumption.

Letters in comments: `t` tokens of a rank, `h` hidden, `f` feed-forward, `n` heads, `v` vocabulary, `m` masked tokens;
`e` bytes of an element, 2 or 4. A tensor-parallel rank has its share of everything per layer.
"""

from dataclasses import dataclass

from megatron_neobert.config.schema import Settings
from megatron_neobert.model.flops import count_parameters, moment_bytes

_STATISTIC_BYTES = 4  # a float32, as norms and attention keep some per token
_TOKEN_ID_BYTES = 8
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
    def state(self) -> int:
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        return self.state + self.activations + self.head + self.work + self.context


def plan_memory(settings: Settings, *, vocab_size: int, world_size: int, masked_tokens: int) -> RankMemory:
    """Return the memory of the fullest rank.

    Args:
        vocab_size: Tokens of the tokenizer, unpadded.
        masked_tokens: Predicted tokens of a micro-batch on one context-parallel rank.
    """
    model, parallel = settings.model, settings.parallel
    tp, stages = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    padded = model.padded_vocab_size(vocab_size, tensor_parallel=tp)
    element, tokens = element_bytes(settings), settings.tokens_per_micro_batch // parallel.context_parallel_size
    hidden_bytes = element * model.hidden_size * tokens // tp  # the hidden states between two layers
    logits_bytes = element * masked_tokens * padded // tp
    recomputed, kept = layers_of_pass(settings)
    if stages > 1:
        kept += 2 * hidden_bytes  # received from the stage before, and sent to the next stage
    ranks = []
    for stage in range(stages):
        # Source: megatron-core 0.16.1 pipeline_parallel/schedules.py, get_pp_rank_microbatches: the passes of the
        # warm-up, one for each later stage, and the pass that follows them.
        in_flight = min(stages - stage, settings.micro_batches_per_rank(world_size))
        token_ids = _TOKEN_ID_BYTES * tokens * (2 if model.position_rows else 1) if stage == 0 else 0
        activations, head = in_flight * (kept + token_ids), 0
        # When the backward pass enters a layer: the gradients of its output and of the feed-forward's factors.
        work = recomputed + hidden_bytes + element * (2 if model.swiglu else 1) * model.ffn_width * tokens // tp
        if stage == stages - 1:
            activations += hidden_bytes + _STATISTIC_BYTES * tokens // tp  # of the final norm
            head = (
                element * model.hidden_size * masked_tokens + logits_bytes + (2 * _TOKEN_ID_BYTES + 2) * masked_tokens
            )
            # The head is done, and what it kept is gone, before the first layer is.
            work = max(hidden_bytes + logits_bytes, element * padded // tp * model.hidden_size, work - head, 0)
        weights, gradients, optimizer = state_bytes(settings, padded, stage=stage, world_size=world_size)
        ranks.append(
            RankMemory(
                stage=stage,
                weights=weights,
                gradients=gradients,
                optimizer=optimizer,
                activations=activations,
                head=head,
                work=work,
            )
        )
    return max(ranks, key=lambda rank: rank.total)


def element_bytes(settings: Settings) -> int:
    return 2 if settings.training.bf16 else 4


def layer_bytes(settings: Settings) -> tuple[int, int]:
    """Return the bytes that one layer keeps of a micro-batch, without attention and in attention.

    Norms: input, output, statistics. Attention: q, k, v, result, logsumexp; an exchange between context-parallel ranks
    copies the result. Feed-forward: both halves of SwiGLU and their product.
    """
    model, parallel = settings.model, settings.parallel
    element, width = element_bytes(settings), model.hidden_size
    tokens = settings.tokens_per_micro_batch // parallel.context_parallel_size
    statistics = _STATISTIC_BYTES * (1 if model.normalization == "RMSNorm" else 2)
    norms = 2 * (2 * element * width + statistics)
    copies = 1 if parallel.context_parallel_size > 1 or not settings.training.bf16 else 0
    attention = (3 + copies) * element * width + _STATISTIC_BYTES * model.num_attention_heads
    feed_forward = (3 if model.swiglu else 2) * element * model.ffn_width
    tp = parallel.tensor_model_parallel_size
    return (norms + element * width + feed_forward) * tokens // tp, attention * tokens // tp


def layers_of_pass(settings: Settings) -> tuple[int, int]:
    """Return the bytes of recomputation, and those that all layers of a stage keep of a micro-batch."""
    model, parallel, layers = settings.model, settings.parallel, settings.layers_per_stage
    element, tp = element_bytes(settings), parallel.tensor_model_parallel_size
    tokens = settings.tokens_per_micro_batch // parallel.context_parallel_size
    without_attention, attention = layer_bytes(settings)
    hidden = element * model.hidden_size * tokens // tp
    if settings.compute.recompute_granularity == "full":
        return without_attention + attention, layers * hidden
    if settings.compute.recompute_granularity == "selective":
        return attention, layers * (without_attention + 3 * hidden)  # the attention's input: q, k and v
    rotation = 0
    if model.position_embedding_type == "rope":  # cosines and sines of half of a head's channels, for all layers
        rotation = _STATISTIC_BYTES * model.hidden_size // model.num_attention_heads * settings.tokens_per_micro_batch
    return 0, layers * (without_attention + attention) + rotation


def state_bytes(settings: Settings, padded_vocab_size: int, *, stage: int, world_size: int) -> tuple[int, int, int]:
    """Return the bytes of weights, gradients and optimizer of a rank of a pipeline stage."""
    parallel, training, stages = settings.parallel, settings.training, settings.parallel.pipeline_model_parallel_size
    count = count_parameters(settings.model, vocab_size=padded_vocab_size)
    whole = count.blocks // stages
    whole += count.embedding + count.positions if stage == 0 else 0
    whole += count.final_norm + count.decoder if stage == stages - 1 else 0
    own = whole / parallel.tensor_model_parallel_size  # norms are not shared: a few thousand
    # Context-parallel ranks hold the same weights, and share the optimizer's work like data-parallel ones.
    replicas = settings.data_parallel_size(world_size) * parallel.context_parallel_size
    moments = moment_bytes(settings, whole, layers=settings.model.num_layers // stages)
    optimizer = own * (moments / whole + (4 if training.bf16 else 0))  # main weights, where the weights are not
    optimizer /= replicas if parallel.use_distributed_optimizer else 1
    return round(own * element_bytes(settings)), round(own * 4), round(optimizer)
