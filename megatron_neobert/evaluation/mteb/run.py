"""Runs mteb's tasks one after another from data in a folder of our own, and keeps each result as it comes.

Data: a task is stored as mteb holds it after loading: what it downloads, cuts and draws at random happens once, on the
connected machine, and any machine with the same folder evaluates the same texts. Each task's folder appears whole or
not at all and names the revision of its data; another one than the installed mteb asks for is refused.

Results: one file per task in the layout of mteb's own cache, results/<model>/<revision>/<task>.json, so that mteb's
tools read it. The revision stands for the weights and for every setting that changes a score: another dtype, pooling or
instruction never meets an old result. The same command after a kill runs what is not there yet. A category's mean is
given only if every one of its tasks has a score, and the overall mean (over tasks, not over categories) only if all
have: a mean over what happens to be there would not compare with anything. What is missing is named instead.
"""

import hashlib
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mteb
from datasets import Dataset, DatasetDict, load_from_disk
from mteb.abstasks import AbsTaskRetrieval
from mteb.abstasks.abstask import AbsTask
from mteb.abstasks.aggregated_task import AbsTaskAggregate
from mteb.results import TaskResult

from megatron_neobert.errors import DataError
from megatron_neobert.evaluation.mteb.tasks import PREFIX, flatten
from megatron_neobert.evaluation.reported_numbers import MTEB_CATEGORIES
from megatron_neobert.runtime.atomic_files import own_name, replace_file, sync_to_disk

COLUMNS = ("task", "type", "metric", "score", "missing")  # of the CSV
_ABOUT = "task.json"
_NOT_DATA = {"dataset", "data_loaded", "rng_state", "np_rng", "seed", "hf_subsets"}
_DOCUMENTS_PER_QUERY = 10  # that --limit leaves beside the relevant ones


def task_folder(data_dir: Path, task: AbsTask) -> Path:
    """Where a task's data is, or will be."""
    return data_dir / "tasks" / task.metadata.name


def stored_revision(data_dir: Path, task: AbsTask) -> str | None:
    """Of the data that is there, or None."""
    about = task_folder(data_dir, task) / _ABOUT
    return str(json.loads(about.read_text(encoding="utf-8"))["revision"]) if about.is_file() else None


def check_revision(data_dir: Path, task: AbsTask) -> None:
    """Raises DataError if the data that is there is of another revision than the installed mteb's task."""
    if (stored := stored_revision(data_dir, task)) != task.metadata.revision:
        raise DataError(
            f"{task_folder(data_dir, task)}: holds revision {stored}, and the installed mteb evaluates "
            f"{task.metadata.revision}; run neobert fetch mteb --refresh with this mteb on a connected machine."
        )


def store_task(data_dir: Path, task: AbsTask) -> None:
    """Loads a task by mteb's own means, which may download, and writes what it then holds."""
    before = _settings(task)
    task.load_data()
    if isinstance(task, AbsTaskRetrieval):
        task.convert_v1_dataset_format_to_v2(num_proc=None)  # some tasks still load the old form
    target = task_folder(data_dir, task)
    temporary = own_name(target)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    subsets = []
    for number, (subset, split, content) in enumerate(_splits(task)):
        place = temporary / str(number)
        if isinstance(content, Dataset):
            content.save_to_disk(place)
        else:  # of retrieval
            for name in ("corpus", "queries"):
                content[name].save_to_disk(place / name)
            judged = {name: content[name] for name in ("relevant_docs", "top_ranked")}
            (place / "judged.json").write_text(json.dumps(judged), encoding="utf-8")
        subsets.append({"subset": subset, "split": split})
    changed = {name: value for name, value in _settings(task).items() if before.get(name, task) != value}
    about = {"name": task.metadata.name, "revision": task.metadata.revision, "parts": subsets, "settings": changed}
    (temporary / _ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)
    sync_to_disk(target.parent)
    task.unload_data()


def load_task(data_dir: Path, task: AbsTask) -> None:
    """Gives a task the data that `store_task` wrote.

    Raises:
        DataError: It is of another revision than the installed mteb's task.
    """
    check_revision(data_dir, task)
    folder = task_folder(data_dir, task)
    about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
    dataset: dict[Any, Any] = {}
    for number, part in enumerate(about["parts"]):
        splits = dataset if part["subset"] is None else dataset.setdefault(part["subset"], {})
        place, judged = folder / str(number), folder / str(number) / "judged.json"
        content: Any = None
        if judged.exists():  # of retrieval
            content = json.loads(judged.read_text(encoding="utf-8"))
            content |= {name: load_from_disk(place / name) for name in ("corpus", "queries")}
        splits[part["split"]] = load_from_disk(place) if content is None else content
    plain = all(part["subset"] is None for part in about["parts"])
    task.dataset = DatasetDict(dataset) if plain else dataset
    if not plain and not isinstance(task, AbsTaskRetrieval):
        task.dataset = {subset: DatasetDict(splits) for subset, splits in dataset.items()}
    for name, value in about["settings"].items():
        setattr(task, name, value)
    task.data_loaded = True


def limit_task(task: AbsTask, limit: int) -> None:
    """Leaves the first `limit` examples of what is scored, for a quick look; nothing about training examples."""
    assert task.dataset is not None, task.metadata.name
    trained_on = getattr(task, "train_split", None)
    for subset, split, content in list(_splits(task)):
        if split == trained_on and split not in task.eval_splits:
            continue
        splits: Any = task.dataset if subset is None else task.dataset[subset]
        splits[split] = _limit_rows(content, limit) if isinstance(content, Dataset) else _limit_queries(content, limit)


def _splits(task: AbsTask) -> Iterator[tuple[str | None, str, Any]]:
    """(subset or None, split, content) of the splits that an evaluation reads."""
    assert task.dataset is not None, task.metadata.name
    wanted = {*task.eval_splits, getattr(task, "train_split", None)}
    for key, content in task.dataset.items():
        if isinstance(content, Dataset):
            if key in wanted:
                yield None, key, content
            continue
        for split, part in content.items():
            if split in wanted and key in task.hf_subsets:
                yield key, split, part


def _settings(task: AbsTask) -> dict[str, Any]:
    """What loading may change besides the data: some tasks set how many documents they cluster."""
    plain = (bool, int, float, str, type(None))
    return {key: value for key, value in vars(task).items() if key not in _NOT_DATA and isinstance(value, plain)}


def _limit_rows(rows: Dataset, limit: int) -> Dataset:
    """Of rows that hold a whole list of examples each, the first of these."""
    rows = rows.select(range(min(limit, len(rows))))
    if not any(isinstance(value, list) for value in rows[0].values()):
        return rows
    return rows.map(lambda row: {key: value[:limit] for key, value in row.items() if isinstance(value, list)})


def _limit_queries(content: dict[str, Any], limit: int) -> dict[str, Any]:
    queries = content["queries"].select(range(min(limit, len(content["queries"]))))
    judged = {query: content["relevant_docs"].get(query, {}) for query in queries["id"]}
    ranked = content["top_ranked"] and {query: content["top_ranked"][query] for query in queries["id"]}
    kept = {document for documents in [*judged.values(), *(ranked or {}).values()] for document in documents}
    others = [i for i, document in enumerate(content["corpus"]["id"]) if document not in kept]
    kept_rows = [i for i, document in enumerate(content["corpus"]["id"]) if document in kept]
    corpus = content["corpus"].select(sorted(kept_rows + others[: limit * _DOCUMENTS_PER_QUERY]))
    return {"corpus": corpus, "queries": queries, "relevant_docs": judged, "top_ranked": ranked}


class ResultFiles:
    """The results of one model under one protocol.

    Args:
        folder: results/ appears in it, with the first result.
        settings: All that changes a score.
    """

    def __init__(self, folder: Path, *, name: str, fingerprint: str, settings: dict[str, Any]) -> None:
        text = json.dumps({**settings, "mteb": mteb.__version__}, sort_keys=True)
        revision = f"{fingerprint}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
        self.folder = folder / "results" / f"local__{name}" / revision
        self._meta = {"name": f"local/{name}", "revision": revision, "settings": settings}

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
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_file(self.folder / "model_meta.json", json.dumps(self._meta, indent=2) + "\n")
        path = self.folder / f"{result.task_name}.json"
        content = result.to_dict() | {"date": result.date.timestamp() if result.date else None}
        replace_file(path, json.dumps(content, indent=2, default=str) + "\n")


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """One task of the benchmark: 100 x mteb's main score, or None with the reason."""

    name: str
    type: str
    metric: str
    score: float | None
    missing: str | None = None


def mean_of(scores: Sequence[TaskScore]) -> dict[str, Any]:
    """The mean over tasks, each weighing the same; None unless all are there."""
    values = [task.score for task in scores if task.score is not None]
    complete = bool(scores) and len(values) == len(scores)
    mean = math.fsum(values) / len(values) if complete else None
    return {"value": mean, "there": len(values), "expected": len(scores)}


def to_results(scores: Sequence[TaskScore]) -> dict[str, Any]:
    """For the record; of the categories that occur, those of Table 4 first."""
    types = [*MTEB_CATEGORIES, *sorted({task.type for task in scores} - set(MTEB_CATEGORIES))]
    groups = {type_: [task for task in scores if task.type == type_] for type_ in types}
    return {
        "average": mean_of(scores),
        "categories": {name: mean_of(group) for name, group in groups.items() if group},
        "tasks": {task.name: vars(task) for task in scores},
        "missing": [task.name for task in scores if task.score is None],
    }


def csv_rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    """One per task, then one per category, then the average; an empty score is missing."""
    rows = [{**task, "task": name} for name, task in results["tasks"].items()]
    for name, mean in (results["categories"] | {"all": results["average"]}).items():
        metric = f"{mean['there']} of {mean['expected']} tasks"
        rows.append({"task": "mean", "type": name, "metric": metric, "score": mean["value"]})
    return [row | {"score": None if row["score"] is None else f"{row['score']:.4f}"} for row in rows]


def find_missing(tasks: Sequence[AbsTask], files: ResultFiles, data_dir: Path) -> list[str]:
    """Names of tasks with neither a result nor data.

    Raises:
        DataError: Data that is needed is of another revision.
    """
    missing = []
    for task in flatten(tasks):
        if task.metadata.name.startswith(PREFIX) or files.read(task) is not None:
            continue
        if stored_revision(data_dir, task) is None:
            missing.append(task.metadata.name)
        else:
            check_revision(data_dir, task)
    return missing


def run_tasks(
    tasks: Sequence[AbsTask],
    build_encoder: Callable[[], Any],
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
            report(f"{place}: {100 * float(result.get_score()):.2f} (kept)")
            continue
        if task.metadata.name.startswith(PREFIX):
            task.load_data()
        elif stored_revision(data_dir, task) is not None:
            load_task(data_dir, task)
        else:
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
        report(f"{place}: {100 * float(result.get_score()):.2f} ({result.evaluation_time:.0f} s)")
    return [_score(task, files) for task in tasks]


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
