"""The command `neobert plot`: the curves of one run, or of several over each other, out of their logs.

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
    """The command line of `neobert plot`."""

    runs: tuple[Path, ...] = option(
        help="folder of a run, its --save; or a metrics.jsonl", positional=True, metavar="RUN"
    )
    output: Path = option(help="folder for curves.png", metavar="DIR")
    metrics: tuple[str, ...] | None = option(None, "names in the logs; without it the usual five", metavar="NAME")
    x: Literal["tokens", "iteration"] = option("tokens", "what runs to the right")


def plot(options: PlotOptions) -> None:
    """Draw the curves of runs: loss, accuracy, learning rate, gradient norm and throughput against tokens.

    Reads metrics.jsonl in the folder of each run, which may still be growing, and writes OUTPUT/curves.png. A tick
    marks where a run resumed after a stop; what it had logged beyond its checkpoint is replaced by what it logged
    later.
    """
    from megatron_neobert.inspection.run_figure import write_curves
    from megatron_neobert.inspection.run_log import read_run
    from megatron_neobert.text import visible

    names = [visible(name) for name in names_of(options.runs)]
    runs = [read_run(path, name=name) for path, name in zip(options.runs, names, strict=True)]
    metrics = choose_metrics(options.metrics, runs)
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        write_curves(options.output / "curves.png", runs, metrics, x=options.x)
    except OSError as error:
        raise OutputError(f"--output {options.output} cannot be written ({error.strerror}); name another.") from error
    for run in runs:
        print(describe(run))
        if run.unreadable:
            print(f"warning: {run.name}: unreadable lines that were left out: {run.unreadable}", file=sys.stderr)
    print(f"wrote {options.output / 'curves.png'}")


def names_of(paths: Sequence[Path]) -> list[str]:
    """Return the folder of each run as seen from the folder that holds them all.

    Raises:
        ConfigError: A run is named twice.
    """
    folders = [path.parent if path.name == "metrics.jsonl" else path for path in (one.resolve() for one in paths)]
    if len(set(folders)) < len(folders):
        twice = next(path for path, folder in zip(paths, folders, strict=True) if folders.count(folder) > 1)
        raise ConfigError(f"{twice} is named more than once; name each run once.")
    place = os.path.commonpath([folder.parent for folder in folders])
    return [str(folder.relative_to(place)) for folder in folders]


def choose_metrics(wanted: Sequence[str] | None, runs: Sequence["RunLog"]) -> list[str]:
    """Return those wanted, or of the usual ones those that were logged.

    Raises:
        ConfigError: A metric that no run has logged.
    """
    from megatron_neobert.inspection.run_figure import LABELS

    logged = list(dict.fromkeys(name for run in runs for name in run.metrics))
    if wanted is None:
        return [name for name in LABELS if name in logged] or logged
    if unknown := [name for name in wanted if name not in logged]:
        raise ConfigError(f"--metrics {unknown[0]} was not logged by any of these runs; they have {', '.join(logged)}.")
    return list(dict.fromkeys(wanted))


def describe(run: "RunLog") -> str:
    """Return in one line what a run has come to."""
    iteration = max(run.values)
    losses = [logged["loss"] for logged in run.values.values() if "loss" in logged]
    loss = f" | loss {losses[-1]:.4f} nats" if losses else ""
    tokens = [one["consumed_tokens"] for one in run.values.values() if "consumed_tokens" in one]
    count = f" | {tokens[-1]:,.0f} tokens" if tokens else ""
    restarts = f" | restarts: {len(run.restarts)}" if run.restarts else ""
    return f"{run.name}: iteration {iteration:,}{count}{loss}{restarts}"
