"""The runs of one model on one task: which are done, whose weights are kept, and which point is the best.

They are in an Optuna database, which `optuna-dashboard sqlite:///FILE` shows, beside the weights of the best of them. A
run is entered when it is finished, so one that was killed has left nothing but its folder, and is run again. Optuna's
GridSampler is not asked for points: it takes a killed run for one that is still running, a failed one for one that is
done, and hands out points twice where several processes near the grid's end.

A task's number is the mean over seeds of the runs' averages at the point where that is highest; the spread is the
standard deviation over seeds, n - 1. Chosen on the same rows that it is measured on, as everywhere in the literature.
"""

import dataclasses
import json
import shutil
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import optuna
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.trial import create_trial

from megatron_neobert.evaluation.encoders import fingerprint
from megatron_neobert.evaluation.fine_tuning.pool import run_all
from megatron_neobert.evaluation.fine_tuning.settings import Grid, Point, Protocol
from megatron_neobert.evaluation.fine_tuning.trainer import MODEL, Outcome, Run
from megatron_neobert.evaluation.records import read_record, refuse_changed_settings
from megatron_neobert.runtime.atomic_files import replace_file

RESULT = "result.json"
DATABASE = "runs.db"
BEST = "best"  # folder of the best run's weights, named by the file RUN in it
RUN = "run.txt"
_DISTRIBUTIONS = {
    "batch_size": IntDistribution(1, 1 << 20),
    "learning_rate": FloatDistribution(0.0, 1e3),
    "weight_decay": FloatDistribution(0.0, 1e3),
    "seed": IntDistribution(0, 1 << 32),
}

Progress = Callable[[str, int, int, Run | None, Outcome | None], None]  # task, done, all, the run that has ended


class TaskStudy:
    """`folder` holds the database, the best weights and those of runs in progress."""

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

    def run(
        self, points: Sequence[Point], build: Callable[[Point], Run], *, jobs: int, on_progress: Progress
    ) -> dict[Point, Outcome]:
        """Runs what has not been run; the outcomes of all points, in their order."""
        self.tidy()
        finished = self.outcomes
        left = [point for point in points if point not in finished]
        before = len(points) - len(left)
        on_progress(self._study.study_name, before, len(points), None, None)
        for done, (run, outcome) in enumerate(run_all([build(point) for point in left], jobs=jobs), start=before + 1):
            self.enter(run.point, outcome)
            on_progress(self._study.study_name, done, len(points), run, outcome)
        finished = self.outcomes
        return {point: finished[point] for point in points}


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    """What is asked for: one model on tasks of a kind, each with a grid of its own or the same."""

    kind: ClassVar[str]  # of the record, and name of the tasks' folder
    run: ClassVar[type[Run]]
    model: Path
    data_dir: Path
    output: Path
    seeds: tuple[int, ...]
    protocol: Protocol
    jobs: int = 1

    @property
    def folder(self) -> Path:
        return self.output / self.model.resolve().name

    def task_folder(self, task: str) -> Path:
        return self.folder / self.kind / task.replace("/", "_")

    def run_task(
        self, task: str, grid: Grid, *, start: Path, rows: dict[str, int], on_progress: Progress
    ) -> tuple[TaskStudy, dict[Point, Outcome], dict[str, Any]]:
        """Runs the points that have not been run: their study, all outcomes, and the settings for the record.

        Args:
            start: Folder of the model that the runs start from.
            rows: Of the data, by split; with them the runs of other data are told apart.
        """
        protocol = dataclasses.asdict(self.protocol)
        del protocol["device"]  # where it is computed changes no identity
        study = TaskStudy(self.task_folder(task), task, {"start": fingerprint(start), "rows": rows, **protocol})

        def build(point: Point) -> Run:
            place = study.run_folder(point)
            return self.run(
                task=task, point=point, start=start, data_dir=self.data_dir, folder=place, protocol=self.protocol
            )

        outcomes = study.run(grid.points(self.seeds), build, jobs=self.jobs, on_progress=on_progress)
        settings = {
            "protocol": protocol,
            "device": self.protocol.device,
            "grid": dataclasses.asdict(grid),
            "seeds": list(self.seeds),
            "start": str(start),
            "data_dir": str(self.data_dir),
            "rows": rows,
        }
        return study, outcomes, settings


def show_progress(task: str, done: int, total: int, run: Run | None, outcome: Outcome | None) -> None:
    """A line for every run that has ended."""
    line = f"{task} {done}/{total}"
    if run is not None and outcome is not None:
        line += f" | {run.point.name} | {100 * outcome.average:.2f} at step {outcome.best_step:,} of {outcome.steps:,}"
        line += f" | {outcome.seconds:,.0f} s"
    print(line, file=sys.stderr, flush=True)


Result = dict[str, Any]  # of one task, as it stands in the record


def summarise(outcomes: Mapping[Point, Outcome], metrics: Iterable[str], *, kept: str | None) -> Result:
    """The best point of a grid whose runs are all done; metrics are fractions of 1.

    Args:
        metrics: Those that the result has.
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
        "metrics": {name: _spread([outcomes[run].scores[name] for run in runs]) for name in metrics},
        "best_point": best_point,
        "seeds": [run.seed for run in runs],
        "points": len(by_point),  # of the grid, seeds apart
        "kept": kept,
        "seconds": sum(outcome.seconds for outcome in outcomes.values()),  # of all runs together
    }


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    return {"mean": statistics.fmean(values), "sd": statistics.stdev(values) if len(values) > 1 else None}


def save_result(folder: Path, result: Result, *, model: str, settings: dict[str, Any]) -> None:
    """One task's result into its folder; `model` is the fingerprint of the one that was evaluated."""
    content = {"model": model, "settings": settings, "result": result}
    replace_file(folder / RESULT, json.dumps(content, indent=2) + "\n")


def read_results(folders: Mapping[str, Path], *, fingerprint: str) -> tuple[dict[str, Result], dict[str, Any]]:
    """Results and settings, by task, of those that have been run with this model, also by earlier commands."""
    paths = {task: folder / RESULT for task, folder in folders.items()}
    found = {task: read_record(path) for task, path in paths.items() if path.is_file()}
    found = {task: content for task, content in found.items() if content["model"] == fingerprint}
    results = {task: content["result"] for task, content in found.items()}
    return results, {task: content["settings"] for task, content in found.items()}
