"""Curves of runs, one panel for each metric: as a picture in PNG, and as a table in CSV.

Colours are told apart by colour-blind readers. What a validation measured is drawn as points of its run's colour, and
a stop after which the run resumed as a tick on the lower edge. Drawn without a display; the same logs give the same
files, each of which is replaced as a whole.
"""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator

from megatron_neobert.evaluation.plots import COLOURS, DASHES, add_legend, save_figure
from megatron_neobert.inspection.run_log import RunLog
from megatron_neobert.runtime.atomic_files import replace_file

_PANEL_INCHES, _DOTS_PER_INCH = (6.4, 3.0), 120
_LEGEND_INCHES = 0.28  # per line
_LEGEND_COLUMNS, _NAME_LENGTH = 3, 40  # which fit beside each other


@dataclass(frozen=True)
class Look:
    """How a metric is shown."""

    label: str
    factor: float = 1.0
    validation: str | None = None  # the same thing measured on held-out documents


# Other metrics are shown under their names in the log.
LOOKS = {
    "loss": Look("loss (nats per masked token)", validation="validation_loss"),
    "masked_accuracy": Look("masked accuracy (%)", factor=100, validation="validation_accuracy"),
    "lr": Look("learning rate"),
    "grad_norm": Look("gradient norm"),
    "tokens_per_second": Look("tokens/s"),
    "mfu": Look("MFU (%)", factor=100),
}
DEFAULT_METRICS = ("loss", "masked_accuracy", "lr", "grad_norm", "tokens_per_second")


def write_curves(folder: Path, runs: Sequence[RunLog], metrics: Sequence[str], *, x: str) -> tuple[Path, Path]:
    """Write curves.png and curves.csv into a folder that exists.

    Args:
        x: "tokens" or "iteration".
    """
    figure = draw(runs, metrics, x=x)
    png, table = folder / "curves.png", folder / "curves.csv"
    replace_file(table, to_csv(runs))
    save_figure(figure, png, Software=None)
    return png, table


def draw(runs: Sequence[RunLog], metrics: Sequence[str], *, x: str) -> Figure:
    """Return the figure; the first panel is as wide as two where their number is odd."""
    lines = -(-len(metrics) // 2)
    size = (
        2 * _PANEL_INCHES[0],
        lines * _PANEL_INCHES[1] + _LEGEND_INCHES * (1 + -(-(len(runs) + 2) // _LEGEND_COLUMNS)),
    )
    figure = Figure(figsize=size, dpi=_DOTS_PER_INCH, layout="constrained")  # not pyplot: it may want a display
    cells = [*metrics] if len(metrics) % 2 == 0 else [metrics[0], *metrics]
    mosaic: Any = [cells[2 * line : 2 * line + 2] for line in range(lines)]
    panels = figure.subplot_mosaic(mosaic)
    for metric in metrics:
        _draw_panel(panels[metric], runs, metric, x=x)
    _add_legend(figure, runs, metrics)
    return figure


def to_csv(runs: Sequence[RunLog]) -> str:
    """Return everything that was logged, as it was; `restarts` counts those before the line.

    A name that a spreadsheet would take for a formula gets `./` before it.
    """
    metrics = list(dict.fromkeys(name for run in runs for name in run.metrics))
    rows: list[dict[str, Any]] = []
    for run in runs:
        name = f"./{run.name}" if run.name.startswith(("=", "+", "-", "@")) else run.name
        for iteration, values in run.values.items():
            restarts = sum(at < iteration for at in run.restarts)
            rows.append({**values, "run": name, "iteration": iteration, "restarts": restarts})
    stream = io.StringIO()
    writer = csv.DictWriter(stream, ["run", "iteration", "restarts", *metrics], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def _style(number: int) -> dict[str, Any]:
    """Return the colour and the dash of a run: the next dash after each round of colours."""
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": DASHES[number // len(COLOURS) % len(DASHES)]}


def _draw_panel(axes: Any, runs: Sequence[RunLog], metric: str, *, x: str) -> None:
    look = LOOKS.get(metric, Look(metric))
    for number, run in enumerate(runs):
        style = _style(number)
        iterations, values = run.series(metric)
        places, heights = _x_of(run, iterations, x), np.array(values) * look.factor
        few = {"marker": "o", "markersize": 3.5} if len(values) == 1 or metric.startswith("validation") else {}
        axes.plot(places, heights, linewidth=1.6, **style, **few)
        if look.validation is not None:
            iterations, values = run.series(look.validation)
            held_out = _x_of(run, iterations, x)
            heights = np.array(values) * look.factor
            axes.plot(held_out, heights, "o", color=style["color"], markersize=4.5, markeredgecolor="white")
        for place in _x_of(run, run.restarts, x):
            axes.axvline(place, 0, 0.07, color=style["color"], linewidth=2.5)
    axes.set_title(look.label, loc="left", fontsize=11, parse_math=False)
    axes.grid(visible=True, alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8))
    axes.set_xlabel("tokens of documents" if x == "tokens" else "iteration")
    for axis, name in ((axes.xaxis, x), (axes.yaxis, metric)):
        if name.startswith("tokens"):
            axis.set_major_formatter(EngFormatter())  # k, M, G, T


def _x_of(run: RunLog, iterations: Sequence[int], x: str) -> list[float]:
    return run.tokens_at(iterations) if x == "tokens" else [float(one) for one in iterations]


def _add_legend(figure: Any, runs: Sequence[RunLog], metrics: Sequence[str]) -> None:
    lines = [Line2D([], [], **_style(number)) for number in range(len(runs))]
    names = [run.name if len(run.name) <= _NAME_LENGTH else f"…{run.name[-_NAME_LENGTH:]}" for run in runs]
    measured = {name for run in runs for name in run.metrics}
    if any(metric in LOOKS and LOOKS[metric].validation in measured for metric in metrics):
        lines.append(Line2D([], [], color="#555555", marker="o", linestyle="none", markersize=4.5))
        names.append("validation")
    if any(run.restarts for run in runs):
        lines.append(Line2D([], [], color="#555555", marker="|", linestyle="none", markersize=12, markeredgewidth=2))
        names.append("resumed after a stop")
    add_legend(figure, lines, names, loc="outside upper left", ncols=_LEGEND_COLUMNS)
