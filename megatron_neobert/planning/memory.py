"""Memory of a rank by arithmetic: weights, gradients, optimizer, activations, and what is needed while it computes.

Answers for the fullest rank. What a GPU takes besides tensors is an assumption, said as such. How near this comes to
what is really used: benchmarks/benchmark_memory.py measures it, docs/memory.md has the table. FP8 counts as bfloat16.
"""

from dataclasses import dataclass

from megatron_neobert.config.schema import Settings
from megatron_neobert.model.flops import ParameterCount, count_parameters
from megatron_neobert.planning.activations import Kernels, MicroBatch

ASSUMED_CONTEXT_BYTES = 3 << 29  # 1.5 GiB: CUDA's context, NCCL's and cuBLAS's buffers, and gaps between tensors


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
    """Forward passes, of a stage or of a piece of an interleaved one, whose backward passes are still to come.

    Source: megatron-core 0.16.1 pipeline_parallel/schedules.py, get_pp_rank_microbatches: those of the warm-up, and
    the one that follows it.
    """
    stages, pieces = settings.parallel.pipeline_model_parallel_size, settings.virtual_stages_per_rank
    ahead = stages - stage - 1
    warm_up = ahead if pieces == 1 else 2 * ahead + (pieces - 1) * stages
    return min(warm_up + 1, settings.micro_batches_per_rank(world_size) * pieces)


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
        return 0, layers * batch.layer_bytes
    if compute.recompute_granularity == "selective":
        without = batch.layer_bytes - batch.attention_bytes + batch.attention_input_bytes
        return batch.attention_bytes, layers * without
    number = min(compute.recompute_num_layers or 1, layers)
    if compute.recompute_method == "uniform":
        return number * batch.layer_bytes, -(-layers // number) * batch.hidden_bytes
    return batch.layer_bytes, number * batch.hidden_bytes + (layers - number) * batch.layer_bytes


def _state_bytes(batch: MicroBatch, *, stage: int, world_size: int) -> tuple[int, int, int]:
    """Weights, gradients and optimizer of a rank of this stage."""
    settings = batch.settings
    parallel, training = settings.parallel, settings.training
    padded = settings.model.padded_vocab_size(batch.vocab_size, tensor_parallel=parallel.tensor_model_parallel_size)
    whole = _parameters_of_stage(
        count_parameters(settings.model, vocab_size=padded), stage, stages=parallel.pipeline_model_parallel_size
    )
    own = whole / parallel.tensor_model_parallel_size  # norms are not shared: a few thousand
    # Context-parallel ranks hold the same weights, and share the optimizer's work like data-parallel ones.
    copies = settings.data_parallel_size(world_size) * parallel.context_parallel_size
    optimizer = own * (12 if training.bf16 else 8) / (copies if parallel.use_distributed_optimizer else 1)
    return round(own * batch.element), round(own * 4), round(optimizer)


def _parameters_of_stage(count: ParameterCount, stage: int, *, stages: int) -> int:
    """Interleaved or not, a rank holds an equal share of the layers."""
    first = count.embedding + count.positions if stage == 0 else 0
    last = count.final_norm + count.decoder if stage == stages - 1 else 0
    return count.blocks // stages + first + last
