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
    dp = settings.data_parallel_size(world_size)
    state = state_bytes_per_rank(settings, vocab_size=vocab_size, world_size=world_size)
    lines = [
        ("parameters", f"{count.total:,} ({count.blocks:,} in {settings.model.num_layers} layers)"),
        ("vocabulary", f"{vocab_size:,} tokens, padded to {padded:,}"),
        ("ranks", f"{world_size} = {dp} data-parallel x {tp} tensor-parallel"),
        (
            "iteration",
            f"{training.global_batch_size:,} rows x {settings.data.seq_length:,} tokens = {tokens:,} tokens, in "
            f"{training.global_batch_size // (training.micro_batch_size * dp)} micro-batches per rank",
        ),
        ("corpus", f"{len(inputs.corpus):,} documents, {inputs.corpus.manifest.tokens:,} tokens"),
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
