"""Measured speeds as a table and as curves: per length, the batch size that was fastest.

A row holds model, layout, passes, length, batch_size and `measured`: None where memory ended, or tokens_per_second
(lower quartile, median, upper quartile) and peak_bytes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_neobert.evaluation.plots import Curve
from megatron_neobert.text import in_bytes

FORWARD, TRAINING = "forward", "forward+backward"

Row = Mapping[str, Any]


def best_rows(rows: Sequence[Row]) -> dict[tuple[str, str], dict[int, Row]]:
    """Return the row of the fastest batch size by model with layout and by length; rows of one kind of passes."""
    best: dict[tuple[str, str], dict[int, Row]] = {}
    for row in rows:
        by_length = best.setdefault((row["model"], row["layout"]), {})
        by_length[row["length"]] = max(by_length.get(row["length"], row), row, key=_median)
    return best


def _median(row: Row) -> float:
    return -1.0 if row["measured"] is None else float(row["measured"]["tokens_per_second"][1])


def to_curves(rows: Sequence[Row]) -> list[Curve]:
    """Return the median of the fastest batch size against the length, with the quartiles as a band."""
    curves = []
    has_layouts = len({row["layout"] for row in rows}) > 1
    for (model, layout), by_length in best_rows(rows).items():
        points = {n: row["measured"]["tokens_per_second"] for n, row in sorted(by_length.items()) if row["measured"]}
        if points:
            low, middle, high = zip(*points.values(), strict=True)
            curves.append(Curve(f"{model}, {layout}" if has_layouts else model, list(points), middle, low, high))
    return curves


def to_cells(rows: Sequence[Row]) -> list[list[str]]:
    """Return the header, then a line per model and layout."""
    lengths = sorted({row["length"] for row in rows})
    lines = [["model", "layout", *(f"{length:,}" for length in lengths)]]
    for names, by_length in best_rows(rows).items():
        found = [by_length.get(length) for length in lengths]
        lines.append([*names, *("-" if row is None else to_cell(row["batch_size"], row["measured"]) for row in found)])
    return lines


def to_cell(batch_size: int, measured: Mapping[str, Any] | None) -> str:
    """Format one measurement."""
    if measured is None:
        return f"out of memory (batch {batch_size})"
    lower, middle, upper = measured["tokens_per_second"]
    memory = "" if measured["peak_bytes"] is None else f", {in_bytes(measured['peak_bytes'])}"
    return f"{middle:,.0f} ({lower:,.0f} to {upper:,.0f}), batch {batch_size}{memory}"
