"""Measured speeds as CSV, as a table and as curves: per length, the batch size that was fastest.

A row is what `throughput.summarise` gives. Names of variants hold only what distinguishes them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_neobert.evaluation.plots import Curve, plot_curves

COLUMNS = (
    "model", "dtype", "attention", "kernels", "layout", "passes", "length", "batch_size", "tokens", "slots", "outcome",
    "steps", "tokens_per_second", "lower_quartile", "upper_quartile", "peak_bytes", "best",
)  # fmt: skip
_TELLING = ("dtype", "attention", "layout")  # beside the model's name, where they differ
_MIB, _GIB = 1 << 20, 1 << 30

Row = Mapping[str, Any]


def best_rows(rows: Sequence[Row]) -> list[Row]:
    """Of each variant and length, the row of the fastest batch size; variants in their order, lengths growing."""
    best: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = (*_variant(row), row["length"])
        best.setdefault(key, row)  # holds the variant's place even where nothing was measured
        if _speed(row) > _speed(best[key]):
            best[key] = row
    order = list(dict.fromkeys(_variant(row) for row in rows))
    return sorted(best.values(), key=lambda row: (order.index(_variant(row)), row["length"]))


def csv_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """All rows, those of the best batch sizes marked."""
    best = best_rows(rows)
    return [
        {**row, "kernels": " ".join(row["kernels"]), "best": "yes" if _speed(row) > 0 and row in best else "no"}
        for row in rows
    ]


def to_curves(rows: Sequence[Row]) -> list[Curve]:
    """Median of the fastest batch size against the length, with the quartiles as a band; rows of one kind of passes."""
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
    """In GiB, or below a tenth of one in MiB."""
    return f"{number / _GIB:.2f} GiB" if number >= _GIB / 10 else f"{number / _MIB:.1f} MiB"


def to_cells(rows: Sequence[Row]) -> list[list[str]]:
    """The header, then a line per variant that begins with its model; rows of one kind of passes."""
    lengths = sorted({row["length"] for row in rows})
    lines = [["model", "dtype", "attention", "layout", *(f"{length:,}" for length in lengths)]]
    for group in _by_variant(best_rows(rows)).values():
        kernels = sorted({kernel for row in group for kernel in row["kernels"]})
        attention = group[0]["attention"] + (f" ({', '.join(kernels)})" if kernels else "")
        cells = {row["length"]: _cell(row) for row in group}
        first = [group[0]["model"], group[0]["dtype"], attention, group[0]["layout"]]
        lines.append(first + [cells.get(length, "-") for length in lengths])
    return lines


def _cell(row: Row) -> str:
    if row["tokens_per_second"] is None:
        return f"{row['outcome']} (batch {row['batch_size']})"
    middle, lower, upper = (f"{row[name]:,.0f}" for name in ("tokens_per_second", "lower_quartile", "upper_quartile"))
    return f"{middle} ({lower} to {upper}), batch {row['batch_size']}, {to_memory(row['peak_bytes'])}"


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
    """One figure for one kind of passes; False, and no file, if nothing was measured."""
    group = [row for row in rows if row["passes"] == passes]
    curves = to_curves(group)
    if not curves:
        return False
    common = [{row[name] for row in group} for name in ("dtype", "attention")]
    same = [value for values in common if len(values) == 1 for value in values]
    title = ", ".join([f"Throughput, {passes}", *same, machine])
    plot_curves(path, curves, x_label="tokens of a document", y_label="tokens/s", title=title, log_x=True)
    return True
