"""Sweeps of fine-tunings: every point of a grid with every seed on one task, and the weights of the best run.

A task's number is the mean over seeds of the runs' averages at the point where that is highest; the spread is the
standard deviation over seeds, n - 1. The point is chosen on the same rows that it is measured on, as in the literature.
Source of the grids: arXiv 2502.19587 table 6; for the ablations section 4, which does not state their weight decay.
"""

import dataclasses
import itertools
import shutil
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_neobert.errors import MissingInputError
from megatron_neobert.evaluation.fine_tune import PATIENCE, WEIGHTS, Outcome, Point, Run, run_all
from megatron_neobert.evaluation.ledger import Ledger, Unit, key_of
from megatron_neobert.evaluation.options import FineTuneOptions

BEST = "best"  # folder of the weights of the best run of finished sweeps
_PROTOCOL = ("epochs", "max_length", "limit", "dtype", "attention")  # options that scores depend on

Result = dict[str, Any]  # of one task, as it is in the record
Progress = Callable[[str, int, int, Run | None, Outcome | None], None]  # task, done, all, the run that has ended


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Values of the hyperparameters; every combination is a point."""

    batch_sizes: tuple[int, ...]
    learning_rates: tuple[float, ...]
    weight_decays: tuple[float, ...]

    def points(self, seeds: Sequence[int]) -> list[Point]:
        every = itertools.product(self.batch_sizes, self.learning_rates, self.weight_decays, seeds)
        return [
            Point(batch_size=batch, learning_rate=rate, weight_decay=decay, seed=seed)
            for batch, rate, decay, seed in every
        ]

    def replace(self, options: FineTuneOptions) -> "Grid":
        """Return the grid with the lists of values that the options give."""
        given: dict[str, Any] = {
            "batch_sizes": options.batch_size,
            "learning_rates": options.learning_rate,
            "weight_decays": options.weight_decay,
        }
        return dataclasses.replace(self, **{name: values for name, values in given.items() if values})


GRIDS = {
    "paper": Grid(
        batch_sizes=(2, 4, 8, 16, 32),
        learning_rates=(5e-6, 6e-6, 8e-6, 1e-5, 2e-5, 3e-5),
        weight_decays=(1e-2, 1e-5),
    ),
    "small": Grid(batch_sizes=(16, 32), learning_rates=(1e-5, 2e-5, 3e-5), weight_decays=(1e-5,)),
}


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """All points of a grid with all seeds, on one task."""

    run: type[Run]
    task: str
    grid: Grid
    start: Path
    unit: dict[str, Any]  # what all of the runs depend on: model, starting weights, data, protocol
    metrics: Sequence[str]  # of the result
    about: Mapping[str, Any] = field(default_factory=dict)  # more settings for the record
    options: FineTuneOptions

    @property
    def of_itself(self) -> Unit:
        """Unit of work of the whole sweep."""
        return {**self.unit, "sweep": {"grid": asdict(self.grid), "seeds": list(self.options.seeds)}}


def unit_of(task: str, options: FineTuneOptions, *, model: str, start: str, data: Mapping[str, str]) -> dict[str, Any]:
    """Return what a run depends on beside its point.

    Args:
        model: Fingerprint of the model that is evaluated.
        start: Fingerprint of the weights that the runs start from.
        data: Hash of each split.
    """
    protocol = {name: getattr(options, name) for name in _PROTOCOL} | {"patience": PATIENCE}
    return {"task": task, "model": model, "start": start, "data": dict(data), "protocol": protocol}


def run_sweep(ledger: Ledger, sweep: Sweep, on_progress: Progress) -> tuple[Result, Path | None]:
    """Run what is not finished; return the result and the folder of the best weights, None if they were removed.

    Of the weights, those of the best run of this sweep so far are kept beside the best ones of earlier sweeps. These
    are replaced when the sweep is finished, so that no other task starts from the best run of an unfinished sweep.
    """
    runs = ledger.path.parent / "runs"
    _move_kept(ledger)
    units = {point: {**sweep.unit, "point": asdict(point)} for point in sweep.grid.points(sweep.options.seeds)}
    keys = {point: key_of(unit) for point, unit in units.items()}
    left = [
        sweep.run(task=sweep.task, point=point, start=sweep.start, folder=runs / keys[point], options=sweep.options)
        for point, unit in units.items()
        if ledger.find(unit) is None
    ]
    before = len(units) - len(left)
    on_progress(sweep.task, before, len(units), None, None)
    for done, (run, outcome) in enumerate(run_all(left, jobs=sweep.options.jobs), start=before + 1):
        ledger.add(units[run.point], asdict(outcome))
        finished = {key: line["result"]["average"] for key in keys.values() if (line := ledger.lines.get(key))}
        best = max(finished, key=lambda key: finished[key])  # of equals the first
        for key in finished.keys() - {best}:
            shutil.rmtree(runs / key, ignore_errors=True)
        on_progress(sweep.task, done, len(units), run, outcome)
    outcomes = {point: Outcome(**ledger.lines[key]["result"]) for point, key in keys.items()}
    kept = _best_with_weights(ledger, sweep.unit, list(keys.values()))
    name = None if kept is None else Point(**ledger.lines[kept]["unit"]["point"]).name
    result = summarise(outcomes, sweep.metrics, kept=name)
    settings = {
        "protocol": sweep.unit["protocol"],
        "device": sweep.options.device,
        "grid": asdict(sweep.grid),
        "seeds": list(sweep.options.seeds),
        "start": str(sweep.start),
        "data_dir": str(sweep.options.data_dir),
        "data": sweep.unit["data"],
        **sweep.about,
    }
    ledger.add(sweep.of_itself, {"kept": kept, "result": result, "settings": settings})
    _move_kept(ledger)
    for key in keys.values():
        shutil.rmtree(runs / key, ignore_errors=True)
    return result, None if kept is None else ledger.path.parent / BEST


def last_sweep(ledger: Ledger, model: str | None = None) -> dict[str, Any] | None:
    """Return the line of the sweep that was finished last, of one model if its fingerprint is given."""
    sweeps = (line for line in reversed(ledger.lines.values()) if "sweep" in line["unit"])
    return next((line for line in sweeps if model in (None, line["unit"]["model"])), None)


def best_weights(ledger: Ledger, model: str) -> Path:
    """Return the folder of the best weights of the sweeps of a model that are finished.

    Raises:
        MissingInputError: The user has removed them, or they are of another model.
    """
    line, folder = last_sweep(ledger), ledger.path.parent
    if line is None or line["unit"]["model"] != model or line["result"]["kept"] is None or not (folder / BEST).is_dir():
        raise MissingInputError(f"{folder / BEST}: the best weights are gone; remove {folder} to run it again.")
    return folder / BEST


def _best_with_weights(ledger: Ledger, unit: Unit, keys: Sequence[str]) -> str | None:
    """Return the key of the best run among these and the one that was kept before, if that was of the same unit."""
    folder, last = ledger.path.parent, last_sweep(ledger)
    there = [key for key in keys if (folder / "runs" / key / WEIGHTS).is_dir()]
    kept = None if last is None else last["result"]["kept"]
    if kept is not None and (folder / BEST).is_dir():
        before = {name: value for name, value in ledger.lines[kept]["unit"].items() if name != "point"}
        there = [kept, *there] if key_of(before) == key_of(unit) else there
    return max(there, key=lambda key: ledger.lines[key]["result"]["average"], default=None)


def _move_kept(ledger: Ledger) -> None:
    """Move the weights that the last sweep keeps to their place, if a kill has prevented it."""
    last, folder = last_sweep(ledger), ledger.path.parent
    weights = None if last is None or last["result"]["kept"] is None else folder / "runs" / last["result"]["kept"]
    if weights is not None and (weights / WEIGHTS).is_dir():
        shutil.rmtree(folder / BEST, ignore_errors=True)
        (weights / WEIGHTS).rename(folder / BEST)


def show_progress(task: str, done: int, total: int, run: Run | None, outcome: Outcome | None) -> None:
    """Print a line for every run that has ended."""
    line = f"{task} {done}/{total}"
    if run is not None and outcome is not None:
        line += f" | {run.point.name} | {100 * outcome.average:.2f} at step {outcome.best_step:,} of {outcome.steps:,}"
        line += f" | {outcome.seconds:,.0f} s"
    print(line, file=sys.stderr, flush=True)


def summarise(outcomes: Mapping[Point, Outcome], metrics: Iterable[str], *, kept: str | None) -> Result:
    """Return the best point of a grid whose runs are all done; metrics are fractions of 1.

    Args:
        metrics: Names of the metrics in the result.
        kept: Name of the run whose weights are kept; None if they were removed.
    """
    by_point: dict[Point, list[Point]] = {}
    for point in outcomes:
        by_point.setdefault(dataclasses.replace(point, seed=0), []).append(point)
    runs = max(by_point.values(), key=lambda runs: statistics.fmean(outcomes[run].average for run in runs))
    best_point = asdict(runs[0])
    del best_point["seed"]
    return {
        "score": _spread([outcomes[run].average for run in runs]),
        "metrics": {name: _spread([outcomes[run].scores[name] for run in runs]) for name in metrics},
        "best_point": best_point,
        "seeds": [run.seed for run in runs],
        "points": len(by_point),  # of the grid, seeds apart
        "kept": kept,
        "seconds": sum(outcome.seconds for outcome in outcomes.values()),  # of all runs together
    }


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    return {"mean": statistics.fmean(values), "sd": statistics.stdev(values) if len(values) > 1 else None}
