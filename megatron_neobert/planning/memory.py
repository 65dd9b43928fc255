"""Memory of a rank by arithmetic: weights, gradients, optimizer, activations, and what is needed while it computes.

Answers for the fullest rank. What autograd keeps of a micro-batch is read off the code that runs: torch's operations on
a CPU, the fused ones on a GPU, or Transformer Engine's modules. For the CPU the sums equal what autograd really saves
(tests/unit/planning/test_memory.py and benchmarks/benchmark_memory.py count it, docs/memory.md has the table); for GPUs
they are derived in the same way and have not been measured. What a GPU takes besides tensors is an assumption, named as
such. FP8 counts as bfloat16.

Letters in comments: `t` tokens, `h` hidden, `f` feed-forward, `n` heads, `d` head width, `v` vocabulary, `m` masked
tokens; `e` bytes of an element, 2 or 4. A tensor-parallel rank has its share of f, n and v.
"""

from dataclasses import dataclass
from typing import Literal

from megatron_neobert.config.schema import Settings
from megatron_neobert.model.flops import count_parameters, moment_bytes

Kernels = Literal["cpu", "gpu", "transformer_engine"]  # of torch on the one or the other, or Transformer Engine's
STATISTIC = 4  # bytes of a float32, as norms and attention keep some per token
TOKEN_ID = 8  # bytes of an int64
ASSUMED_CONTEXT_BYTES = 3 << 29  # 1.5 GiB: CUDA's context, NCCL's and cuBLAS's buffers, and gaps between tensors


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One micro-batch on one rank.

    Args:
        masked_tokens: Positions that the head computes on this rank.
        vocab_size: Tokens of the tokenizer, unpadded.
    """

    settings: Settings
    kernels: Kernels
    masked_tokens: int
    vocab_size: int

    # ---- sizes

    @property
    def element(self) -> int:
        return 2 if self.settings.training.bf16 else 4

    @property
    def tokens(self) -> int:
        """Of this context-parallel rank."""
        return self.settings.tokens_per_micro_batch // self.settings.parallel.context_parallel_size

    @property
    def tokens_of_norms(self) -> int:
        """Sequence parallelism shares out what lies between the matrices."""
        parallel = self.settings.parallel
        return self.tokens // (parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1)

    @property
    def fuses_loss(self) -> bool:
        return self.kernels != "cpu"

    def share(self, size: int) -> int:
        """Of something that tensor parallelism divides: heads x head width, feed-forward, vocabulary."""
        return size // self.settings.parallel.tensor_model_parallel_size

    @property
    def hidden_bytes(self) -> int:
        """The hidden states between two layers: e h t."""
        return self.element * self.settings.model.hidden_size * self.tokens_of_norms

    @property
    def logits(self) -> int:
        """How many: m v."""
        padded = self.settings.model.padded_vocab_size(
            self.vocab_size, tensor_parallel=self.settings.parallel.tensor_model_parallel_size
        )
        return self.masked_tokens * self.share(padded)

    # ---- saved

    @property
    def layer_bytes(self) -> int:
        """One layer without recomputation."""
        # The attention's result once more, for the matrix behind it: the kernel's own output is another tensor.
        return 2 * self._norm_bytes + self.attention_bytes + self._context_bytes + self._mlp_bytes

    @property
    def final_norm_bytes(self) -> int:
        """Without its output: the head reads some rows of it, which are counted there."""
        return self._norm_bytes - self.hidden_bytes

    @property
    def head_bytes(self) -> int:
        """Hidden states and probabilities (float32), fused the logits, of the masked tokens; and the labels' places."""
        hidden = self.element * self.settings.model.hidden_size * self.masked_tokens
        kept = (self.element if self.fuses_loss else STATISTIC) * self.logits
        return hidden + kept + (2 * TOKEN_ID + 2) * self.masked_tokens

    @property
    def embedding_bytes(self) -> int:
        """Which rows of the tables: token ids, and positions where these are learned."""
        return TOKEN_ID * self.tokens * (2 if self.settings.model.position_rows else 1)

    @property
    def _norm_bytes(self) -> int:
        """Input, statistics, and the output, which the matrix behind it keeps."""
        model = self.settings.model
        if self.kernels == "cpu" and model.normalization == "RMSNorm":
            # Torch has no fused one for CPUs: the input and the input over its root mean square, both in float32.
            return self.tokens_of_norms * STATISTIC * (2 * model.hidden_size + 1) + self.hidden_bytes
        statistics = 2 * (self.element if self.kernels == "cpu" else STATISTIC)
        if model.normalization == "RMSNorm":
            statistics = STATISTIC
        return 2 * self.hidden_bytes + self.tokens_of_norms * statistics

    @property
    def _context_bytes(self) -> int:
        """Queries, keys, values or the attention's result: e h t for a share of the heads."""
        return self.element * self.share(self.settings.model.hidden_size) * self.tokens

    @property
    def attention_bytes(self) -> int:
        """Of rotation, exchange between context-parallel ranks and kernel; what recomputing attention saves."""
        model, parallel = self.settings.model, self.settings.parallel
        exchanged, rotated = parallel.context_parallel_size > 1, model.position_embedding_type == "rope"
        # The values are a slice of the projection's output, of which the whole stays, queries and keys included;
        # an exchange copies them out, and so does Transformer Engine.
        sliced = not exchanged and self.kernels != "transformer_engine"
        inputs = (3 if sliced else 1) + (2 if rotated or not sliced else 0)
        # Kernels that take a document at a time have their results put together; others return the result itself.
        copied = exchanged or self.kernels == "cpu" or not self.settings.training.bf16
        logsumexp = STATISTIC * self.share(model.num_attention_heads) * self.tokens
        return (inputs + copied) * self._context_bytes + logsumexp

    @property
    def rotation_bytes(self) -> int:
        """Cosines and sines of half the channels of a head for all tokens of the row, in float32, for all layers."""
        model = self.settings.model
        if model.position_embedding_type != "rope":
            return 0
        return STATISTIC * model.hidden_size // model.num_attention_heads * self.settings.tokens_per_micro_batch

    @property
    def attention_input_bytes(self) -> int:
        """What recomputing attention alone starts from: the projection's output, 3 e h t."""
        return 3 * self._context_bytes

    @property
    def _feed_forward_bytes(self) -> int:
        """Of one half of SwiGLU: e f t."""
        return self.element * self.share(self.settings.model.ffn_width) * self.tokens

    @property
    def _mlp_bytes(self) -> int:
        """Both halves, and their product, which the second matrix keeps; unfused, both factors as well."""
        if not self.settings.model.swiglu:
            return 2 * self._feed_forward_bytes
        return (5 if self.kernels == "cpu" else 3) * self._feed_forward_bytes

    # ---- at work

    @property
    def forward_work_bytes(self) -> int:
        """At the end of the forward pass: the last hidden states, and the logits before the bias is added."""
        return self.hidden_bytes + self.element * self.logits

    @property
    def layer_work_bytes(self) -> int:
        """When the backward pass enters a layer: the gradients of its output and of what SwiGLU multiplies."""
        factors = 2 if self.settings.model.swiglu else 1
        return self.hidden_bytes + factors * self._feed_forward_bytes

    @property
    def head_work_bytes(self) -> int:
        """In the head's backward pass: either a copy of the logits' gradient, or the gradient of its weights."""
        model = self.settings.model
        weights = self.element * self.logits // max(1, self.masked_tokens) * model.hidden_size
        # By then; in float32 the copy takes the room, and fused there is nothing to free.
        freed = 0 if self.fuses_loss else (STATISTIC - self.element) * self.logits
        return max(self.element * self.logits, weights - freed)


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of one rank at the fullest moment of a training step."""

    stage: int  # of the pipeline, from 0
    weights: int
    gradients: int
    optimizer: int  # moments, and float32 main weights if the weights are bfloat16
    activations: int  # kept for the backward pass by the layers of all micro-batches in flight
    head: int  # kept by the head: mostly probabilities of the masked tokens
    work: int  # gone again when a layer or the head is done
    context: int  # assumed; 0 on a CPU

    @property
    def total(self) -> int:
        return self.state + self.activations + self.head + self.work + self.context

    @property
    def state(self) -> int:
        return self.weights + self.gradients + self.optimizer


def plan_memory(
    settings: Settings, *, vocab_size: int, world_size: int, masked_tokens: int, kernels: Kernels
) -> RankMemory:
    """The fullest rank.

    Args:
        vocab_size: Tokens of the tokenizer, unpadded.
        masked_tokens: Predicted tokens of a micro-batch on one context-parallel rank.
    """
    batch = MicroBatch(settings=settings, kernels=kernels, masked_tokens=masked_tokens, vocab_size=vocab_size)
    stages = range(settings.parallel.pipeline_model_parallel_size)
    ranks = [_plan_stage(stage, batch, world_size=world_size) for stage in stages]
    return max(ranks, key=lambda rank: rank.total)


def micro_batches_in_flight(settings: Settings, *, stage: int, world_size: int) -> int:
    """Return the largest number of forward passes of a stage whose backward passes are still to come.

    Source: megatron-core 0.16.1 pipeline_parallel/schedules.py, get_pp_rank_microbatches: the passes of the warm-up,
    one for each later stage, and the one that follows them.
    """
    warm_up = settings.parallel.pipeline_model_parallel_size - stage - 1
    return min(warm_up + 1, settings.micro_batches_per_rank(world_size))


def _plan_stage(stage: int, batch: MicroBatch, *, world_size: int) -> RankMemory:
    settings = batch.settings
    is_last = stage == settings.parallel.pipeline_model_parallel_size - 1
    in_flight = micro_batches_in_flight(settings, stage=stage, world_size=world_size)
    recomputed, kept = _layers_of_pass(batch)
    passed_on = 0
    if settings.parallel.pipeline_model_parallel_size > 1:
        passed_on = 2 * batch.hidden_bytes  # what came from the stage before and what went to the next
    activations = in_flight * (kept + passed_on + (batch.embedding_bytes if stage == 0 else 0))
    head, moments = 0, [recomputed + batch.layer_work_bytes]
    if is_last:
        activations += batch.final_norm_bytes
        head = batch.head_bytes
        # The head is done, and what it kept is gone, before the first layer is.
        moments = [batch.forward_work_bytes, batch.head_work_bytes, moments[0] - head]
    weights, gradients, optimizer = _state_bytes(batch, stage=stage, world_size=world_size)
    return RankMemory(
        stage=stage,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        head=head,
        work=max(0, *moments),
        context=0 if batch.kernels == "cpu" else ASSUMED_CONTEXT_BYTES,
    )


def _layers_of_pass(batch: MicroBatch) -> tuple[int, int]:
    """Of the layers that a rank computes in a row: bytes that come and go by recomputation, and bytes that stay."""
    settings = batch.settings
    layers, compute = settings.layers_per_stage, settings.compute
    if compute.recompute_granularity is None:
        return 0, layers * batch.layer_bytes + batch.rotation_bytes
    if compute.recompute_granularity == "selective":
        without = batch.layer_bytes - batch.attention_bytes + batch.attention_input_bytes
        return batch.attention_bytes, layers * without
    return batch.layer_bytes, layers * batch.hidden_bytes


def _state_bytes(batch: MicroBatch, *, stage: int, world_size: int) -> tuple[int, int, int]:
    """Weights, gradients and optimizer of a rank of this stage."""
    settings = batch.settings
    parallel, training = settings.parallel, settings.training
    padded = settings.model.padded_vocab_size(batch.vocab_size, tensor_parallel=parallel.tensor_model_parallel_size)
    count, stages = count_parameters(settings.model, vocab_size=padded), parallel.pipeline_model_parallel_size
    whole = count.blocks // stages
    whole += count.embedding + count.positions if stage == 0 else 0
    whole += count.final_norm + count.decoder if stage == stages - 1 else 0
    own = whole / parallel.tensor_model_parallel_size  # norms are not shared: a few thousand
    # Context-parallel ranks hold the same weights, and share the optimizer's work like data-parallel ones.
    copies = settings.data_parallel_size(world_size) * parallel.context_parallel_size
    moments = moment_bytes(settings, whole, layers=settings.model.num_layers // stages)
    optimizer = own * (moments / whole + (4 if training.bf16 else 0))  # main weights, where the weights are not
    optimizer /= copies if parallel.use_distributed_optimizer else 1
    return round(own * batch.element), round(own * 4), round(optimizer)
