"""The command `neobert plot`: draw the curves of one or several runs from their logs.

neobert plot runs/first
neobert plot runs/first runs/second --output plots --metrics loss grad_norm
"""

from dataclasses import dataclass
from pathlib import Path

from megatron_neobert.cli import option
from megatron_neobert.errors import ConfigError, OutputError
from megatron_neobert.text import visible


@dataclass(frozen=True, kw_only=True)
class PlotOptions:
    runs: tuple[Path, ...] = option(help="folder of a run (--save), or a metrics.jsonl", positional=True, metavar="RUN")
    output: Path = option(Path(), "folder for curves.png; default: the current folder", metavar="DIR")
    metrics: tuple[str, ...] | None = option(None, "metrics to draw; default: see above", metavar="NAME")


def plot(options: PlotOptions) -> None:
    """Draw the curves of runs by iteration: loss, accuracy, learning rate, gradient norm, speed and slowest rank.

    `options.metrics` selects other curves. Validation values are points in the colour of their run. The figure is
    OUTPUT/curves.png. If a run was resumed from a checkpoint, the resumed run's values replace earlier values that were
    logged after this checkpoint.
    """
    from megatron_neobert.inspection.plot import TITLES, read_run, write_curves

    runs = [read_run(path, name=visible(str(path))) for path in options.runs]
    logged = list(dict.fromkeys(name for run in runs for values in run.values.values() for name in values))
    metrics = options.metrics or [name for name in TITLES if name in logged] or logged
    if unknown := [name for name in metrics if name not in logged]:
        raise ConfigError(
            f"--metrics {unknown[0]} was not logged by any of these runs. Choose from {', '.join(logged)}."
        )
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        write_curves(options.output / "curves.png", runs, metrics)
    except OSError as error:
        raise OutputError(
            f"--output {options.output} cannot be written ({error.strerror}); name another folder."
        ) from error
    for run in runs:
        losses = [values["loss"] for values in run.values.values() if "loss" in values]
        print(f"{run.name}: iteration {max(run.values):,}" + (f" | loss {losses[-1]:.4f} nats" if losses else ""))
    print(f"wrote {options.output / 'curves.png'}")
