"""Measured speeds as a table and as curves: per length, the batch size that was fastest.

A row is what `throughput.summarise` returns. Names of variants hold only what distinguishes them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_neobert.evaluation.plots import Curve, plot_curves

FORWARD, TRAINING = "forward", "forward+backward"
_TELLING = ("dtype", "attention", "layout")  # beside the model's name, where they differ
_MIB, _GIB = 1 << 20, 1 << 30

Row = Mapping[str, Any]


def best_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the row of the fastest batch size of each variant and length; variants in their order, lengths growing."""
    best: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = (*_variant(row), row["length"])
        best.setdefault(key, row)  # holds the variant's place even where nothing was measured
        if _speed(row) > _speed(best[key]):
            best[key] = row
    order = list(dict.fromkeys(_variant(row) for row in rows))
    return sorted(best.values(), key=lambda row: (order.index(_variant(row)), row["length"]))


def to_curves(rows: Sequence[Row]) -> list[Curve]:
    """Return the median of the fastest batch size against the length, with the quartiles as a band.

    Args:
        rows: Rows of one kind of passes.
    """
    curves = []
    telling = [name for name in _TELLING if len({row[name] for row in rows}) > 1]
    for group in _by_variant(best_rows(rows)).values():
        name = ", ".join([group[0]["model"], *(group[0][key] for key in telling)])
        measured = [row for row in group if row["tokens_per_second"] is not None]
        if measured:
            columns = ("length", "tokens_per_second", "lower_quartile", "upper_quartile")
            curves.append(Curve(name, *([row[column] for row in measured] for column in columns)))
    return curves


def to_memory(number: int) -> str:
    """Return bytes in GiB, or in MiB below a tenth of a GiB."""
    return f"{number / _GIB:.2f} GiB" if number >= _GIB / 10 else f"{number / _MIB:.1f} MiB"


def to_cells(rows: Sequence[Row]) -> list[list[str]]:
    """Return the header, then a line per variant that begins with its model; rows of one kind of passes."""
    lengths = sorted({row["length"] for row in rows})
    lines = [["model", "dtype", "attention", "layout", *(f"{length:,}" for length in lengths)]]
    for group in _by_variant(best_rows(rows)).values():
        cells = {row["length"]: _cell(row) for row in group}
        first = [group[0]["model"], group[0]["dtype"], group[0]["attention"], group[0]["layout"]]
        lines.append(first + [cells.get(length, "-") for length in lengths])
    return lines


def _cell(row: Row) -> str:
    if row["tokens_per_second"] is None:
        return f"{row['outcome']} (batch {row['batch_size']})"
    middle, lower, upper = (f"{row[name]:,.0f}" for name in ("tokens_per_second", "lower_quartile", "upper_quartile"))
    memory = "" if row["peak_bytes"] is None else f", {to_memory(row['peak_bytes'])}"
    return f"{middle} ({lower} to {upper}), batch {row['batch_size']}{memory}"


def _variant(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("model", *_TELLING, "passes"))


def _speed(row: Row) -> float:
    return -1.0 if row["tokens_per_second"] is None else float(row["tokens_per_second"])


def _by_variant(rows: Sequence[Row]) -> dict[tuple[Any, ...], list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(_variant(row), []).append(row)
    return groups


def draw(path: Path, rows: Sequence[Mapping[str, Any]], passes: str, *, machine: str) -> bool:
    """Draw one figure for one kind of passes; return False, without a file, if nothing was measured."""
    group = [row for row in rows if row["passes"] == passes]
    curves = to_curves(group)
    if not curves:
        return False
    common = [{row[name] for row in group} for name in ("dtype", "attention")]
    same = [value for values in common if len(values) == 1 for value in values]
    title = ", ".join([f"Throughput, {passes}", *same, machine])
    plot_curves(path, curves, x_label="tokens of a document", y_label="tokens/s", title=title, log_x=True)
    return True
