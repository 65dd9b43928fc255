"""Curves of runs as one PNG with a panel per metric, drawn without a display.

The colours can be told apart by colour-blind readers. Validation values are points in the colour of their run. A tick
on the lower edge marks where a run resumed after a stop.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter

from megatron_neobert.evaluation.plots import COLOURS, DASHES, add_legend, save_figure
from megatron_neobert.inspection.run_log import RunLog

_PANEL_INCHES, _DOTS_PER_INCH = (6.4, 3.0), 120
_LEGEND_INCHES = 0.28  # per name, one name per line

# Metrics that are drawn by default, and their titles. Other metrics have their names in the log as titles.
LABELS = {
    "loss": "loss (nats per masked token)",
    "masked_accuracy": "masked accuracy",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens/s",
    "slowest_rank_lead": "time of the slowest rank above the median, as a share",
}
_VALIDATION = {"loss": "validation_loss", "masked_accuracy": "validation_accuracy"}


def write_curves(path: Path, runs: Sequence[RunLog], metrics: Sequence[str], *, x: str) -> None:
    """Write the figure as a PNG into an existing folder; `x` is "tokens" or "iteration"."""
    save_figure(draw(runs, metrics, x=x), path)


def draw(runs: Sequence[RunLog], metrics: Sequence[str], *, x: str) -> Figure:
    """Return a figure with a panel per metric, drawn against `x`, "tokens" or "iteration".

    Raise DataError if `x` is "tokens" and a run has not logged any tokens.
    """
    lines = -(-len(metrics) // 2)
    size = 2 * _PANEL_INCHES[0], lines * _PANEL_INCHES[1] + _LEGEND_INCHES * (len(runs) + 2)
    # Not pyplot, which may look for a display.
    figure = Figure(figsize=size, dpi=_DOTS_PER_INCH, layout="constrained")
    panels = list(figure.subplots(lines, 2, squeeze=False).flat)
    styles: list[dict[str, Any]] = [
        {"color": COLOURS[number % len(COLOURS)], "linestyle": DASHES[number // len(COLOURS) % len(DASHES)]}
        for number in range(len(runs))
    ]
    for axes, metric in zip(panels, metrics, strict=False):
        for run, style in zip(runs, styles, strict=True):
            _draw_run(axes, run, metric, style, x=x)
        axes.set_title(LABELS.get(metric, metric), loc="left", fontsize=11, parse_math=False)
        axes.grid(visible=True, alpha=0.3)
        axes.set_xlabel("tokens of documents" if x == "tokens" else "iteration")
        axes.xaxis.set_major_formatter(EngFormatter())  # k, M, G, T
    for axes in panels[len(metrics) :]:
        axes.set_axis_off()
    handles = [Line2D([], [], **style) for style in styles]
    handles.append(Line2D([], [], color="#555555", marker="o", linestyle="none"))
    handles.append(Line2D([], [], color="#555555", marker="|", linestyle="none", markersize=12))
    names = [*(run.name for run in runs), "validation", "resumed after a stop"]
    add_legend(figure, handles, names, loc="outside upper left")
    return figure


def _draw_run(axes: Any, run: RunLog, metric: str, style: dict[str, Any], *, x: str) -> None:
    def to_x(iterations: Sequence[int]) -> Sequence[float]:
        return run.tokens_at(iterations) if x == "tokens" else iterations

    iterations, values = run.series(metric)
    # A line needs two neighbouring points, but validations are far apart: mark them as points.
    markers = {"marker": "o", "markersize": 3.5} if len(values) == 1 or metric.startswith("validation") else {}
    axes.plot(to_x(iterations), values, linewidth=1.6, **style, **markers)
    if metric in _VALIDATION:
        iterations, values = run.series(_VALIDATION[metric])
        axes.plot(to_x(iterations), values, "o", color=style["color"], markersize=4.5, markeredgecolor="white")
    for position in to_x(run.restarts):
        axes.axvline(position, 0, 0.07, color=style["color"], linewidth=2.5)
