"""Parameters, floating-point operations and checkpoints of a run, by arithmetic alone; memory is in memory.py.

Source of the formulas: `forward + backward = 3 x forward`, a matrix of n weights costs 2n per token forward, and
attention over documents of length s costs 4 s d per token and layer (scores and context). Checked against the
published models: tests/unit/model/test_flops.py.
"""

from dataclasses import dataclass

from megatron_neobert.config.schema import ModelConfig, Settings


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of the unpadded model, by part."""

    blocks: int
    final_norm: int
    embedding: int
    positions: int
    decoder: int

    @property
    def total(self) -> int:
        return self.blocks + self.final_norm + self.embedding + self.positions + self.decoder


def count_parameters(model: ModelConfig, *, vocab_size: int) -> ParameterCount:
    """Parameters with `vocab_size` real tokens: 245,136,954 for the default model and 30,522 tokens."""
    hidden = model.hidden_size
    norm = 2 * hidden if model.normalization == "LayerNorm" else hidden  # with a bias, or without
    return ParameterCount(
        blocks=model.num_layers * (_matrix_weights(model) + 2 * norm),
        final_norm=norm,
        embedding=vocab_size * hidden,
        positions=model.position_rows * hidden,
        decoder=vocab_size * hidden + vocab_size,
    )


def training_flops_per_token(settings: Settings, *, vocab_size: int, document_tokens: float) -> float:
    """Return floating-point operations of forward and backward per token of the row; what is recomputed counts once.

    Args:
        document_tokens: Length that a token's document has on average, unused where documents attend to each other.
    """
    model, data = settings.model, settings.data
    seen_tokens = data.seq_length if data.batch_layout == "concatenated" else document_tokens
    matrices = model.num_layers * _matrix_weights(model)
    attention = model.num_layers * 4 * seen_tokens * model.hidden_size
    head = data.mask_prob * 2 * vocab_size * model.hidden_size
    return 3 * (2 * matrices + attention + head)


def checkpoint_bytes(settings: Settings, *, vocab_size: int) -> int:
    """Size of one checkpoint on disk: weights as trained, float32 main weights and moments."""
    weight = 2 if settings.training.bf16 else 4
    total = count_parameters(settings.model, vocab_size=vocab_size).total
    return total * (weight + 4) + moment_bytes(settings, total, layers=settings.model.num_layers)


def moment_bytes(settings: Settings, parameters: int, *, layers: int) -> int:
    """Return bytes of the moments of parameters with so many layers: Adam has two each, Muon one per matrix weight."""
    with_one = layers * _matrix_weights(settings.model) if settings.optimizer.optimizer == "muon" else 0
    return 4 * (2 * parameters - with_one)


def _matrix_weights(model: ModelConfig) -> int:
    """Weights of one layer's matrices: four of attention, and two of the feed-forward or SwiGLU's three."""
    return 4 * model.hidden_size**2 + (3 if model.swiglu else 2) * model.hidden_size * model.ffn_width
