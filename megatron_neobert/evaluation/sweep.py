"""Sweeps: every point of a grid with every seed on one task. The weights of the best run are kept.

OUTPUT/NAME/KIND/TASK has the ledger and the best weights of a task; OUTPUT/NAME/KIND.json and .md have the results. The
same command resumes after a kill. Commands for different tasks may run at the same time.

The score of a task is the mean over seeds at the best point of the grid, with the sample standard deviation over seeds.
As in the literature, the point is chosen on the rows that it is measured on.

Source of the grids: arXiv 2502.19587 table 6; section 4 for the ablations, which does not state their weight decay.
"""

import dataclasses
import fcntl
import itertools
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from megatron_neobert.errors import DataError
from megatron_neobert.evaluation.fine_tune import PATIENCE, WEIGHTS, Outcome, Point, Run, Task, run_all
from megatron_neobert.evaluation.ledger import Ledger, key_of, open_ledger, origin_of, write_record
from megatron_neobert.evaluation.models import fingerprint
from megatron_neobert.evaluation.options import FineTuneOptions
from megatron_neobert.evaluation.report import Record, load_record, write_page
from megatron_neobert.huggingface.hub import model_name
from megatron_neobert.runtime.atomic_files import lock_if_possible
from megatron_neobert.runtime.own_files import delete_folder, open_lock
from megatron_neobert.text import visible

RUNS = "runs"  # folder next to the ledger; each run whose weights are kept has a subfolder named after its key
_PROTOCOL = ("epochs", "max_length", "limit", "dtype", "attention")  # options that change scores

Result = dict[str, Any]  # of one task, as it is in the record


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Values of the hyperparameters. Every combination is a point."""

    batch_sizes: tuple[int, ...]
    learning_rates: tuple[float, ...]
    weight_decays: tuple[float, ...]

    def points(self, seeds: Sequence[int]) -> list[Point]:
        combinations = itertools.product(self.batch_sizes, self.learning_rates, self.weight_decays, seeds)
        return [
            Point(batch_size=batch_size, learning_rate=rate, weight_decay=decay, seed=seed)
            for batch_size, rate, decay, seed in combinations
        ]

    def replace(self, options: FineTuneOptions) -> "Grid":
        """Return a copy of the grid in which values set by `options` replace the grid's values."""
        names = ("batch_size", "learning_rate", "weight_decay")
        return dataclasses.replace(self, **{f"{name}s": values for name in names if (values := getattr(options, name))})


GRIDS = {
    "paper": Grid(
        batch_sizes=(2, 4, 8, 16, 32),
        learning_rates=(5e-6, 6e-6, 8e-6, 1e-5, 2e-5, 3e-5),
        weight_decays=(1e-2, 1e-5),
    ),
    "small": Grid(batch_sizes=(16, 32), learning_rates=(1e-5, 2e-5, 3e-5), weight_decays=(1e-5,)),
}


def run_sweep(task: Task, grid: Grid, start: Path, options: FineTuneOptions) -> None:
    """Execute the runs that the ledger lacks, and add the task to OUTPUT/MODEL/KIND.json and .md.

    `start` is the folder of the initial weights. Raises DataError if these weights change during the sweep.
    """
    folder, model = options.output / model_name(options.model), fingerprint(options.model)
    splits = {split: task.read_rows(split, options.data_dir) for split in task.splits}
    settings: dict[str, Any] = {
        "protocol": {name: getattr(options, name) for name in _PROTOCOL} | {"patience": PATIENCE},
        "device": options.device,
        "grid": asdict(grid),
        "seeds": list(options.seeds),
        "start": str(start),
        "data_dir": str(options.data_dir),
        "data": {split: rows.digest for split, rows in splits.items()},
        "rows": {split: len(rows.select(options.limit).labels) for split, rows in splits.items()},
    }
    unit = {
        "task": task.name,
        "model": model,
        "start": fingerprint(start),
        "data": settings["data"],
        "protocol": settings["protocol"],
    }
    with open_ledger(task_folder(folder, task.kind, task.name), options.device) as ledger:
        earlier = last_sweep(folder, task.kind, task.name, model)
        kept = Path(earlier["kept"]).parent.name if earlier and earlier["kept"] else None
        units = {point: {**unit, "point": asdict(point)} for point in grid.points(options.seeds)}
        keys = {point: key_of(unit) for point, unit in units.items()}
        _run_missing(ledger, task, start, options, units, kept, settings["rows"])
        # The same command with a narrower grid may find weights of a point outside of it, and no others.
        candidates = list(keys.values())
        if kept in ledger.lines and unit.items() <= ledger.lines[kept]["unit"].items():
            candidates.append(kept)
        best = _best_key(ledger, candidates)
        result = {
            **summarise({point: Outcome(**ledger.lines[key]["result"]) for point, key in keys.items()}),
            "kept": best and str(ledger.path.parent / RUNS / best / WEIGHTS),
            "origin": origin_of(ledger.lines[key] for key in keys.values()),
        }
    with open_lock(folder / task.kind / "lock") as file:
        lock_if_possible(file, fcntl.LOCK_EX)  # commands for other tasks write the same record
        record = _read_record(folder, task.kind, model)
        results = dict(sorted({**(record.results["tasks"] if record else {}), task.name: result}.items()))
        path = folder / f"{task.kind}.json"
        write_record(
            path,
            folder=options.model,
            fingerprint=model,
            settings={**(record.settings if record else {}), task.name: settings},
            results={"tasks": results},
            origin=origin_of(results.values()),
        )
        write_page(task.kind, [path], folder)


def _run_missing(
    ledger: Ledger,
    task: Task,
    start: Path,
    options: FineTuneOptions,
    units: Mapping[Point, Mapping[str, Any]],
    kept: str | None,
    rows: Mapping[str, int],
) -> None:
    """Execute the runs that the ledger lacks, and print progress on stderr.

    Weights are kept only for the best run so far, and for the run with the key `kept`, the last finished sweep's best.
    """
    folder, keys = ledger.path.parent / RUNS, {point: key_of(unit) for point, unit in units.items()}
    missing = [point for point, key in keys.items() if key not in ledger.lines]
    finished = len(units) - len(missing)
    runs = [
        Run(task, point, start, folder / keys[point], options, number=number, count=len(units))
        for number, point in enumerate(missing, start=finished + 1)
    ]
    name = visible(task.name)  # of a file or folder of the user
    steps = sum(options.epochs * -(-rows["train"] // point.batch_size) for point in missing)
    counts = ", ".join(f"{split} {count:,}" for split, count in rows.items())
    position = f"{name} {finished}/{len(units)} runs"
    print(f"{position} | rows: {counts} | at most {steps:,} steps", file=sys.stderr, flush=True)
    for count, (run, outcome) in enumerate(run_all(runs, jobs=options.jobs), start=finished + 1):
        if fingerprint(start) != units[run.point]["start"]:
            raise DataError(f"{start} has changed during the sweep; start the same command again to measure it.")
        ledger.add(units[run.point], asdict(outcome))
        # Only of finished runs: a worker may still write to the folder of an unfinished run.
        for key in {*keys.values()} & ledger.lines.keys() - {kept, _best_key(ledger, keys.values())}:
            with suppress(OSError):
                delete_folder(folder / key)
        show_progress(f"{name} {count}/{len(units)}", run, outcome)


def _best_key(ledger: Ledger, keys: Iterable[str]) -> str | None:
    """Return the key of the best run whose weights exist, or None if no weights exist."""
    candidates = [key for key in keys if key in ledger.lines and (ledger.path.parent / RUNS / key / WEIGHTS).is_dir()]
    return max(candidates, key=lambda key: ledger.lines[key]["result"]["average"], default=None)


def task_folder(folder: Path, kind: str, task: str) -> Path:
    """Return the folder for a task's ledger and weights. `folder` contains all results of a model."""
    return folder / kind / quote(task, safe="")


def _read_record(folder: Path, kind: str, model: str) -> Record | None:
    """Return the record of a model's last finished sweeps, or None if it is missing or belongs to other weights.

    A task's `kept` is the folder with the task's best weights, or None if the user has removed that folder.
    """
    if not (path := folder / f"{kind}.json").exists():
        return None
    record = load_record(path, kind)
    if record.model.fingerprint != model:
        return None
    for task, result in record.results["tasks"].items():
        if result["kept"]:
            # Not the recorded path, because the folder of all results may have been moved.
            weights = task_folder(folder, kind, task) / RUNS / Path(result["kept"]).parent.name / WEIGHTS
            result["kept"] = str(weights) if weights.is_dir() else None
    return record


def last_sweep(folder: Path, kind: str, task: str, model: str) -> Result | None:
    """Return the result of a task's last finished sweep, or None if `model`, a fingerprint, has finished no sweep."""
    record = _read_record(folder, kind, model)
    return record.results["tasks"].get(task) if record else None


def show_progress(position: str, run: Run, outcome: Outcome) -> None:
    metrics = " and ".join(run.task.metrics)
    score = f"{metrics} {100 * outcome.average:.2f} % at step {outcome.best_step:,} of {outcome.steps:,}"
    print(f"{position} | {run.point.name} | {score} | {outcome.seconds:,.0f} s", file=sys.stderr, flush=True)


def summarise(outcomes: Mapping[Point, Outcome]) -> Result:
    """Return the best point of a finished grid, and the mean and standard deviation of its scores over the seeds."""
    by_point: dict[Point, list[Point]] = {}
    for point in outcomes:
        by_point.setdefault(dataclasses.replace(point, seed=0), []).append(point)
    runs = max(by_point.values(), key=lambda runs: statistics.fmean(outcomes[run].average for run in runs))
    best_point = asdict(runs[0])
    del best_point["seed"]
    return {
        "score": _mean_and_sd([outcomes[run].average for run in runs]),
        "metrics": {
            name: _mean_and_sd([outcomes[run].scores[name] for run in runs]) for name in outcomes[runs[0]].scores
        },
        "best_point": best_point,
        "seeds": [run.seed for run in runs],
        "best_steps": [outcomes[run].best_step for run in runs],
        "steps": [outcomes[run].steps for run in runs],  # until each run ended
        "points": len(by_point),  # without seeds
        "seconds": sum(outcome.seconds for outcome in outcomes.values()),  # of all runs
    }


def _mean_and_sd(values: Sequence[float]) -> dict[str, float | None]:
    return {"mean": statistics.fmean(values), "sd": statistics.stdev(values) if len(values) > 1 else None}
