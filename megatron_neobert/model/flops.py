"""Parameters, floating-point operations and checkpoint size of a run, and peak rates and memory of known GPUs.

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
    """Return the bytes of the optimizer's fp32 moments of `parameters` parameters, which include `layers` layers.

    Adam keeps two moments per parameter. Muon keeps one per weight in a layer's matrices, and two per other parameter.
    """
    muon_weights = layers * _matrix_weights(settings.model) if settings.optimizer.optimizer == "muon" else 0
    return 4 * (2 * parameters - muon_weights)


def _matrix_weights(model: ModelConfig) -> int:
    """Return the weight count of one layer's matrices: four for attention, and two for GELU or three for SwiGLU."""
    return 4 * model.hidden_size**2 + (3 if model.swiglu else 2) * model.hidden_size * model.ffn_width


# ---- GPUs
#
# Rates are dense BF16 tensor-core rates with fp32 accumulation. NVIDIA's data sheets print twice as much, "with
# sparsity". GPU names must match exactly, because the names of a GPU slice (MIG) or of a board with a lower power limit
# differ by a word. A GPU that is not listed has no MFU (model FLOPs utilization).
#
# Source: NVIDIA's data sheets of A100, A10, A30, A40, L4, L40S, H100, H100 NVL, H200, GH200 and DGX B200; for GeForce
# and RTX, the appendices of NVIDIA's white papers on GA102 and Ada. Memory figures are estimates: the memory that CUDA
# leaves to a program, in whole GiB below the data sheet (GDDR6 boards use a sixteenth for error correction).


@dataclass(frozen=True)
class Gpu:
    """Peak rate and memory of one GPU model."""

    name: str  # of torch.cuda.get_device_name, without "NVIDIA "
    bf16_tflops: float
    memory_gib: float


GPUS: tuple[Gpu, ...] = (
    Gpu("A100-SXM4-40GB", 312, 39),
    Gpu("A100-SXM4-80GB", 312, 78),
    Gpu("A100-PCIE-40GB", 312, 39),
    Gpu("A100 80GB PCIe", 312, 78),
    Gpu("A10", 125, 22),
    Gpu("A30", 165, 23),
    Gpu("A40", 149.7, 44),
    Gpu("L4", 121, 22),
    Gpu("L40S", 362, 44),
    Gpu("H100 80GB HBM3", 989, 78),  # SXM
    Gpu("H100 PCIe", 756, 78),
    Gpu("H100 NVL", 835, 92),
    Gpu("H200", 989, 139),  # SXM
    Gpu("H200 NVL", 835, 139),
    Gpu("GH200 480GB", 989, 93),
    Gpu("B200", 2250, 177),
    Gpu("GeForce RTX 3090", 71, 23),
    Gpu("GeForce RTX 4090", 165.2, 23),
    Gpu("RTX A6000", 154.8, 47),
    Gpu("RTX 6000 Ada Generation", 364.2, 47),
)


def find_gpu(device_name: str) -> Gpu | None:
    """Return the GPU for a name from torch.cuda.get_device_name, or None if GPUS does not list the name."""
    name = device_name.removeprefix("NVIDIA ").strip()
    return next((gpu for gpu in GPUS if gpu.name == name), None)
