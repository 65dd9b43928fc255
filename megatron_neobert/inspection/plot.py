"""Logs of runs, and their curves.

The logs may still grow, and may have lines that were cut by a kill. They may come from strangers: a value is dropped if
its name is not a word, because names are printed, or if its number is too large to draw.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_neobert.errors import DataError, MissingInputError
from megatron_neobert.text import parse_json

_LOG = "metrics.jsonl"
_LINE_START = '{"iteration"'
_LARGEST = 2**53  # floats are exact for all whole numbers up to this one
_LARGEST_VALUE = 1e39  # above fp32's range; matplotlib fails far above it
_NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]{0,63}")
_PANEL_INCHES, _DOTS_PER_INCH = (6.4, 3.0), 120
_LEGEND_INCHES = 0.28  # per name, one name per line
# Metrics that are drawn by default, and their titles. Other metrics have their names in the log as titles.
TITLES = {
    "loss": "loss (nats per masked token)",
    "masked_accuracy": "masked accuracy",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens/s",
    "slowest_rank_lead": "time of the slowest rank above the median, as a share",
}
_VALIDATION = {"loss": "validation_loss", "masked_accuracy": "validation_accuracy"}


@dataclass(frozen=True)
class RunLog:
    """Name of a run, and its logged values by iteration."""

    name: str
    values: dict[int, dict[str, float]]  # by increasing iteration, then by metric


def read_run(path: Path, *, name: str) -> RunLog:
    """Return the log of a run. Lines that cannot be parsed are ignored.

    When a run resumes, values after the checkpoint from which it resumed are dropped. An incomplete line is ignored,
    even if the next start has appended a complete entry to the same line.

    Args:
        path: The --save folder of the run, or the log file.

    Raises:
        MissingInputError: The log does not exist.
        DataError: No line of the log contains an iteration and a value.
    """
    file = path / _LOG if path.is_dir() else path
    if not file.is_file():
        problem = "holds no metrics.jsonl" if path.is_dir() else "does not exist"
        raise MissingInputError(
            f"{path} {problem}; name the folder given to --save. A run writes its log there from the first interval on."
        )
    values: dict[int, dict[str, float]] = {}
    limits = {int: _LARGEST, float: _LARGEST_VALUE}  # a comparison with NaN is False
    for line in file.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            content = parse_json(line[max(line.rfind(_LINE_START), 0) :])
        except ValueError:
            continue
        iteration = content.pop("iteration", None) if isinstance(content, dict) else None
        if type(iteration) is not int or not 0 <= iteration <= _LARGEST:
            continue
        if content.get("start") is True:
            values = {logged: old for logged, old in values.items() if logged <= iteration}
        entry = {
            metric: value
            for metric, value in content.items()
            if _NAME.fullmatch(metric) and type(value) in limits and abs(value) <= limits[type(value)]
        }
        if entry:
            values[iteration] = {**values.get(iteration, {}), **entry}
    if not values:
        raise DataError(
            f"{file} has no whole line with an iteration and a value. Name the log of a run, and wait until its first "
            "interval (--log-interval) has ended."
        )
    return RunLog(name, dict(sorted(values.items())))


def write_curves(path: Path, runs: Sequence[RunLog], metrics: Sequence[str]) -> None:
    """Write a PNG with a panel for each metric to `path`, in an existing folder. No display is needed."""
    from matplotlib.figure import Figure  # not pyplot, which may look for a display
    from matplotlib.lines import Line2D

    from megatron_neobert.evaluation.plots import COLOURS, DASHES, add_legend, save_figure

    rows = -(-len(metrics) // 2)
    size = 2 * _PANEL_INCHES[0], rows * _PANEL_INCHES[1] + _LEGEND_INCHES * (len(runs) + 1)
    figure = Figure(figsize=size, dpi=_DOTS_PER_INCH, layout="constrained")
    panels = list(figure.subplots(rows, 2, squeeze=False).flat)
    styles: list[tuple[str, Any]] = [
        (COLOURS[n % len(COLOURS)], DASHES[n // len(COLOURS) % len(DASHES)]) for n in range(len(runs))
    ]
    for axes, metric in zip(panels, metrics, strict=False):
        for run, (colour, dash) in zip(runs, styles, strict=True):
            # A line needs two neighbouring points, but validations are far apart: mark them as points.
            marker = "o" if metric.startswith("validation") else None
            axes.plot(*series(run, metric), linewidth=1.6, color=colour, linestyle=dash, marker=marker, markersize=3.5)
            if metric in _VALIDATION:
                points = series(run, _VALIDATION[metric])
                axes.plot(*points, "o", color=colour, markersize=7, markeredgecolor="white")
        axes.set_title(TITLES.get(metric, metric), loc="left", fontsize=11, parse_math=False)
        axes.grid(visible=True, alpha=0.3)
        axes.set_xlabel("iteration")
    for axes in panels[len(metrics) :]:
        axes.set_axis_off()
    handles = [Line2D([], [], color=colour, linestyle=dash) for colour, dash in styles]
    names = [run.name for run in runs]
    if any(series(run, _VALIDATION[metric])[0] for run in runs for metric in metrics if metric in _VALIDATION):
        handles.append(Line2D([], [], color="#555555", marker="o", linestyle="none"))
        names.append("validation")
    add_legend(figure, handles, names, loc="outside upper left")
    save_figure(figure, path)


def series(run: RunLog, metric: str) -> tuple[list[int], list[float]]:
    """Return the iterations in increasing order, and the metric's value at each iteration.

    For a validation metric, return only the iterations that logged it. For any other metric, return every logged
    interval, with NaN where the metric is missing.
    """
    pairs = {
        iteration: values.get(metric, math.nan)
        for iteration, values in run.values.items()
        if metric in values or (not metric.startswith("validation") and "consumed_tokens" in values)
    }
    return list(pairs), list(pairs.values())
