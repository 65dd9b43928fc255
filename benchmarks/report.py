"""How benchmarks show their figures, and what they record of the machine."""

import datetime
import importlib.metadata
import platform
from collections.abc import Sequence
from pathlib import Path


def describe_machine(packages: Sequence[str]) -> dict[str, str]:
    """Processor, date, and the versions of Python and of these packages, those that are installed."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    installed = {package.metadata["Name"]: package.version for package in importlib.metadata.distributions()}
    return {
        "cpu": f"{len(models)} x {models[0]}" if models else platform.processor(),
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        **{package: installed[package] for package in packages if package in installed},
    }


def print_table(rows: Sequence[dict[str, object]]) -> None:
    """Columns are the keys of the first row."""
    cells = [list(rows[0]), *([_cell(row[name]) for name in rows[0]] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        print(" | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
