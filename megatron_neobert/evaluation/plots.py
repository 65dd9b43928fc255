"""Figures of evaluations: curves of several models in one PNG, some 1,200 pixels wide, drawn without a display.

Colours are Okabe and Ito's, which colour-blind readers tell apart; markers and dashes differ as well, so that a black
and white print can be read. The same curves give the same bytes, and a figure is replaced as a whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from megatron_neobert.runtime.atomic_files import replacing

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX"
DASHES = ("-", "--", ":", "-.")  # the next one after each round of colours
_INCHES, _DOTS_PER_INCH = (8.0, 5.0), 150
_LEGEND_INSIDE = 4  # more names stand beside the axes


@dataclass(frozen=True)
class Curve:
    """One line, with a band around it where `low` and `high` are given; one value per x in each."""

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
    """Draw the curves into a PNG; the folder must exist.

    Values that are not finite leave a gap.
    """
    assert curves and all(len(curve.x) for curve in curves), f"nothing to draw in {path}: {[c.name for c in curves]}"
    # Not pyplot: it keeps every figure until closed, and may want a display.
    figure = Figure(figsize=_INCHES, dpi=_DOTS_PER_INCH, layout="constrained")
    axes = figure.add_subplot()
    for number, curve in enumerate(curves):
        assert len(curve.x) == len(curve.y), f"{curve.name}: {len(curve.x)=} {len(curve.y)=}"
        look: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "marker": _MARKERS[number % len(_MARKERS)]}
        dash = DASHES[number // len(COLOURS) % len(DASHES)]
        axes.plot(curve.x, curve.y, linestyle=dash, markersize=5, linewidth=1.8, **look)
        if curve.low is not None and curve.high is not None:
            axes.fill_between(curve.x, curve.low, curve.high, color=look["color"], alpha=0.18, linewidth=0)
    for text, label in ((axes.set_title, title), (axes.set_xlabel, x_label), (axes.set_ylabel, y_label)):
        text(label, parse_math=False)
    axes.grid(visible=True, alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if log_x:  # of lengths, which double
        axes.set_xscale("log", base=2)
    if log_y:
        axes.set_yscale("log")
        low, high = axes.get_ylim()  # powers of ten are too few numbers, and may be none
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)) if high > 10 * low else MaxNLocator(nbins=6))
    for axis in (axes.xaxis, axes.yaxis):  # after the scales, which bring formats of their own
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
        axis.set_minor_locator(NullLocator())
    beside = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)} if len(curves) > _LEGEND_INSIDE else {}
    add_legend(axes, axes.lines, [curve.name for curve in curves], **beside)
    save_figure(figure, path, Software=None)


def add_legend(place: Any, lines: Sequence[Any], names: Sequence[str], **options: Any) -> None:
    """Add a legend to axes or a figure. Labels given to matplotlib vanish if they begin with "_" and are read as TeX
    between two "$", so that these are put in afterwards.
    """
    legend = place.legend(lines, [str(number) for number in range(len(names))], frameon=False, **options)
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_parse_math(False)
        text.set_text(name)


def save_figure(figure: Figure, path: Path, **metadata: None) -> None:
    """Write a figure whole, in the format of the file's name, without the metadata named."""
    with replacing(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:], metadata=metadata)
