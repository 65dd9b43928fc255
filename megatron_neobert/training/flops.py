"""Parameters, floating-point operations and bytes of a run, by arithmetic alone.

Source of the formulas: `forward + backward = 3 x forward`, a matrix of n weights costs 2n per token forward, and
attention over documents of length s costs 4 s d per token and layer (scores and context). Checked against the
published model: tests/unit/training/test_flops.py.
"""

from dataclasses import dataclass

from megatron_neobert.config import ModelConfig, Settings

BYTES_PER_PARAMETER_IN_CHECKPOINT = 4 + 4 + 4  # float32 main weight and both Adam moments


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of the unpadded model, by part."""

    blocks: int
    final_norm: int
    embedding: int
    decoder: int

    @property
    def total(self) -> int:
        return self.blocks + self.final_norm + self.embedding + self.decoder


def count_parameters(model: ModelConfig, *, vocab_size: int) -> ParameterCount:
    """Parameters with `vocab_size` real tokens: 245,136,954 for the default model and 30,522 tokens."""
    hidden, ffn = model.hidden_size, model.swiglu_width
    block = 4 * hidden * hidden + 3 * hidden * ffn + 2 * hidden
    return ParameterCount(
        blocks=model.num_layers * block,
        final_norm=hidden,
        embedding=vocab_size * hidden,
        decoder=vocab_size * hidden + vocab_size,
    )


def training_flops_per_token(settings: Settings, *, vocab_size: int, document_tokens: float) -> float:
    """Floating-point operations of forward and backward per token of the row.

    Args:
        document_tokens: Length that a token's document has on average; at most `seq_length`.
    """
    model, hidden = settings.model, settings.model.hidden_size
    matrices = model.num_layers * (4 * hidden * hidden + 3 * hidden * model.swiglu_width)
    attention = model.num_layers * 4 * document_tokens * hidden
    head = settings.data.mask_prob * 2 * vocab_size * hidden
    return 3 * (2 * matrices + attention + head)


def state_bytes_per_rank(settings: Settings, *, vocab_size: int, world_size: int) -> int:
    """Weights, gradients and optimizer state of one rank; activations are not counted."""
    parallel, training = settings.parallel, settings.training
    padded = settings.model.padded_vocab_size(vocab_size, tensor_parallel=parallel.tensor_model_parallel_size)
    shard = count_parameters(settings.model, vocab_size=padded).total / parallel.tensor_model_parallel_size
    split = settings.data_parallel_size(world_size) if parallel.use_distributed_optimizer else 1
    weight, gradient, moments = (2, 4, 8) if training.bf16 else (4, 4, 8)
    main_weight = 4 if training.bf16 else 0
    return round(shard * (weight + gradient + (moments + main_weight) / split))


def checkpoint_bytes(settings: Settings, *, vocab_size: int) -> int:
    """Size of one checkpoint on disk: weights as trained, float32 main weights and both moments."""
    weight = 2 if settings.training.bf16 else 4
    return count_parameters(settings.model, vocab_size=vocab_size).total * (weight + BYTES_PER_PARAMETER_IN_CHECKPOINT)
