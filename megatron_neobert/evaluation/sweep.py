"""Sweeps of fine-tunings: every point of a grid with every seed on one task, and the weights of the best run.

A task's number is the mean over seeds of the runs' averages at the point where that is highest; the spread is the
standard deviation over seeds, n - 1. The point is chosen on the same rows that it is measured on, as in the literature.
Source of the grids: arXiv 2502.19587 table 6; for the ablations section 4, which does not state their weight decay.
"""

import dataclasses
import fcntl
import itertools
import shutil
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

from megatron_neobert.evaluation.fine_tune import PATIENCE, WEIGHTS, Outcome, Point, Run, Task, run_all
from megatron_neobert.evaluation.ledger import LEDGER, Ledger, Line, Unit, key_of, open_ledger, origin_of, write_record
from megatron_neobert.evaluation.models import fingerprint
from megatron_neobert.evaluation.options import FineTuneOptions
from megatron_neobert.evaluation.report import write_page
from megatron_neobert.runtime.atomic_files import lock_if_possible

RUNS = "runs"  # beside a ledger: a folder for each run whose weights are kept, by the key of the run
_PROTOCOL = ("epochs", "max_length", "limit", "dtype", "attention")  # options that scores depend on

Result = dict[str, Any]  # of one task, as it is in the record
Describe = Callable[[dict[str, Result], dict[str, dict[str, Any]]], dict[str, Any]]  # results and settings by task
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


@dataclass(kw_only=True)
class Sweep:
    """All points of a grid with all seeds, on one task."""

    kind: str  # of the record: glue or ner
    task: Task
    grid: Grid
    model: str  # fingerprint of the model that is evaluated
    start: Path  # weights that the runs start from
    data: Mapping[str, str]  # hash of each split
    about: Mapping[str, Any] = field(default_factory=dict)  # more settings for the record
    options: FineTuneOptions

    @property
    def output(self) -> Path:
        """Folder of all results of the model."""
        return self.options.output / self.options.model.resolve().name

    @cached_property
    def unit(self) -> dict[str, Any]:
        """Everything that a run depends on beside its point."""
        protocol = {name: getattr(self.options, name) for name in _PROTOCOL} | {"patience": PATIENCE}
        about = {"task": self.task.name, "model": self.model, "start": fingerprint(self.start)}
        return {**about, "data": dict(self.data), "protocol": protocol}

    @property
    def of_itself(self) -> Unit:
        """Unit of work of the whole sweep."""
        return {**self.unit, "sweep": {"grid": asdict(self.grid), "seeds": list(self.options.seeds)}}

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "protocol": self.unit["protocol"],
            "device": self.options.device,
            "grid": asdict(self.grid),
            "seeds": list(self.options.seeds),
            "start": str(self.start),
            "data_dir": str(self.options.data_dir),
            "data": self.unit["data"],
            **self.about,
        }


def run_sweep(sweep: Sweep, on_progress: Progress, describe: Describe | None = None) -> Path:
    """Run what is not finished, and write the results of all tasks; return their folder."""
    with open_ledger(sweep.output / sweep.kind / quote(sweep.task.name, safe=""), sweep.options.device) as ledger:
        _run_points(ledger, sweep, on_progress)
    write_results(sweep.kind, sweep.output, sweep.options.model, describe)
    return sweep.output


def _run_points(ledger: Ledger, sweep: Sweep, on_progress: Progress) -> None:
    """Run what is not finished, and add the sweep to the ledger as the last one.

    Of its runs, the weights of the best one so far are kept, and those that finished sweeps keep.
    """
    folder = ledger.path.parent
    units = {point: {**sweep.unit, "point": asdict(point)} for point in sweep.grid.points(sweep.options.seeds)}
    keys = {point: key_of(unit) for point, unit in units.items()}
    left = [
        Run(task=sweep.task, point=point, start=sweep.start, folder=folder / RUNS / key, options=sweep.options)
        for point, key in keys.items()
        if key not in ledger.lines
    ]
    finished = ledger.lines.get(key_of(sweep.of_itself))
    if finished is not None and not left:
        ledger.add(sweep.of_itself, finished["result"], finished["origin"])
        return
    before = len(units) - len(left)
    kept = {line["result"]["kept"] for line in ledger.lines.values() if "sweep" in line["unit"]}
    on_progress(sweep.task.name, before, len(units), None, None)
    for done, (run, outcome) in enumerate(run_all(left, jobs=sweep.options.jobs), start=before + 1):
        ledger.add(units[run.point], asdict(outcome))
        best = _best(ledger, keys.values())
        for key in set(keys.values()) - {*kept, best}:
            shutil.rmtree(folder / RUNS / key, ignore_errors=True)
        on_progress(sweep.task.name, done, len(units), run, outcome)
    lines = [ledger.lines[key] for key in keys.values()]
    result = summarise({point: Outcome(**ledger.lines[key]["result"]) for point, key in keys.items()})
    best = _best(ledger, keys.values())
    ledger.add(sweep.of_itself, {"kept": best, "result": result, "settings": sweep.settings}, origin_of(lines))


def _best(ledger: Ledger, keys: Iterable[str]) -> str | None:
    """Return the key of the best run whose weights are there."""
    there = [key for key in keys if key in ledger.lines and (ledger.path.parent / RUNS / key / WEIGHTS).is_dir()]
    return max(there, key=lambda key: ledger.lines[key]["result"]["average"], default=None)


def last_sweep(ledger: Ledger, model: str) -> Line | None:
    """Return the line of the sweep of a model that was finished last, by the model's fingerprint."""
    sweeps = (line for line in reversed(ledger.lines.values()) if "sweep" in line["unit"])
    return next((line for line in sweeps if line["unit"]["model"] == model), None)


def best_weights(ledger: Ledger, sweep: Line) -> Path | None:
    """Return the folder of the best weights of a finished sweep, None if the user has removed it."""
    weights: Path = ledger.path.parent / RUNS / str(sweep["result"]["kept"]) / WEIGHTS
    return weights if weights.is_dir() else None


def write_results(
    kind: str,
    folder: Path,
    model: Path,
    describe: Describe | None = None,
) -> None:
    """Write FOLDER/KIND.json and .md from the last sweep of every task of a model.

    Args:
        folder: FOLDER/KIND has a folder with a ledger for each task.
        describe: Returns further results for the record.
    """
    own = fingerprint(model)
    with (folder / kind / "lock").open("ab") as file:
        lock_if_possible(file, fcntl.LOCK_EX)  # commands for other tasks write the same record
        ledgers = [Ledger(path.parent) for path in sorted((folder / kind).glob(f"*/{LEDGER}"))]
        sweeps = {ledger: line for ledger in ledgers if (line := last_sweep(ledger, own))}
        results, settings = dict[str, Result](), dict[str, dict[str, Any]]()
        for ledger, line in sweeps.items():
            weights, task = best_weights(ledger, line), line["unit"]["task"]
            results[task] = line["result"]["result"] | {"kept": None if weights is None else str(weights)}
            settings[task] = line["result"]["settings"]
        write_record(
            folder / f"{kind}.json",
            kind,
            folder=model,
            settings=settings,
            results={"tasks": results} | (describe(results, settings) if describe else {}),
            lines=sweeps.values(),
        )
        write_page(kind, [folder / f"{kind}.json"], folder)


def show_progress(task: str, done: int, total: int, run: Run | None, outcome: Outcome | None) -> None:
    """Print a line for every run that has ended."""
    line = f"{task} {done}/{total}"
    if run is not None and outcome is not None:
        line += f" | {run.point.name} | {100 * outcome.average:.2f} at step {outcome.best_step:,} of {outcome.steps:,}"
        line += f" | {outcome.seconds:,.0f} s"
    print(line, file=sys.stderr, flush=True)


def summarise(outcomes: Mapping[Point, Outcome]) -> Result:
    """Return the best point of a grid whose runs are all done; metrics are fractions of 1."""
    by_point: dict[Point, list[Point]] = {}
    for point in outcomes:
        by_point.setdefault(dataclasses.replace(point, seed=0), []).append(point)
    runs = max(by_point.values(), key=lambda runs: statistics.fmean(outcomes[run].average for run in runs))
    best_point = asdict(runs[0])
    del best_point["seed"]
    return {
        "score": _spread([outcomes[run].average for run in runs]),
        "metrics": {name: _spread([outcomes[run].scores[name] for run in runs]) for name in outcomes[runs[0]].scores},
        "best_point": best_point,
        "seeds": [run.seed for run in runs],
        "points": len(by_point),  # of the grid, seeds apart
        "seconds": sum(outcome.seconds for outcome in outcomes.values()),  # of all runs together
    }


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    return {"mean": statistics.fmean(values), "sd": statistics.stdev(values) if len(values) > 1 else None}
