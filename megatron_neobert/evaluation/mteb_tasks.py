"""The tasks that a command names: a benchmark of mteb, single tasks of it, or tasks from plain files.

`local:NAME` reads the folder NAME under --data-dir, and its files decide what the task is; docs/evaluation.md has the
three forms. They run through mteb's own tasks and have its metrics.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import mteb
from datasets import Dataset, DatasetDict
from mteb.abstasks import AbsTaskClassification, AbsTaskRetrieval, AbsTaskSTS
from mteb.abstasks.abstask import AbsTask
from mteb.abstasks.aggregated_task import AbsTaskAggregate
from mteb.abstasks.task_metadata import TaskMetadata

from megatron_neobert.errors import ConfigError, DataError, MissingInputError, suggestion
from megatron_neobert.evaluation.data import check_data, columns_of, read_tables, reading
from megatron_neobert.evaluation.paper import MTEB_BENCHMARKS, MTEB_PAPER
from megatron_neobert.runtime.atomic_files import sha256_of

PREFIX = "local:"
_FILES = "corpus.jsonl, queries.jsonl and qrels.tsv; train.csv and test.csv; or test.tsv"


def choose_tasks(benchmark: str, names: Sequence[str], languages: Sequence[str], data_dir: Path) -> list[AbsTask]:
    """Return the tasks of these names in their order, or without names those of a benchmark of mteb.

    A task of the paper's benchmark is taken as that has it, if the language is English: MSMARCO's dev split, for
    example. Tasks are copies, because mteb returns the same objects to every caller.

    Args:
        names: `local:NAME` reads data_dir/NAME.
        languages: ISO 639-3 codes; subsets of a task in other languages are left out.

    Raises:
        ConfigError: mteb has no such benchmark, task or language, or a name comes twice.
        MissingInputError: A local task without files.
    """
    if names and benchmark != MTEB_PAPER:
        raise ConfigError(f"--benchmark {benchmark} and --tasks are both given; name one of them.")
    if not names:
        try:
            return copy.deepcopy(list(mteb.get_benchmark(benchmark).tasks))
        except KeyError:
            known = [found.name for found in mteb.get_benchmarks()]
            raise ConfigError(
                f"--benchmark {benchmark}: mteb has no such benchmark{suggestion(benchmark, known, otherwise='.')}"
            ) from None
    if len(set(names)) < len(names):
        raise ConfigError(f"--tasks {' '.join(names)} names a task twice; name each once.")
    of_paper: dict[str, AbsTask] = {}
    if list(languages) == ["eng"]:
        of_paper = {task.metadata.name: task for name in MTEB_BENCHMARKS for task in mteb.get_benchmark(name).tasks}
    tasks = []
    for name in names:
        if name.startswith(PREFIX):
            tasks.append(local_task(name.removeprefix(PREFIX), data_dir))
        else:
            tasks.append(copy.deepcopy(of_paper[name]) if name in of_paper else _any_task(name, languages))
    return tasks


def flatten(tasks: Iterable[AbsTask]) -> list[AbsTask]:
    """Return the tasks with data: the twelve forums instead of CQADupstackRetrieval, which is their mean."""
    return [part for task in tasks for part in (task.tasks if isinstance(task, AbsTaskAggregate) else [task])]


def _any_task(name: str, languages: Sequence[str]) -> AbsTask:
    try:
        task = copy.deepcopy(mteb.get_task(name, languages=list(languages)))  # an aggregate's parts are its class's
    except KeyError:
        known = [task.metadata.name for task in mteb.get_tasks()]
        otherwise = f"; local tasks are written {PREFIX}NAME."
        raise ConfigError(
            f"--tasks {name}: mteb {mteb.__version__} has no such task{suggestion(name, known, otherwise=otherwise)}"
        ) from None
    except ValueError as error:
        raise ConfigError(f"--languages {' '.join(languages)}: {error}") from None
    if not task.hf_subsets:
        raise ConfigError(f"--tasks {name} has no texts in --languages {' '.join(languages)}.")
    return task


# --- local tasks


class _Local(AbsTask):
    """Describes itself per task, where mteb's tasks do per class."""

    def __init__(self, folder: Path, read: Callable[[Path], Any], metadata: TaskMetadata) -> None:
        self.metadata = metadata
        super().__init__()
        self._folder, self._read = folder, read

    def load_data(self, num_proc: int | None = None, **kwargs: Any) -> None:
        with reading(self._folder):
            self.dataset, self.data_loaded = self._read(self._folder), True

    def unload_data(self) -> None:  # mteb's removes the description too
        self.dataset, self.data_loaded = None, False


class LocalRetrieval(_Local, AbsTaskRetrieval):
    """Documents, queries and judgements."""


class LocalClassification(_Local, AbsTaskClassification):
    """Texts and labels."""


class LocalSTS(_Local, AbsTaskSTS):
    """Pairs of sentences and how similar people find them, on any scale."""


def local_task(name: str, data_dir: Path) -> AbsTask:
    """Return the task of a folder.

    Raises:
        MissingInputError: There is no such folder, or no files of a known form in it.
    """
    folder = data_dir / name
    check_data(folder)
    if not folder.is_dir():
        raise MissingInputError(f"--tasks {PREFIX}{name}: {folder} is no folder; put its files into it: {_FILES}.")
    forms: tuple[tuple[Any, Callable[[Path], Any], Any, str, tuple[str, ...]], ...] = (
        (LocalRetrieval, _read_beir, "Retrieval", "ndcg_at_10", ("corpus.jsonl", "queries.jsonl", "qrels.tsv")),
        (LocalClassification, _read_classification, "Classification", "accuracy", ("train.csv", "test.csv")),
        (LocalSTS, _read_pairs, "STS", "cosine_spearman", ("test.tsv",)),
    )
    for task, read, kind, metric, names in forms:
        files = [folder / file for file in names]
        if all(file.is_file() for file in files):
            metadata = TaskMetadata(
                name=f"{PREFIX}{name}",
                # Other files, other results.
                dataset={"path": f"local/{name}", "revision": "-".join(sha256_of(file)[:8] for file in files)},
                description=f"Local files of {name}.",
                type=kind,
                eval_splits=["test"],
                eval_langs=["eng-Latn"],
                main_score=metric,
            )
            found: AbsTask = task(folder, read, metadata)
            return found
    there = ", ".join(sorted(path.name for path in folder.iterdir())[:10]) or "nothing"
    raise MissingInputError(f"--tasks {PREFIX}{name}: {folder} holds {there}; expected {_FILES}.")


def _read(path: Path, names: Sequence[str]) -> list[list[Any]]:
    return columns_of(read_tables([path], texts=names if path.suffix != ".jsonl" else ()), names, str(path))


def _read_classification(folder: Path) -> DatasetDict:
    splits = {}
    for split in ("train", "test"):
        path = folder / f"{split}.csv"
        rows = read_tables([path], texts=("text", "label", "category"))
        column = next((name for name in ("label", "category") if name in rows.column_names), None)
        if column is None:
            raise DataError(f"{path}: has the columns {', '.join(rows.column_names)}, but no label or category.")
        splits[split] = columns_of(rows, ("text", column), str(path))
    numbers = {label: number for number, label in enumerate(sorted(set(splits["train"][1])))}
    if unknown := sorted(set(splits["test"][1]) - set(numbers)):
        raise DataError(f"{folder}: test.csv has labels that train.csv lacks: {', '.join(unknown[:5])}.")
    return DatasetDict(
        {
            split: Dataset.from_dict({"text": texts, "label": [numbers[label] for label in labels]})
            for split, (texts, labels) in splits.items()
        }
    )


def _read_pairs(folder: Path) -> DatasetDict:
    path = folder / "test.tsv"
    first, second, scores = _read(path, ("sentence1", "sentence2", "score"))
    columns = {"sentence1": first, "sentence2": second, "score": [_number(path, score) for score in scores]}
    return DatasetDict({"test": Dataset.from_dict(columns)})


def _read_beir(folder: Path) -> dict[str, Any]:
    corpus, path = read_tables([folder / "corpus.jsonl"]), folder / "qrels.tsv"
    ids, texts = columns_of(corpus, ("_id", "text"), str(folder / "corpus.jsonl"))
    titles = corpus["title"] if "title" in corpus.column_names else [""] * len(ids)
    relevant: dict[str, dict[str, int]] = {}
    for query, document, score in zip(*_read(path, ("query-id", "corpus-id", "score")), strict=True):
        relevant.setdefault(query, {})[document] = int(_number(path, score))
    queries = zip(*_read(folder / "queries.jsonl", ("_id", "text")), strict=True)
    judged = {str(id): str(text) for id, text in queries if str(id) in relevant}
    content = {
        "corpus": Dataset.from_dict(
            {"id": list(map(str, ids)), "title": [str(title or "") for title in titles], "text": list(map(str, texts))}
        ),
        "queries": Dataset.from_dict({"id": list(judged), "text": list(judged.values())}),
        "relevant_docs": relevant,
        "top_ranked": None,
    }
    return {"default": {"test": content}}


def _number(path: Path, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise DataError(f"{path}: the score {text!r} is no number.") from error
