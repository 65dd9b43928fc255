"""Runs tasks one after another and keeps each result as it comes.

A result is one file in the layout of mteb's own cache, results/<model>/<revision>/<task>.json, so that mteb's tools
read it. The revision stands for the weights and for every setting that changes a score: another dtype, pooling or
instruction never meets an old result. The same command after a kill runs what is not there yet.
"""

import hashlib
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mteb
from mteb.abstasks.abstask import AbsTask
from mteb.abstasks.aggregated_task import AbsTaskAggregate
from mteb.results import TaskResult

from megatron_neobert.errors import MissingInputError
from megatron_neobert.evaluation.mteb.data import check_revision, is_stored, limit_task, load_task
from megatron_neobert.evaluation.mteb.local import PREFIX
from megatron_neobert.evaluation.mteb.results import TaskScore
from megatron_neobert.evaluation.mteb.tasks import flatten
from megatron_neobert.runtime.atomic_files import replace_file

BuildEncoder = Callable[[], Any]


class ResultFiles:
    """The results of one model under one protocol.

    Args:
        folder: results/ appears in it.
        settings: All that changes a score.
    """

    def __init__(self, folder: Path, *, name: str, fingerprint: str, settings: dict[str, Any]) -> None:
        text = json.dumps({**settings, "mteb": mteb.__version__}, sort_keys=True)
        revision = f"{fingerprint}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
        self.folder = folder / "results" / f"local__{name}" / revision
        self.folder.mkdir(parents=True, exist_ok=True)
        meta = {"name": f"local/{name}", "revision": revision, "settings": settings}
        replace_file(self.folder / "model_meta.json", json.dumps(meta, indent=2) + "\n")

    def read(self, task: AbsTask) -> TaskResult | None:
        """What was found for a task in its present data and all its splits, or None."""
        path = self.folder / f"{task.metadata.name}.json"
        if not path.exists():
            return None
        result = TaskResult.from_disk(path)
        complete = not result.get_missing_evaluations(task)
        return result if complete and result.dataset_revision == task.metadata.revision else None

    def write(self, result: TaskResult) -> None:
        """Whole or not at all."""
        path = self.folder / f"{result.task_name}.json"
        content = result.to_dict() | {"date": result.date.timestamp() if result.date else None}
        replace_file(path, json.dumps(content, indent=2, default=str) + "\n")


def find_missing(tasks: Sequence[AbsTask], files: ResultFiles, data_dir: Path) -> list[str]:
    """Names of tasks with neither a result nor data.

    Raises:
        DataError: Data that is needed is of another revision.
    """
    missing = []
    for task in flatten(tasks):
        if task.metadata.name.startswith(PREFIX) or files.read(task) is not None:
            continue
        if is_stored(data_dir, task):
            check_revision(data_dir, task)
        else:
            missing.append(task.metadata.name)
    return missing


def refuse_missing(missing: Sequence[str], data_dir: Path) -> None:
    """Raises MissingInputError, naming tasks without data and the command that gets them."""
    if missing:
        raise MissingInputError(
            f"--data-dir {data_dir}: no data of {len(missing)} tasks ({', '.join(missing)}); run python "
            "tools/fetch_mteb.py --output DIR with the same --benchmark or --tasks on a machine with a network and "
            "copy DIR here, or go on without them with --skip-missing."
        )


def run_tasks(
    tasks: Sequence[AbsTask],
    build_encoder: BuildEncoder,
    files: ResultFiles,
    *,
    data_dir: Path,
    batch_size: int,
    limit: int | None,
    report: Callable[[str], None],
) -> list[TaskScore]:
    """A score, or the reason why there is none, for each task in its order.

    Args:
        build_encoder: Called once, and only if something has to be computed.
        limit: Examples per task, for a quick look.
        report: Gets a line per task.
    """
    parts = flatten(tasks)
    encoder: Any = None
    for number, task in enumerate(parts, start=1):
        place = f"{number}/{len(parts)} {task.metadata.name}"
        if (result := files.read(task)) is not None:
            report(f"{place}: {_percent(result)} (kept)")
            continue
        if not _load(task, data_dir):
            report(f"{place}: no data")
            continue
        if limit is not None:
            limit_task(task, limit)
        encoder = encoder or build_encoder()
        result = mteb.evaluate(
            encoder,
            task,
            cache=None,
            co2_tracker=False,
            encode_kwargs={"batch_size": batch_size, "show_progress_bar": sys.stderr.isatty()},  # type: ignore[arg-type]
            show_progress_bar=False,
        ).task_results[0]
        files.write(result)
        task.unload_data()
        report(f"{place}: {_percent(result)} ({result.evaluation_time:.0f} s)")
    return [_score(task, files) for task in tasks]


def _load(task: AbsTask, data_dir: Path) -> bool:
    if task.metadata.name.startswith(PREFIX):
        task.load_data()
    elif is_stored(data_dir, task):
        load_task(data_dir, task)
    else:
        return False
    return True


def _score(task: AbsTask, files: ResultFiles) -> TaskScore:
    """An aggregate's score is the mean of its parts, and missing where one of them is."""
    about: dict[str, Any] = {"name": task.metadata.name, "type": task.metadata.type, "metric": task.metadata.main_score}
    parts = {part.metadata.name: files.read(part) for part in flatten([task])}
    scores = {name: float(result.get_score()) for name, result in parts.items() if result is not None}
    if absent := [name for name in parts if name not in scores]:
        reason = "no data" if absent == [task.metadata.name] else f"no data of {', '.join(absent)}"
        return TaskScore(**about, score=None, missing=reason)
    if undefined := [name for name, score in scores.items() if not math.isfinite(score)]:
        return TaskScore(**about, score=None, missing=f"not a number: the score of {', '.join(undefined)}")
    assert len(scores) == 1 or isinstance(task, AbsTaskAggregate), scores
    return TaskScore(**about, score=100 * math.fsum(scores.values()) / len(scores))


def _percent(result: TaskResult) -> str:
    return f"{100 * float(result.get_score()):.2f}"
