"""Parameters, floating-point operations and checkpoint size of a run, computed from the settings.

Formulas: forward and backward together cost three times forward. In forward, a matrix of n weights costs 2n operations
per token, and attention over documents of s tokens costs 4 s h per token and layer (scores and context).
tests/repo/test_recipes.py compares the parameters with the published models. Memory: planning/memory.py.
"""

from dataclasses import dataclass

from megatron_neobert.config.schema import ModelConfig, Settings


@dataclass(frozen=True)
class ParameterCount:
    """Parameter count of each part of the model, without the padding rows of the vocabulary."""

    blocks: int
    final_norm: int
    embedding: int
    positions: int
    decoder: int

    @property
    def total(self) -> int:
        return self.blocks + self.final_norm + self.embedding + self.positions + self.decoder


def count_parameters(model: ModelConfig, *, vocab_size: int) -> ParameterCount:
    """Return the parameter count of each part. The default model with 30,522 tokens has 245,136,954 parameters."""
    hidden = model.hidden_size
    norm = 2 * hidden if model.normalization == "LayerNorm" else hidden  # LayerNorm also has a bias
    return ParameterCount(
        blocks=model.num_layers * (_matrix_weights(model) + 2 * norm),
        final_norm=norm,
        embedding=vocab_size * hidden,
        positions=model.position_rows * hidden,
        decoder=vocab_size * hidden + vocab_size,
    )


def training_flops_per_token(
    settings: Settings, *, vocab_size: int, document_tokens: float, predicted_share: float | None = None
) -> float:
    """Return the floating-point operations of forward and backward per token. Recomputation is not counted.

    Args:
        document_tokens: Length of a token's document, averaged over all tokens. Ignored for the layout "concatenated",
            in which a token attends to its whole packed sequence.
        predicted_share: Share of the tokens that are predicted; None for the share in the settings.
    """
    model, data = settings.model, settings.data
    attended_tokens = data.seq_length if data.batch_layout == "concatenated" else document_tokens
    if data.objective == "clm":
        attended_tokens /= 2  # a token attends to the tokens before it
    matrices = model.num_layers * _matrix_weights(model)
    attention = model.num_layers * 4 * attended_tokens * model.hidden_size
    head = (data.predicted_share if predicted_share is None else predicted_share) * 2 * vocab_size * model.hidden_size
    return 3 * (2 * matrices + attention + head)


def checkpoint_bytes(settings: Settings, *, vocab_size: int) -> int:
    """Return the bytes of one checkpoint on disk: weights, optimizer moments and, with bf16, fp32 main weights."""
    weight_bytes = 2 + 4 if settings.training.bf16 else 4
    total = count_parameters(settings.model, vocab_size=vocab_size).total
    return total * weight_bytes + moment_bytes(settings, total, layers=settings.model.num_layers)


def moment_bytes(settings: Settings, parameters: int, *, layers: int) -> int:
    """Return the bytes of the optimizer's fp32 moments.

    Adam keeps two moments per parameter. Muon keeps one per weight in a layer's matrices, and two per other parameter.

    Args:
        parameters: Number of parameters that the optimizer updates.
        layers: Number of layers that these parameters include.
    """
    muon_weights = layers * _matrix_weights(settings.model) if settings.optimizer.optimizer == "muon" else 0
    return 4 * (2 * parameters - muon_weights)


def _matrix_weights(model: ModelConfig) -> int:
    """Return the weight count of one layer's matrices: four for attention, and two for GELU or three for SwiGLU."""
    return 4 * model.hidden_size**2 + (3 if model.swiglu else 2) * model.hidden_size * model.ffn_width
