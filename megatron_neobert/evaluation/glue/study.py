"""The runs of one task that are done, in an Optuna database, and the weights of the best of them.

A run is entered when it is finished, so one that was killed has left nothing but its folder, and is run again.
Optuna's GridSampler is not asked for points: it takes a killed run for one that is still running, a failed one for one
that is done, and hands out points twice where several processes near the grid's end. What is left is a difference of
sets here. `optuna-dashboard sqlite:///FILE` shows the database.
"""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.trial import create_trial

from megatron_neobert.evaluation.glue.training import MODEL, Outcome, Point
from megatron_neobert.evaluation.records import refuse_changed_settings

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
