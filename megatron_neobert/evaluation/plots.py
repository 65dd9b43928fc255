"""Figures of evaluations: curves of several models in one PNG of about 1,200 pixels, drawn without a display.

The colours, by Okabe and Ito, can be distinguished by colour-blind readers. Markers and dashes differ too, for
print in black and white. Equal curves give equal bytes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from megatron_neobert.runtime.atomic_files import replacing

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX"
DASHES = ("-", "--", ":", "-.")  # the next style after each round of colours
_INCHES, _DOTS_PER_INCH = (8.0, 5.0), 150
_MAX_CURVES_WITH_INNER_LEGEND = 4  # a longer legend is beside the axes


@dataclass(frozen=True)
class Curve:
    """One line, with a band and bars from `low` to `high` if these are given. Each sequence has one value per x.

    The marker of a point is hollow where `low` is NaN.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


def plot_curves(
    path: Path,
    curves: Sequence[Curve],
    *,
    x_label: str,
    y_label: str,
    title: str,
    log_x: bool = False,
    log_y: bool = False,
) -> None:
    """Draw curves into a PNG file, whole or not at all. The folder must exist; an existing file is replaced.

    There must be at least one curve, and each must have a point. A value that is not finite leaves a gap.
    """
    assert curves and all(len(curve.x) for curve in curves), f"nothing to draw in {path}: {[c.name for c in curves]}"
    # pyplot would keep every figure until it is closed, and may need a display.
    figure = Figure(figsize=_INCHES, dpi=_DOTS_PER_INCH, layout="constrained")
    axes, lines = figure.add_subplot(), []
    for number, curve in enumerate(curves):
        color, marker = COLOURS[number % len(COLOURS)], _MARKERS[number % len(_MARKERS)]
        dash = DASHES[number // len(COLOURS) % len(DASHES)]
        look: dict[str, Any] = {"markersize": 5, "color": color, "marker": marker}
        lines += axes.plot(curve.x, curve.y, linestyle=dash, linewidth=1.8, **look)
        if curve.low is not None and curve.high is not None:
            axes.fill_between(curve.x, curve.low, curve.high, color=color, alpha=0.18, linewidth=0)
            # The band of a point without a neighbour has no width.
            axes.vlines(curve.x, curve.low, curve.high, color=color, alpha=0.5, linewidth=1.2)
            hollow = [y if math.isnan(low) else math.nan for y, low in zip(curve.y, curve.low, strict=True)]
            axes.plot(curve.x, hollow, linestyle="", markerfacecolor="white", **look)
    # Labels are shown as they are: "$" does not start TeX.
    axes.set_title(title, parse_math=False)
    axes.set_xlabel(x_label, parse_math=False)
    axes.set_ylabel(y_label, parse_math=False)
    axes.grid(visible=True, alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    lengths = {x for curve in curves for x in curve.x}
    if len(lengths) == 1:
        axes.set_xticks(list(lengths))
    elif log_x:
        # Lengths double from one point to the next.
        axes.set_xscale("log", base=2)
        low, high = axes.get_xlim()
        if high < 4 * low:  # at most two powers of two
            axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    if log_y:
        axes.set_yscale("log")
        # Powers of ten are too few ticks, and the axis may have none.
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)) if high > 10 * low else MaxNLocator(nbins=6))
    # After the scales, which set their own formatters.
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
        axis.set_minor_locator(NullLocator())
    is_outside = len(curves) > _MAX_CURVES_WITH_INNER_LEGEND
    position = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)} if is_outside else {}
    add_legend(axes, lines, [curve.name for curve in curves], **position)
    save_figure(figure, path)


def add_legend(parent: Any, lines: Sequence[Any], names: Sequence[str], **options: Any) -> None:
    """Add a legend to axes or a figure. `names` are shown as they are, and `options` are passed to matplotlib."""
    # matplotlib hides a label that begins with "_", and reads text between two "$" as TeX. So the legend first gets
    # numbers, which are then replaced.
    legend = parent.legend(lines, [str(number) for number in range(len(names))], frameon=False, **options)
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_parse_math(False)
        text.set_text(name)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, whole or not at all."""
    with replacing(path) as temporary:
        # Without matplotlib's version, equal figures have equal bytes.
        figure.savefig(temporary, format="png", metadata={"Software": None})
