"""The command `neobert plot`: draws the curves of one or several runs from their logs.

neobert plot runs/first --output plots
neobert plot runs/first runs/second --output plots --x iteration --metrics loss grad_norm
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megatron_neobert.cli import option
from megatron_neobert.errors import ConfigError, OutputError

if TYPE_CHECKING:
    from megatron_neobert.inspection.run_log import RunLog


@dataclass(frozen=True, kw_only=True)
class PlotOptions:
    """Options of `neobert plot`."""

    runs: tuple[Path, ...] = option(help="folder of a run (--save), or a metrics.jsonl", positional=True, metavar="RUN")
    output: Path = option(help="folder for curves.png", metavar="DIR")
    metrics: tuple[str, ...] | None = option(None, "metrics to draw; default: see above", metavar="NAME")
    x: Literal["tokens", "iteration"] = option("tokens", "horizontal axis")


def plot(options: PlotOptions) -> None:
    """Draw the curves of runs against tokens: loss, accuracy, learning rate, gradient norm, speed and slowest rank.

    `options.metrics` selects other curves, and `options.x` iterations instead of tokens. The figure is
    OUTPUT/curves.png. Logs may still be growing. A tick marks where a run resumed after a stop; the iterations that it
    repeated are drawn once, with their later values.

    Raises:
        MissingInputError, DataError: A run has no log, or no values in it yet.
        ConfigError, OutputError: A run or metric is wrong, or OUTPUT cannot be written.
    """
    from megatron_neobert.inspection.run_figure import write_curves
    from megatron_neobert.inspection.run_log import read_run
    from megatron_neobert.text import counted, visible

    names = [visible(name) for name in run_names(options.runs)]
    runs = [read_run(path, name=name) for path, name in zip(options.runs, names, strict=True)]
    metrics = choose_metrics(options.metrics, runs)
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        write_curves(options.output / "curves.png", runs, metrics, x=options.x)
    except OSError as error:
        raise OutputError(
            f"--output {options.output} cannot be written ({error.strerror}); name another folder."
        ) from error
    for run in runs:
        print(describe(run))
        if run.unreadable:
            print(f"warning: {run.name}: dropped {counted(run.unreadable, 'unreadable line')}", file=sys.stderr)
    print(f"wrote {options.output / 'curves.png'}")


def run_names(paths: Sequence[Path]) -> list[str]:
    """Return a name for each run: its folder, relative to the common parent of all runs.

    Raise ConfigError if a run is named twice.
    """
    folders = [path.parent if path.name == "metrics.jsonl" else path for path in map(Path.resolve, paths)]
    if len(set(folders)) < len(folders):
        duplicate = next(path for path, folder in zip(paths, folders, strict=True) if folders.count(folder) > 1)
        raise ConfigError(f"{duplicate} is named more than once; name each run once.")
    common = os.path.commonpath([folder.parent for folder in folders])
    return [str(folder.relative_to(common)) for folder in folders]


def choose_metrics(requested: Sequence[str] | None, runs: Sequence["RunLog"]) -> list[str]:
    """Return the requested metrics. If `requested` is None, return the default metrics that were logged, or else all.

    Raise ConfigError if no run has logged a requested metric.
    """
    from megatron_neobert.inspection.run_figure import LABELS

    logged = list(dict.fromkeys(name for run in runs for name in run.metrics))
    if requested is None:
        return [name for name in LABELS if name in logged] or logged
    if unknown := [name for name in requested if name not in logged]:
        raise ConfigError(
            f"--metrics {unknown[0]} was not logged by any of these runs. Choose from {', '.join(logged)}."
        )
    return list(dict.fromkeys(requested))


def describe(run: "RunLog") -> str:
    """Return one line with the last iteration, tokens and loss (nats) of a run, and its number of restarts."""
    losses = [logged["loss"] for logged in run.values.values() if "loss" in logged]
    tokens = [logged["consumed_tokens"] for logged in run.values.values() if "consumed_tokens" in logged]
    fields = [f"{run.name}: iteration {max(run.values):,}"]
    fields += [f"{tokens[-1]:,.0f} tokens"] if tokens else []
    fields += [f"loss {losses[-1]:.4f} nats"] if losses else []
    fields += [f"restarts: {len(run.restarts)}"] if run.restarts else []
    return " | ".join(fields)
