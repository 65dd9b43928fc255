"""Tasks for MTEB evaluations (benchmarks, single tasks, tasks from local files), and their stored data.

`local:NAME` is a task whose type follows from the files in DATA_DIR/NAME; docs/evaluation.md lists the three types.
Local tasks use the implementation and the metrics of mteb's tasks.

Data of mteb's tasks is stored in DATA_DIR/tasks/NAME in the form that mteb loads it into, so that downloads and random
choices happen once, on a machine with network. The folder appears whole or not at all and contains the revision of its
data. Data of another revision than the installed mteb's is refused. The cache of `datasets` is no substitute: without
network it returns the newest cached revision, and mteb's retrieval tasks ask the Hub for configs and splits.
"""

import copy
import hashlib
import json
import shutil
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import mteb
from datasets import Dataset, DatasetDict, load_from_disk
from mteb.abstasks import AbsTaskClassification, AbsTaskRetrieval, AbsTaskSTS
from mteb.abstasks.abstask import AbsTask
from mteb.abstasks.aggregated_task import AbsTaskAggregate
from mteb.abstasks.task_metadata import TaskMetadata

from megatron_neobert.errors import ConfigError, DataError, MissingInputError, suggestion
from megatron_neobert.evaluation.data import columns_of, read_tables, reading
from megatron_neobert.evaluation.paper import MTEB_BENCHMARKS, MTEB_PAPER
from megatron_neobert.runtime.atomic_files import read_text, sha256_of, sync_to_disk, temporary_path
from megatron_neobert.text import parse_json

LOCAL_PREFIX = "local:"
_ABOUT = "task.json"
# Attributes that are data or random state. Other plain attributes are settings, which loading may change.
_NOT_SETTINGS = {"dataset", "data_loaded", "rng_state", "np_rng", "seed", "hf_subsets"}


def choose_tasks(benchmark: str, names: Sequence[str], languages: Sequence[str], data_dir: Path) -> list[AbsTask]:
    """Return copies of the tasks with these names. Without names, return all tasks of the benchmark.

    If English is the only language, a named task has the settings of the English MTEB benchmark that contains it.
    MSMARCO, for example, uses its dev split.

    Args:
        names: Names of mteb's tasks, or `local:NAME` for the files in data_dir/NAME.
        languages: ISO 639-3 codes. Subsets of a named task in other languages are excluded.

    Raises:
        ConfigError: mteb has no such benchmark, task or language, or a name is repeated, or names are given together
            with a benchmark that is not the default.
        MissingInputError, DataError: A local task has no files, or its files cannot be used.
    """
    if names and benchmark != MTEB_PAPER:
        raise ConfigError(f"--benchmark {benchmark} and --tasks {' '.join(names)} exclude each other; remove one.")
    # Tasks are copied, because mteb returns the same objects to every caller.
    if not names:
        try:
            return copy.deepcopy(list(mteb.get_benchmark(benchmark).tasks))
        except KeyError:
            known = [known_benchmark.name for known_benchmark in mteb.get_benchmarks()]
            raise ConfigError(
                f"--benchmark {benchmark}: mteb has no such benchmark{suggestion(benchmark, known, otherwise='.')}"
            ) from None
    if len(set(names)) < len(names):
        raise ConfigError(f"--tasks {' '.join(names)} names a task twice; name each once.")
    english: dict[str, AbsTask] = {}
    if list(languages) == ["eng"]:
        english = {task.metadata.name: task for name in MTEB_BENCHMARKS for task in mteb.get_benchmark(name).tasks}
    tasks = []
    for name in names:
        if name.startswith(LOCAL_PREFIX):
            tasks.append(local_task(name.removeprefix(LOCAL_PREFIX), data_dir))
        else:
            tasks.append(copy.deepcopy(english[name]) if name in english else _get_task(name, languages))
    return tasks


def flatten(tasks: Iterable[AbsTask]) -> list[AbsTask]:
    """Return the tasks with aggregates replaced by their subtasks: CQADupstackRetrieval by its twelve forums."""
    return [subtask for task in tasks for subtask in (task.tasks if isinstance(task, AbsTaskAggregate) else [task])]


def _get_task(name: str, languages: Sequence[str]) -> AbsTask:
    try:
        # Copied, because the subtasks of an aggregate belong to its class.
        task = copy.deepcopy(mteb.get_task(name, languages=list(languages)))
    except KeyError:
        known = [task.metadata.name for task in mteb.get_tasks()]
        otherwise = f"; local tasks are written {LOCAL_PREFIX}NAME."
        raise ConfigError(
            f"--tasks {name}: mteb {mteb.__version__} has no such task{suggestion(name, known, otherwise=otherwise)}"
        ) from None
    except ValueError as error:
        raise ConfigError(f"--languages {' '.join(languages)}: {error}") from None
    if not task.hf_subsets:
        raise ConfigError(f"--tasks {name} has no texts in --languages {' '.join(languages)}; name other languages.")
    return task


# --- local tasks


class _LocalTask(AbsTask):
    """Task from local files. Its metadata belongs to the instance; in mteb's tasks it belongs to the class."""

    type_: ClassVar[Any]  # mteb's task type
    main_score: ClassVar[str]
    file_names: ClassVar[tuple[str, ...]]

    def __init__(self, folder: Path, metadata: TaskMetadata) -> None:
        self.metadata, self._folder = metadata, folder
        super().__init__()

    @abstractmethod
    def read(self, folder: Path) -> Any:
        """Return the data in the form of mteb's tasks of this type."""

    def load_data(self, num_proc: int | None = None, **kwargs: Any) -> None:
        with reading(self._folder):
            self.dataset, self.data_loaded = self.read(self._folder), True

    def unload_data(self) -> None:  # mteb's method also deletes the metadata
        self.dataset, self.data_loaded = None, False


class LocalRetrieval(_LocalTask, AbsTaskRetrieval):
    """Documents, queries and relevance judgements in BEIR's format."""

    type_, main_score, file_names = "Retrieval", "ndcg_at_10", ("corpus.jsonl", "queries.jsonl", "qrels.tsv")

    def read(self, folder: Path) -> dict[str, Any]:
        corpus = read_tables([folder / "corpus.jsonl"])
        ids, texts = columns_of(corpus, ("_id", "text"), str(folder / "corpus.jsonl"))
        titles = corpus["title"] if "title" in corpus.column_names else [""] * len(ids)
        relevant: dict[str, dict[str, int]] = {}
        for query, document, score in zip(*_read(folder / "qrels.tsv", "query-id", "corpus-id", "score"), strict=True):
            relevant.setdefault(query, {})[document] = int(_to_score(folder / "qrels.tsv", score))
        queries = zip(*_read(folder / "queries.jsonl", "_id", "text"), strict=True)
        judged = {str(id): str(text) for id, text in queries if str(id) in relevant}
        documents = {"id": ids, "title": [title or "" for title in titles], "text": texts}
        content = {
            "corpus": Dataset.from_dict({name: list(map(str, values)) for name, values in documents.items()}),
            "queries": Dataset.from_dict({"id": list(judged), "text": list(judged.values())}),
            "relevant_docs": relevant,
            "top_ranked": None,
        }
        return {"default": {"test": content}}


class LocalClassification(_LocalTask, AbsTaskClassification):
    """Texts with labels."""

    type_, main_score, file_names = "Classification", "accuracy", ("train.csv", "test.csv")

    def read(self, folder: Path) -> DatasetDict:
        splits = {split: _read(folder / f"{split}.csv", "text", "label") for split in ("train", "test")}
        ids = {label: id for id, label in enumerate(sorted(set(splits["train"][1])))}
        if unknown := sorted(set(splits["test"][1]) - set(ids)):
            raise DataError(
                f"{folder}: test.csv has labels that train.csv lacks: {', '.join(unknown[:5])}. Add examples to "
                "train.csv, or remove the labels from test.csv."
            )
        return DatasetDict(
            {
                split: Dataset.from_dict({"text": texts, "label": [ids[label] for label in labels]})
                for split, (texts, labels) in splits.items()
            }
        )


class LocalSTS(_LocalTask, AbsTaskSTS):
    """Sentence pairs with similarity scores, on any scale."""

    type_, main_score, file_names = "STS", "cosine_spearman", ("test.tsv",)

    def read(self, folder: Path) -> DatasetDict:
        names = ("sentence1", "sentence2", "score")
        columns = dict(zip(names, _read(folder / "test.tsv", *names), strict=True))
        columns["score"] = [_to_score(folder / "test.tsv", score) for score in columns["score"]]
        return DatasetDict({"test": Dataset.from_dict(columns)})


def local_task(name: str, data_dir: Path) -> AbsTask:
    """Return the task in data_dir/NAME, without its data. The names of the files determine the task type.

    Raises:
        MissingInputError: The folder does not exist, or does not have all files of any task type.
        DataError: The folder has a pipe, a socket or a device, refers to data elsewhere, or has a malformed README.md,
            .huggingface.yaml or state.json.
    """
    folder = data_dir / name
    task_classes: tuple[type[_LocalTask], ...] = (LocalRetrieval, LocalClassification, LocalSTS)
    with reading(folder):
        for task_class in task_classes:
            files = [folder / file_name for file_name in task_class.file_names]
            if all(file.is_file() for file in files):
                metadata = TaskMetadata(
                    name=f"{LOCAL_PREFIX}{name}",
                    # The revision changes with the files, so changed data is evaluated again.
                    dataset={"path": f"local/{name}", "revision": "-".join(sha256_of(file)[:8] for file in files)},
                    description=f"Local files of {name}.",
                    type=task_class.type_,
                    eval_splits=["test"],
                    eval_langs=["eng-Latn"],
                    main_score=task_class.main_score,
                )
                return task_class(folder, metadata)
    raise MissingInputError(
        f"--tasks {LOCAL_PREFIX}{name}: {folder} is not a folder with corpus.jsonl, queries.jsonl and qrels.tsv; with "
        "train.csv and test.csv; or with test.tsv. Put one of these sets of files there."
    )


def _read(path: Path, *names: str) -> list[list[Any]]:
    return columns_of(read_tables([path], texts=names if path.suffix != ".jsonl" else ()), names, str(path))


def _to_score(path: Path, text: Any) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise DataError(f"{path}: the score {text!r} is not a number; correct it, or remove the line.") from error


# --- stored data


def stored_revision(data_dir: Path, task: AbsTask) -> str | None:
    """Return the revision of a task's stored data, None if any is missing. Raises DataError if task.json is damaged."""
    folder = data_dir / "tasks" / task.metadata.name
    if not (folder / _ABOUT).is_file():
        return None
    about = _read_about(folder)
    subsets = {part["subset"] for part in about["parts"]}
    return str(about["revision"]) if None in subsets or set(task.hf_subsets) <= subsets else None


def digest_of_files(data_dir: Path, task: AbsTask) -> str | None:
    """Return a hash of a task's stored data, 16 hexadecimal digits, or None if the data of any subset is missing.

    Raises DataError if task.json is damaged, or has another revision than the task of the installed mteb.
    """
    folder = data_dir / "tasks" / task.metadata.name
    if (revision := stored_revision(data_dir, task)) is None:
        return None
    if revision != task.metadata.revision:
        raise DataError(
            f"{folder}: holds revision {revision}, but the installed mteb uses {task.metadata.revision}. Run "
            "neobert fetch mteb with this version of mteb on a machine with network."
        )
    # Excludes the cache files that `datasets` writes into the folder when a task filters its data.
    files = sorted(path for pattern in ("*.json", "data-*.arrow") for path in folder.rglob(pattern))
    lines = [f"{path.relative_to(folder)} {sha256_of(path)}\n" for path in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def _read_about(folder: Path) -> dict[str, Any]:
    with reading(folder):
        about = parse_json(read_text(folder / _ABOUT))
        return {name: about[name] for name in ("revision", "parts", "settings")}


def store_task(data_dir: Path, task: AbsTask) -> None:
    """Let mteb load (or download) a task's data, replace DATA_DIR/tasks/NAME by this data, and unload the task."""
    settings_before = _settings(task)
    task.load_data()
    if isinstance(task, AbsTaskRetrieval):
        task.convert_v1_dataset_format_to_v2(num_proc=None)  # some tasks still load mteb 1's format
    target = data_dir / "tasks" / task.metadata.name
    temporary = temporary_path(target)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    parts = []
    for number, (subset, split, content) in enumerate(_splits(task)):
        folder = temporary / str(number)
        if isinstance(content, Dataset):
            content.save_to_disk(folder)
        else:  # a split of a retrieval task
            for name in ("corpus", "queries"):
                content[name].save_to_disk(folder / name)
            judged = {name: content[name] for name in ("relevant_docs", "top_ranked")}
            (folder / "judged.json").write_text(json.dumps(judged), encoding="utf-8")
        parts.append({"subset": subset, "split": split})
    settings = {name: value for name, value in _settings(task).items() if (name, value) not in settings_before.items()}
    about = {"name": task.metadata.name, "revision": task.metadata.revision, "parts": parts, "settings": settings}
    (temporary / _ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)
    sync_to_disk(target.parent)
    task.unload_data()


def load_task(data_dir: Path, task: AbsTask) -> None:
    """Load DATA_DIR/tasks/NAME into a task, and set the attributes that mteb would set when it loads the data.

    Raises DataError if the data is missing or damaged.
    """
    folder = data_dir / "tasks" / task.metadata.name
    about = _read_about(folder)
    subsets: dict[str | None, Any] = {}
    with reading(folder):
        for number, part in enumerate(about["parts"]):
            part_folder, judged = folder / str(number), folder / str(number) / "judged.json"
            if judged.exists():  # a split of a retrieval task
                content = parse_json(judged.read_text(encoding="utf-8"))
                content |= {name: load_from_disk(part_folder / name) for name in ("corpus", "queries")}
            else:
                content = load_from_disk(part_folder)
            subsets.setdefault(part["subset"], {})[part["split"]] = content
    if not isinstance(task, AbsTaskRetrieval):
        subsets = {subset: DatasetDict(splits) for subset, splits in subsets.items()}
    task.dataset = subsets.get(None, subsets)
    for name, value in about["settings"].items():
        setattr(task, name, value)
    task.data_loaded = True


def _splits(task: AbsTask) -> Iterator[tuple[str | None, str, Any]]:
    """Yield (subset, split, content) of every split that an evaluation reads. Without subsets, subset is None."""
    assert task.dataset is not None, task.metadata.name
    splits = {*task.eval_splits, getattr(task, "train_split", None)}
    has_subsets = not any(isinstance(content, Dataset) for content in task.dataset.values())
    subsets = task.dataset if has_subsets else {None: task.dataset}
    for subset, by_split in subsets.items():
        if subset is None or subset in task.hf_subsets:
            yield from ((subset, split, content) for split, content in by_split.items() if split in splits)


def _settings(task: AbsTask) -> dict[str, Any]:
    """Return the plain attributes of a task that loading may change, such as the number of documents to cluster."""
    plain = (bool, int, float, str, type(None))
    return {name: value for name, value in vars(task).items() if name not in _NOT_SETTINGS and isinstance(value, plain)}
