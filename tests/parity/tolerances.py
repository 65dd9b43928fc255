"""How far two correct implementations may be apart: one line per check, with the measurement behind it.

`measured` is the figure that the check printed on the day given; the gate is that figure times `factor`. A gate that
has to grow wants an explanation first. All figures: fp32, relative to the largest value compared, on CPU
(torch 2.13.0, transformers 5.23.0, megatron-core 0.16.1).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tolerance:
    """One line of the table."""

    measured: float
    what: str
    when: str
    factor: float

    @property
    def gate(self) -> float:
        return self.measured * self.factor


# For comparison: a wrong rotary convention shows 1.1, a norm epsilon of 1e-6 instead of 1e-5 3e-3.
EUROBERT_LOGITS = Tolerance(
    9.7e-7, "reference vs EuroBertForMaskedLM, 4 layers x 64, padded, logits up to 4.9", "2026-11", 8
)
MODELING_LOGITS = Tolerance(
    1.4e-6,
    "reference vs NeoBERTForMaskedLM, 4 layers x 64, padded and packed, sdpa and eager, logits up to 4.9",
    "2026-11",
    8,
)
MEGATRON_LOGITS = Tolerance(
    9.8e-7, "reference vs Megatron model, 4 layers x 64, packed row, logits up to 5.7", "2026-11", 8
)
# Casts to fp32 taken out, so that nothing is left but algebra.
ALGEBRA = Tolerance(1.6e-15, "the same in fp64: three layouts, padded and packed", "2026-11", 8)
BFLOAT16_LOGITS = Tolerance(2.1e-2, "the same in bfloat16 against the reference in fp32", "2026-11", 3)
# A wrong rotary convention shows 2.7e-3 and 0.72.
STEP_LOSS = Tolerance(9.6e-8, "loss of a step of 1,024 tokens, Megatron model vs reference, 4 x 64", "2026-11", 8)
STEP_GRADIENT = Tolerance(3.6e-7, "1 - cosine of the gradient that differs most, the same", "2026-11", 8)
PADDED_LOGITS = Tolerance(
    3.6e-7, "reference, a padded batch vs each document alone, 3 layers x 32, logits up to 5.2", "2026-11", 8
)
PACKED_LOGITS = Tolerance(
    4.6e-7, "reference, a packed row vs each document alone, 3 layers x 32, logits up to 5.2", "2026-11", 8
)

# Up to 20 iterations of models of 2 and 4 layers x 64, each figure the largest of its kind in tests/distributed;
# another seed shows 5.3e-3.
LAYOUT_LOSS = Tolerance(
    9.7e-8, "loss curves of 2 to 8 ranks, other micro-batches or a moved checkpoint vs one rank", "2026-11", 4
)
LAYOUT_GRAD_NORM = Tolerance(4.0e-7, "gradient norms of 2 to 8 ranks vs one, fp32", "2026-11", 4)
BF16_LAYOUT_LOSS = Tolerance(5.1e-5, "loss curve of two ranks vs one, 20 iterations in bf16", "2026-11", 4)
# The curves' file, written with AVX2, against ATEN_CPU_CAPABILITY=default; with megatron-core 0.19.2 nothing differs.
GOLDEN_LOSS = Tolerance(7.4e-8, "loss of 20 iterations, fp32", "2026-11", 8)
GOLDEN_GRAD_NORM = Tolerance(1.4e-7, "their gradient norms", "2026-11", 8)
# 2 layers x 32; a packed token's loss equals that of its document alone exactly. Attention across documents: 5.1e-3.
PACKED_LOSS = Tolerance(9.0e-8, "Megatron model, loss with the head at some positions vs at all", "2026-11", 8)
FILLED_UP_GRADIENT = Tolerance(5.9e-7, "gradients of a filled-up row vs the row itself, of the largest", "2026-11", 8)

# Transformer Engine's layers over tests/emulated_engine, 3 layers x 256, against the local ones in fp32.
ENGINE_LOSS = Tolerance(1.4e-4, "mean loss in bf16 and three FP8 recipes", "2026-11", 3)
# 1 - cosine of the gradient that is furthest from fp32's; causal attention: 6.5e-1.
ENGINE_GRADIENT = {
    "bf16": Tolerance(5.9e-5, "four architectures", "2026-11", 3),
    "delayed": Tolerance(1.4e-2, "hybrid", "2026-11", 3),
    "tensorwise": Tolerance(7.5e-3, "hybrid", "2026-11", 3),
    "blockwise": Tolerance(8.5e-3, "hybrid", "2026-11", 3),
}
ENGINE_FP8_RUN = Tolerance(7.2e-4, "losses of 6 iterations in FP8 vs bf16, two ranks, 2 layers x 256", "2026-11", 4)
ENGINE_DELAYED_RESUMED = Tolerance(1.4e-4, "the same of the delayed recipe after a resume", "2026-11", 4)
ENGINE_FP8_CURVE = Tolerance(4.1e-4, "losses of 50 iterations on real text, 4 layers x 256, FP8 vs bf16", "2026-11", 3)
