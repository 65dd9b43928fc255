"""Sweeps: every point of a grid with every seed on one task. The weights of the best run are kept.

The score of a task is the mean over seeds at the best point of the grid, with the sample standard deviation over seeds.
As in the literature, the point is chosen on the rows that it is measured on.

Source of the grids: arXiv 2502.19587 table 6; section 4 for the ablations, which does not state their weight decay.
"""

import dataclasses
import fcntl
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from megatron_neobert.errors import DataError
from megatron_neobert.evaluation.fine_tune import PATIENCE, WEIGHTS, Outcome, Point, Run, Task, run_all
from megatron_neobert.evaluation.ledger import Ledger, key_of, open_ledger, origin_of, write_record
from megatron_neobert.evaluation.models import fingerprint
from megatron_neobert.evaluation.options import FineTuneOptions
from megatron_neobert.evaluation.report import write_page
from megatron_neobert.huggingface.hub import model_name
from megatron_neobert.runtime.atomic_files import lock_if_possible, read_text, replace_file
from megatron_neobert.runtime.own_files import delete_folder, open_lock
from megatron_neobert.text import parse_json, visible

SWEEP = "sweep.json"  # the last finished sweep, next to the ledger of a task
RUNS = "runs"  # folder next to the ledger; each run whose weights are kept has a subfolder named after its key
_PROTOCOL = ("epochs", "max_length", "limit", "dtype", "attention")  # options that change scores

Result = dict[str, Any]  # of one task, as it is in the record
Describe = Callable[[dict[str, Result]], dict[str, Any]]  # returns further results for the record


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
        """Return the grid with the values that the options set."""
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


@dataclass(kw_only=True)
class Sweep:
    """All points of a grid with all seeds, on one task."""

    kind: str  # of the record: glue, ner or classify
    task: Task
    grid: Grid
    start: Path  # folder of the initial weights
    data: Mapping[str, str]  # hash of each split
    options: FineTuneOptions

    @cached_property
    def common_unit(self) -> dict[str, Any]:
        """Entries that the ledger units of all runs share: task, model, initial weights, data hashes and protocol."""
        protocol = {name: getattr(self.options, name) for name in _PROTOCOL} | {"patience": PATIENCE}
        return {
            "task": self.task.name,
            "model": fingerprint(self.options.model),
            "start": fingerprint(self.start),
            "data": dict(self.data),
            "protocol": protocol,
        }


def run_sweep(sweep: Sweep, describe: Describe | None = None) -> None:
    """Execute the runs that the ledger lacks, and write OUTPUT/MODEL/KIND.json and .md with all tasks of the model.

    `describe` returns further results for the record. Raises OutputError if another command is writing,
    ChildProcessError if a worker died, or MissingInputError, DataError or ConversionError if an input cannot be used.
    """
    options = sweep.options
    folder = options.output / model_name(options.model)
    with open_ledger(folder / sweep.kind / quote(sweep.task.name, safe=""), options.device) as ledger:
        _run_points(ledger, sweep)
    write_results(sweep.kind, folder, options.model, describe)


def _run_points(ledger: Ledger, sweep: Sweep) -> None:
    """Execute the runs that the ledger lacks, print progress on stderr, and write the finished sweep.

    Of the runs of this sweep, only the best so far keeps its weights; the weights of the others are deleted. The best
    run of the last finished sweep keeps its weights, too, and stays the best if no run of this sweep is better.
    """
    folder = ledger.path.parent
    units = {point: {**sweep.common_unit, "point": asdict(point)} for point in sweep.grid.points(sweep.options.seeds)}
    keys = {point: key_of(unit) for point, unit in units.items()}
    runs = [
        Run(task=sweep.task, point=point, start=sweep.start, folder=folder / RUNS / key, options=sweep.options)
        for point, key in keys.items()
        if key not in ledger.lines
    ]
    finished, earlier = len(units) - len(runs), last_sweep(folder, sweep.common_unit["model"])
    kept = earlier and earlier["kept"]
    name = visible(sweep.task.name)  # of a file or folder of the user
    print(f"{name} {finished}/{len(units)}", file=sys.stderr, flush=True)
    for count, (run, outcome) in enumerate(run_all(runs, jobs=sweep.options.jobs), start=finished + 1):
        if fingerprint(run.start) != sweep.common_unit["start"]:
            raise DataError(f"{run.start} has changed during the sweep; start the same command again to measure it.")
        ledger.add(units[run.point], asdict(outcome))
        for key in set(keys.values()) - {kept, _best_key(ledger, keys.values())}:
            with suppress(OSError):
                delete_folder(folder / RUNS / key)
        show_progress(f"{name} {count}/{len(units)}", run, outcome)
    # The same command with a narrower grid may find weights of a point outside of it, and no others.
    candidates = list(keys.values())
    if kept in ledger.lines and sweep.common_unit.items() <= ledger.lines[kept]["unit"].items():
        candidates.append(kept)
    content = {
        "model": sweep.common_unit["model"],
        "kept": _best_key(ledger, candidates),
        "result": summarise({point: Outcome(**ledger.lines[key]["result"]) for point, key in keys.items()}),
        "settings": {
            "protocol": sweep.common_unit["protocol"],
            "device": sweep.options.device,
            "grid": asdict(sweep.grid),
            "seeds": list(sweep.options.seeds),
            "start": str(sweep.start),
            "data_dir": str(sweep.options.data_dir),
            "data": sweep.common_unit["data"],
        },
        "origin": origin_of(ledger.lines[key] for key in keys.values()),
    }
    replace_file(folder / SWEEP, json.dumps(content, indent=2) + "\n")


def _best_key(ledger: Ledger, keys: Iterable[str]) -> str | None:
    """Return the key of the best run whose weights exist, or None."""
    candidates = [key for key in keys if key in ledger.lines and (ledger.path.parent / RUNS / key / WEIGHTS).is_dir()]
    return max(candidates, key=lambda key: ledger.lines[key]["result"]["average"], default=None)


def last_sweep(folder: Path, model: str) -> dict[str, Any] | None:
    """Return the last finished sweep of a task's folder if it is of the model with this fingerprint, or None.

    Raises DataError if the file of the sweep is damaged.
    """
    if not (folder / SWEEP).exists():
        return None
    try:
        content: dict[str, Any] = parse_json(read_text(folder / SWEEP))
        return content if content["model"] == model else None
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{folder / SWEEP}: not a sweep ({error}); remove the file.") from error


def best_weights(folder: Path, sweep: Mapping[str, Any]) -> Path | None:
    """Return the folder of the best weights of a finished sweep, or None if the user has removed it."""
    weights: Path = folder / RUNS / str(sweep["kept"]) / WEIGHTS
    return weights if weights.is_dir() else None


def write_results(kind: str, folder: Path, model: Path, describe: Describe | None = None) -> None:
    """Write FOLDER/KIND.json and .md from a model's last finished sweep of every task. Wait for other writers.

    Args:
        folder: Folder of the model's results. FOLDER/KIND/TASK has the sweep of each task.
        describe: Returns further results for the record, given the results of all tasks.
    """
    model_fingerprint = fingerprint(model)
    with open_lock(folder / kind / "lock") as file:
        lock_if_possible(file, fcntl.LOCK_EX)  # commands for other tasks write the same record
        results, settings, sweeps = dict[str, Result](), dict[str, Any](), []
        for path in sorted((folder / kind).glob(f"*/{SWEEP}")):
            if sweep := last_sweep(path.parent, model_fingerprint):
                weights, task = best_weights(path.parent, sweep), unquote(path.parent.name)
                results[task] = sweep["result"] | {"kept": None if weights is None else str(weights)}
                settings[task] = sweep["settings"]
                sweeps.append(sweep)
        write_record(
            folder / f"{kind}.json",
            folder=model,
            fingerprint=model_fingerprint,
            settings=settings,
            results={"tasks": results} | (describe(results) if describe else {}),
            lines=sweeps,
        )
        write_page(kind, [folder / f"{kind}.json"], folder)


def show_progress(position: str, run: Run, outcome: Outcome) -> None:
    """Print a line for a finished run."""
    score = f"{100 * outcome.average:.2f} at step {outcome.best_step:,} of {outcome.steps:,}"
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
