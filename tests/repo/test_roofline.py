"""Derived speeds in docs/performance.md are those that benchmarks/roofline.py prints, of the work that was counted."""

import os

import pytest

from benchmarks import roofline
from megatron_neobert.config.schema import Settings
from megatron_neobert.model.flops import training_flops_per_token

START, END = "<!-- printed by benchmarks/roofline.py -->\n", "<!-- end of the table -->\n"


def test_the_table_in_the_documentation_is_the_one_that_is_printed():
    """WRITE_DOCUMENTATION=1 writes it."""
    before, start, rest = roofline.PERFORMANCE.read_text().partition(START)
    written, end, after = rest.partition(END)
    assert start and end, "docs/performance.md has no place for the table"
    table = f"\n{roofline.to_table(1024)}\n\n"
    if os.environ.get("WRITE_DOCUMENTATION"):
        roofline.PERFORMANCE.write_text(before + start + table + end + after)
    else:
        assert written == table, "run WRITE_DOCUMENTATION=1 python -m pytest tests/repo/test_roofline.py"


@pytest.mark.parametrize(("layers", "column"), [("local", 1), ("Transformer Engine", 3)])
def test_every_byte_of_the_count_has_a_part(layers, column):
    """The table's lines are rounded to 0.1 GB."""
    total = sum(roofline.counted_bytes(layers).values()) * roofline.TOKENS_PER_STEP
    text = roofline.PERFORMANCE.read_text()
    counted = float(text.split("| all | ")[1].split(" | ")[column].removesuffix(" |"))
    assert total / 1e9 == pytest.approx(counted, abs=0.05 * 35)


def test_time_is_the_work_over_the_rates():
    """Bandwidth without end leaves the operations, at the rates of documents of 1,024 tokens."""
    step = roofline.steps()[0]
    parts = roofline.microseconds(step, 1024, bandwidth=1e30)
    flops = training_flops_per_token(Settings(), vocab_size=roofline.VOCAB_PADDED, document_tokens=1024)
    attention = 12 * 28 * 1024 * 768
    assert parts["products"] + parts["head, loss"] == pytest.approx((flops - attention) / roofline.GEMM * 1e6)
    assert parts["attention"] == pytest.approx(attention / 3 * (1 / 306e12 + 2.5 / 238e12) * 1e6)
    assert sum(parts.values()) == pytest.approx(parts["products"] + parts["head, loss"] + parts["attention"])
