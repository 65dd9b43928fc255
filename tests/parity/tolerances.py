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


EUROBERT_LOGITS = Tolerance(1.0, "reference vs EuroBertForMaskedLM, 4 layers x 64, logits up to 3, padded", "2026-11", 8)
PACKED_LOGITS = Tolerance(1.0, "reference packed vs each document alone, 2 layers x 32", "2026-11", 8)
PADDED_LOGITS = Tolerance(1.0, "reference padded vs each document alone, 2 layers x 32", "2026-11", 8)
