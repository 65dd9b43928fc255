"""GLUE on one model: the grid of every task, the start of some tasks from the best MNLI model, and the results.

OUTPUT/NAME/glue/TASK holds a task's runs and best weights, OUTPUT/NAME/glue.json, .csv and .md the results. The same
command goes on after a kill; the runs that were going on then start again. Commands for other tasks may run meanwhile.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_neobert.errors import ConfigError, MissingInputError
from megatron_neobert.evaluation.encoders import LoadOptions, fingerprint, load_tokenizer
from megatron_neobert.evaluation.glue.data import check_rows, read_split
from megatron_neobert.evaluation.glue.grid import Grid
from megatron_neobert.evaluation.glue.models import load_classifier, longest_input
from megatron_neobert.evaluation.glue.predict import read_test_sets
from megatron_neobert.evaluation.glue.results import (
    RESULT,
    TaskResult,
    load_results,
    save_result,
    summarise,
    write_results,
)
from megatron_neobert.evaluation.glue.study import BEST, TaskStudy
from megatron_neobert.evaluation.glue.tasks import TASKS
from megatron_neobert.evaluation.glue.training import Outcome, Protocol, Run
from megatron_neobert.evaluation.glue.workers import run_all
from megatron_neobert.evaluation.records import hold

SOURCE = "mnli"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is asked for.

    `transfer_from` is a folder with a model fine-tuned on MNLI, "mnli" for the best one of this evaluation, or None.
    """

    model: Path
    data_dir: Path
    output: Path
    grids: Mapping[str, Grid]  # by task
    seeds: tuple[int, ...]
    protocol: Protocol
    transfer_from: str | Path | None
    jobs: int = 1
    predict: bool = False  # the test sets will be asked for

    @property
    def folder(self) -> Path:
        return self.output / self.model.resolve().name

    @property
    def tasks(self) -> list[str]:
        """MNLI first, because others may start from it."""
        return sorted(self.grids, key=list(TASKS).index)

    def task_folder(self, task: str) -> Path:
        return self.folder / "glue" / task

    def starts_elsewhere(self, task: str) -> bool:
        return self.transfer_from is not None and TASKS[task].starts_from_mnli


Progress = Callable[[str, int, int, Run | None, Outcome | None], None]  # task, done, all, the run that has ended


def evaluate(evaluation: Evaluation, on_progress: Progress) -> None:
    """Runs what has not been run, and writes the results after every task, with those of earlier commands.

    Raises:
        ConfigError, MissingInputError, DataError, ConversionError: Of model or data, before anything is run.
        OutputError: The output is of other settings, or another command is writing it.
    """
    _check_transfer(evaluation)
    rows = _count_rows(evaluation)
    head = _check_model(evaluation)
    model = fingerprint(evaluation.model)
    for task in evaluation.tasks:
        folder = evaluation.task_folder(task)
        with hold(folder / "lock"):
            save_result(folder / RESULT, _evaluate_task(evaluation, task, head, rows[task], on_progress), model=model)
        results = load_results(evaluation.folder / "glue", model=model)
        write_results(evaluation.folder, evaluation.model, results, device=evaluation.protocol.device)


def _evaluate_task(
    evaluation: Evaluation, task: str, head: dict[str, Any], rows: dict[str, int], on_progress: Progress
) -> TaskResult:
    start = _start_of(evaluation, task)
    identity = {"start": fingerprint(start), "rows": rows, **_protocol(evaluation)}
    study = TaskStudy(evaluation.task_folder(task), task, identity)
    study.tidy()
    points = evaluation.grids[task].points(evaluation.seeds)
    left = study.left(points)
    on_progress(task, len(points) - len(left), len(points), None, None)
    runs = [
        Run(
            task=task,
            point=point,
            start=start,
            data_dir=evaluation.data_dir,
            folder=study.run_folder(point),
            protocol=evaluation.protocol,
        )
        for point in left
    ]
    for done, (run, outcome) in enumerate(run_all(runs, jobs=evaluation.jobs), start=len(points) - len(left) + 1):
        study.enter(run.point, outcome)
        on_progress(task, done, len(points), run, outcome)
    outcomes = study.outcomes
    return summarise(
        task,
        {point: outcomes[point] for point in points},
        from_mnli=start != evaluation.model,
        kept=study.kept,
        settings=_settings(evaluation, task, start) | {"rows": rows} | head,
    )


def best_model(evaluation: Evaluation, task: str) -> Path:
    """Folder of the best weights of a task that has been run.

    Raises:
        MissingInputError: Somebody has removed it.
    """
    folder = evaluation.task_folder(task)
    if not (folder / BEST).is_dir():
        raise MissingInputError(f"{folder / BEST}: the best weights are gone; remove {folder} to run {task} again.")
    return folder / BEST


def _start_of(evaluation: Evaluation, task: str) -> Path:
    if not evaluation.starts_elsewhere(task):
        return evaluation.model
    source = evaluation.transfer_from
    return source if isinstance(source, Path) else best_model(evaluation, SOURCE)


def _check_transfer(evaluation: Evaluation) -> None:
    followers = [task for task in evaluation.tasks if evaluation.starts_elsewhere(task)]
    if evaluation.transfer_from != SOURCE or not followers or SOURCE in evaluation.grids:
        return
    if not (evaluation.task_folder(SOURCE) / BEST).is_dir():
        raise ConfigError(
            f"--tasks {' '.join(followers)}: the paper starts them from the best MNLI model, and MNLI has not been run "
            f"in {evaluation.folder}. Add mnli to --tasks, name a model with --transfer-from DIR, or start from the "
            "pre-trained one with --no-transfer."
        )


def _count_rows(evaluation: Evaluation) -> dict[str, dict[str, int]]:
    """By task and split, of files that can be read; warns where they are not the benchmark's."""
    rows: dict[str, dict[str, int]] = {}
    for name in evaluation.tasks:
        task = TASKS[name]
        for split in ("train", *task.validation):
            count = len(read_split(evaluation.data_dir, task, split).texts)
            check_rows(task, split, count)
            rows.setdefault(name, {})[split] = count
        if evaluation.predict:  # not part of the rows that results depend on
            for _ in read_test_sets(name, evaluation.data_dir):
                pass
    return rows


def _check_model(evaluation: Evaluation) -> dict[str, Any]:
    """Loads what the runs will load, once, and says what they will use."""
    starts = {evaluation.model}
    if isinstance(evaluation.transfer_from, Path):
        starts.add(evaluation.transfer_from)
    for start in starts:
        model = load_classifier(start, TASKS["cola"], LoadOptions(attention=evaluation.protocol.attention))
        length = longest_input(model, load_tokenizer(start), evaluation.protocol.max_length)
    return {"head": type(model).__name__, "longest_input_tokens": length}


def _protocol(evaluation: Evaluation) -> dict[str, Any]:
    """All of it but where it is computed."""
    protocol = dataclasses.asdict(evaluation.protocol)
    del protocol["device"]
    return protocol


def _settings(evaluation: Evaluation, task: str, start: Path) -> dict[str, Any]:
    return {
        "protocol": _protocol(evaluation),
        "device": evaluation.protocol.device,
        "grid": dataclasses.asdict(evaluation.grids[task]),
        "seeds": list(evaluation.seeds),
        "start": str(start),
        "data_dir": str(evaluation.data_dir),
    }
