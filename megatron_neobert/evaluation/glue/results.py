"""GLUE results of one model: the runs that are done, and the best point of every task as record, CSV and page.

The runs of a task are in an Optuna database, which `optuna-dashboard sqlite:///FILE` shows, beside the weights of the
best of them. A run is entered when it is finished, so one that was killed has left nothing but its folder, and is run
again. Optuna's GridSampler is not asked for points: it takes a killed run for one that is still running, a failed one
for one that is done, and hands out points twice where several processes near the grid's end.

A task's number is the mean over seeds of its metrics' average at the point where that is highest; the spread is the
standard deviation over seeds, n - 1. Chosen on the same rows that it is measured on, as everywhere in the literature.
"""

import dataclasses
import json
import shutil
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.trial import create_trial

from megatron_neobert.evaluation.glue.tasks import PAPER_TASKS, TASKS
from megatron_neobert.evaluation.glue.training import MODEL, Outcome, Point
from megatron_neobert.evaluation.pages import to_csv
from megatron_neobert.evaluation.records import read_record, refuse_changed_settings, write_record
from megatron_neobert.evaluation.report import write_page
from megatron_neobert.runtime.atomic_files import replace_file

RESULT = "result.json"
_COLUMNS = ("task", "metric", "mean", "sd", "seeds", "batch_size", "learning_rate", "weight_decay", "from_mnli")

DATABASE = "runs.db"
BEST = "best"  # folder of the best run's weights, named by the file RUN in it
RUN = "glue_run.txt"
_DISTRIBUTIONS = {
    "batch_size": IntDistribution(1, 1 << 20),
    "learning_rate": FloatDistribution(0.0, 1e3),
    "weight_decay": FloatDistribution(0.0, 1e3),
    "seed": IntDistribution(0, 1 << 32),
}


class TaskStudy:
    """Of one model on one task; `folder` holds the database, the best weights and those of runs in progress."""

    def __init__(self, folder: Path, task: str, settings: dict[str, Any]) -> None:
        """Opens or creates it.

        Raises:
            ConfigError: It is there, and was made with other settings.
        """
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        database = f"sqlite:///{folder / DATABASE}"
        self._study = optuna.create_study(storage=database, study_name=task, direction="maximize", load_if_exists=True)
        if "settings" not in self._study.user_attrs:
            self._study.set_user_attr("settings", settings)
        refuse_changed_settings(folder, self._study.user_attrs["settings"], settings)

    @property
    def outcomes(self) -> dict[Point, Outcome]:
        """Of every run that is done, in the order in which they were."""
        trials = self._study.get_trials(deepcopy=False)
        return {Point(**trial.params): Outcome(**trial.user_attrs["outcome"]) for trial in trials}

    def run_folder(self, point: Point) -> Path:
        return self.folder / "runs" / point.name

    def enter(self, point: Point, outcome: Outcome) -> None:
        """Keeps a finished run; its weights only if they are the best so far."""
        self._study.add_trial(
            create_trial(
                params=dataclasses.asdict(point),
                distributions=_DISTRIBUTIONS,
                value=outcome.average,
                user_attrs={"outcome": dataclasses.asdict(outcome)},
            )
        )
        self.tidy()

    @property
    def kept(self) -> str | None:
        """Name of the run whose weights are kept: the best of all, whichever points a command asks for."""
        path = self.folder / BEST / RUN
        return path.read_text(encoding="utf-8").strip() if path.is_file() else None

    def tidy(self) -> None:
        """Moves the best run's weights to their place and deletes those of all others; may be interrupted anywhere."""
        if outcomes := self.outcomes:
            best = max(outcomes, key=lambda point: outcomes[point].average)  # of equals the first
            weights, place = self.run_folder(best) / MODEL, self.folder / BEST
            if weights.is_dir():
                (weights / RUN).write_text(best.name + "\n", encoding="utf-8")
                shutil.rmtree(place, ignore_errors=True)
                weights.rename(place)
            for point in outcomes:
                shutil.rmtree(self.run_folder(point), ignore_errors=True)


Result = dict[str, Any]  # of one task, as it stands in glue.json


def summarise(task: str, outcomes: Mapping[Point, Outcome], *, from_mnli: bool, kept: str | None) -> Result:
    """The best point of a grid whose runs are all done; metrics are fractions of 1.

    Args:
        kept: Name of the run whose weights are kept; None: somebody has removed them.
    """
    by_point: dict[Point, list[Point]] = {}
    for point in outcomes:
        by_point.setdefault(dataclasses.replace(point, seed=0), []).append(point)
    runs = max(by_point.values(), key=lambda runs: statistics.fmean(outcomes[run].average for run in runs))
    best_point = dataclasses.asdict(runs[0])
    del best_point["seed"]
    return {
        "score": _spread([outcomes[run].average for run in runs]),
        "metrics": {name: _spread([outcomes[run].scores[name] for run in runs]) for name in TASKS[task].metrics},
        "best_point": best_point,
        "seeds": [run.seed for run in runs],
        "points": len(by_point),  # of the grid, seeds apart
        "from_mnli": from_mnli,
        "kept": kept,
        "seconds": sum(outcome.seconds for outcome in outcomes.values()),  # of all runs together
    }


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    return {"mean": statistics.fmean(values), "sd": statistics.stdev(values) if len(values) > 1 else None}


def save_result(folder: Path, result: Result, *, model: str, settings: dict[str, Any]) -> None:
    """One task's result into its folder; `model` is the fingerprint of the one that was evaluated."""
    content = {"model": model, "settings": settings, "result": result}
    replace_file(folder / RESULT, json.dumps(content, indent=2) + "\n")


def write_results(folder: Path, model: Path, *, fingerprint: str, device: str) -> None:
    """glue.json, glue.csv and glue.md from the results of every task of this model, also those of earlier commands."""
    paths = {task: folder / "glue" / task / RESULT for task in TASKS}
    found = {task: read_record(path) for task, path in paths.items() if path.is_file()}
    found = {task: content for task, content in found.items() if content["model"] == fingerprint}
    tasks = {task: content["result"] for task, content in found.items()}
    settings = {task: content["settings"] for task, content in found.items()}
    why_none = why_no_average(tasks, settings)
    scores = [result["score"]["mean"] for task, result in tasks.items() if task in PAPER_TASKS]  # without WNLI
    results = {
        "tasks": tasks,
        "average": statistics.fmean(scores) if why_none is None else None,
        "no_average": why_none,
        "missing": [task for task in PAPER_TASKS if task not in tasks],
    }
    record = folder / "glue.json"
    write_record(record, "glue", folder=model, settings=settings, results=results, device=device)
    replace_file(folder / "glue.csv", to_csv(_COLUMNS, _csv_rows(tasks)))
    write_page("glue", [record], folder)


def why_no_average(tasks: Mapping[str, Result], settings: Mapping[str, dict[str, Any]]) -> str | None:
    """Why a mean over the paper's eight tasks would mean nothing; None where it means something.

    Grids may differ: the paper's best points do.
    """
    eight = [task for task in PAPER_TASKS if task in tasks]
    if len(eight) < len(PAPER_TASKS):
        return f"{len(eight)} of {len(PAPER_TASKS)} tasks"
    if any(settings[task]["protocol"] != settings[eight[0]]["protocol"] for task in eight):
        return "protocols differ"
    if any(set(tasks[task]["seeds"]) != set(tasks[eight[0]]["seeds"]) for task in eight):
        return "seeds differ"
    if len({tasks[task]["from_mnli"] for task in eight if TASKS[task].starts_from_mnli}) > 1:
        return "only some of the tasks that may start from MNLI do"
    return None


def _csv_rows(tasks: Mapping[str, Result]) -> Iterator[dict[str, Any]]:
    """One per metric, in percent."""
    for task, result in tasks.items():
        own = {**result["best_point"], "task": task, "seeds": len(result["seeds"])}
        for name, value in {"average": result["score"], **result["metrics"]}.items():
            mean, sd = (None if part is None else f"{100 * part:.3f}" for part in (value["mean"], value["sd"]))
            yield {**own, "metric": name, "mean": mean, "sd": sd, "from_mnli": int(result["from_mnli"])}
