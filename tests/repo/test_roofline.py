"""The derived speeds in docs/performance.md are those of benchmarks/roofline.py, for the counted bytes."""

import os

import pytest

from benchmarks import roofline

START, END = "<!-- printed by benchmarks/roofline.py -->\n", "<!-- end of the table -->\n"


def test_documentation_has_the_table_that_the_command_prints():
    """WRITE_DOCUMENTATION=1 writes the table."""
    before, start, rest = roofline.PERFORMANCE.read_text().partition(START)
    written, end, after = rest.partition(END)
    assert start and end, "docs/performance.md has no marks around the table"
    table = f"\n{roofline.to_table(1024)}\n\n"
    if os.environ.get("WRITE_DOCUMENTATION"):
        roofline.PERFORMANCE.write_text(before + start + table + end + after)
    else:
        assert written == table, "run WRITE_DOCUMENTATION=1 python -m pytest tests/repo/test_roofline.py"


@pytest.mark.parametrize(("layers", "column"), [("local", 1), ("Transformer Engine", 3)])
def test_parts_of_the_count_sum_to_the_documented_bytes(layers, column):
    """The lines of the table are rounded to 0.1 GB."""
    total = sum(roofline.counted_bytes(layers).values()) * roofline.TOKENS_PER_STEP
    text = roofline.PERFORMANCE.read_text()
    counted = float(text.split("| all | ")[1].split(" | ")[column].removesuffix(" |"))
    assert total / 1e9 == pytest.approx(counted, abs=0.05 * 35)
