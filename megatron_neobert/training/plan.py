"""What a run would be, by arithmetic: the answer to --dry-run. Needs no GPU and does not import torch."""

from megatron_neobert.config import Settings
from megatron_neobert.data.inputs import open_inputs
from megatron_neobert.training.flops import (
    checkpoint_bytes,
    count_parameters,
    state_bytes_per_rank,
    training_flops_per_token,
)


def print_plan(settings: Settings, *, world_size: int) -> int:
    """Prints the plan of a legal run and returns 0."""
    inputs = open_inputs(settings.data)
    vocab_size = inputs.tokenizer.vocab_size
    training, tp = settings.training, settings.parallel.tensor_model_parallel_size
    padded = settings.model.padded_vocab_size(vocab_size, tensor_parallel=tp)
    count = count_parameters(settings.model, vocab_size=vocab_size)
    tokens = settings.tokens_per_iteration
    flops = training_flops_per_token(settings, vocab_size=vocab_size, document_tokens=settings.data.seq_length)
    state = state_bytes_per_rank(settings, vocab_size=vocab_size, world_size=world_size)
    lines = [
        ("parameters", f"{count.total:,} ({count.blocks:,} in {settings.model.num_layers} layers)"),
        ("vocabulary", f"{vocab_size:,} tokens, padded to {padded:,}"),
        ("ranks", _describe_ranks(settings, world_size)),
        (
            "iteration",
            f"{training.global_batch_size:,} rows x {settings.data.seq_length:,} tokens = {tokens:,} tokens, in "
            f"{settings.micro_batches_per_rank(world_size)} micro-batches per rank",
        ),
        *(("corpus", line) for line in inputs.description),
        ("run", f"{training.train_iters:,} iterations = {training.train_iters * tokens:.3e} tokens"),
        ("compute", f"at most {flops:.3e} FLOPs per token, {flops * tokens * training.train_iters:.3e} in all"),
        (
            "memory",
            f"{state / 2**30:.2f} GiB per rank for weights, gradients and optimizer, activations not counted",
        ),
        ("checkpoint", f"{checkpoint_bytes(settings, vocab_size=vocab_size) / 2**30:.2f} GiB"),
    ]
    for name, value in lines:
        print(f"{name:<11} {value}")
    return 0


def _describe_ranks(settings: Settings, world_size: int) -> str:
    parallel = settings.parallel
    shares = {
        "tensor-parallel": parallel.tensor_model_parallel_size,
        "pipeline stages": parallel.pipeline_model_parallel_size,
        "context-parallel": parallel.context_parallel_size,
    }
    factors = [f"{settings.data_parallel_size(world_size)} data-parallel"]
    factors += [f"{size} {name}" for name, size in shares.items() if size > 1]
    if settings.virtual_stages_per_rank > 1:
        factors[-1] += f" ({settings.virtual_stages_per_rank} pieces each)"
    return f"{world_size} = {' x '.join(factors)}"
