"""The tasks that a command names (a benchmark of mteb, single tasks, or tasks from plain files) and their stored data.

`local:NAME` reads the folder NAME under --data-dir, and its files decide what the task is; docs/evaluation.md has the
three forms. They run through mteb's own tasks and have its metrics.

A task of mteb is stored in DATA_DIR/tasks/NAME as mteb holds it after loading: what it downloads, cuts and draws at
random happens once, on the connected machine. The folder appears whole or not at all and names the revision of its
data; another one than the installed mteb asks for is refused. The cache of `datasets` cannot do this: offline it takes
the newest cached revision, and mteb's loader of retrieval tasks asks the Hub for configurations and splits.
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
from megatron_neobert.evaluation.data import check_data, columns_of, read_tables, reading
from megatron_neobert.evaluation.paper import MTEB_BENCHMARKS, MTEB_PAPER
from megatron_neobert.runtime.atomic_files import read_text, sha256_of, sync_to_disk, temporary_path
from megatron_neobert.text import parse_json

PREFIX = "local:"
_ABOUT = "task.json"
_NOT_DATA = {"dataset", "data_loaded", "rng_state", "np_rng", "seed", "hf_subsets"}


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
    """Task of the user's files, which describes itself per task, where mteb's tasks do per class."""

    form: ClassVar[tuple[Any, str, tuple[str, ...]]]  # mteb's type, main score, names of the files

    def __init__(self, folder: Path, metadata: TaskMetadata) -> None:
        self.metadata, self._folder = metadata, folder
        super().__init__()

    @abstractmethod
    def read(self, folder: Path) -> Any:
        """Return the data as mteb's tasks of this type hold it."""

    def load_data(self, num_proc: int | None = None, **kwargs: Any) -> None:
        with reading(self._folder):
            self.dataset, self.data_loaded = self.read(self._folder), True

    def unload_data(self) -> None:  # mteb's removes the description too
        self.dataset, self.data_loaded = None, False


class LocalRetrieval(_Local, AbsTaskRetrieval):
    """Documents, queries and judgements in the form of BEIR."""

    form = ("Retrieval", "ndcg_at_10", ("corpus.jsonl", "queries.jsonl", "qrels.tsv"))

    def read(self, folder: Path) -> dict[str, Any]:
        corpus = read_tables([folder / "corpus.jsonl"])
        ids, texts = columns_of(corpus, ("_id", "text"), str(folder / "corpus.jsonl"))
        titles = corpus["title"] if "title" in corpus.column_names else [""] * len(ids)
        relevant: dict[str, dict[str, int]] = {}
        for query, document, score in zip(*_read(folder / "qrels.tsv", "query-id", "corpus-id", "score"), strict=True):
            relevant.setdefault(query, {})[document] = int(_number(folder / "qrels.tsv", score))
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


class LocalClassification(_Local, AbsTaskClassification):
    """Texts and labels."""

    form = ("Classification", "accuracy", ("train.csv", "test.csv"))

    def read(self, folder: Path) -> DatasetDict:
        splits = {split: _read(folder / f"{split}.csv", "text", "label") for split in ("train", "test")}
        numbers = {label: number for number, label in enumerate(sorted(set(splits["train"][1])))}
        if unknown := sorted(set(splits["test"][1]) - set(numbers)):
            raise DataError(f"{folder}: test.csv has labels that train.csv lacks: {', '.join(unknown[:5])}.")
        return DatasetDict(
            {
                split: Dataset.from_dict({"text": texts, "label": [numbers[label] for label in labels]})
                for split, (texts, labels) in splits.items()
            }
        )


class LocalSTS(_Local, AbsTaskSTS):
    """Pairs of sentences and how similar people find them, on any scale."""

    form = ("STS", "cosine_spearman", ("test.tsv",))

    def read(self, folder: Path) -> DatasetDict:
        first, second, scores = _read(folder / "test.tsv", "sentence1", "sentence2", "score")
        numbers = [_number(folder / "test.tsv", score) for score in scores]
        columns = {"sentence1": first, "sentence2": second, "score": numbers}
        return DatasetDict({"test": Dataset.from_dict(columns)})


def local_task(name: str, data_dir: Path) -> AbsTask:
    """Return the task of a folder.

    Raises:
        MissingInputError: There is no such folder, or no files of a known form in it.
    """
    folder = data_dir / name
    check_data(folder)
    forms: tuple[type[_Local], ...] = (LocalRetrieval, LocalClassification, LocalSTS)
    for task in forms:
        kind, metric, names = task.form
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
            return task(folder, metadata)
    raise MissingInputError(
        f"--tasks {PREFIX}{name}: {folder} is no folder with corpus.jsonl, queries.jsonl and qrels.tsv; train.csv and "
        "test.csv; or test.tsv. Put the files of one of these forms into it."
    )


def _read(path: Path, *names: str) -> list[list[Any]]:
    return columns_of(read_tables([path], texts=names if path.suffix != ".jsonl" else ()), names, str(path))


# --- stored data


def stored_revision(data_dir: Path, task: AbsTask) -> str | None:
    """Return the revision of a task's data, None if the data is not there in all subsets."""
    folder = data_dir / "tasks" / task.metadata.name
    if not (folder / _ABOUT).is_file():
        return None
    about = _read_about(folder)
    subsets = {part["subset"] for part in about["parts"]}
    return str(about["revision"]) if None in subsets or set(task.hf_subsets) <= subsets else None


def digest_of_files(data_dir: Path, task: AbsTask) -> str:
    """Return sixteen digits that change with the stored data of a task.

    Raises:
        DataError: The data is of another revision than the installed mteb's task.
    """
    folder = data_dir / "tasks" / task.metadata.name
    if (stored := stored_revision(data_dir, task)) != task.metadata.revision:
        raise DataError(
            f"{folder}: holds revision {stored}, and the installed mteb evaluates {task.metadata.revision}; run "
            "neobert fetch mteb with this mteb on a connected machine."
        )
    # Not the caches that `datasets` writes beside data when a task filters it.
    files = sorted(path for pattern in ("*.json", "data-*.arrow") for path in folder.rglob(pattern))
    lines = [f"{path.relative_to(folder)} {sha256_of(path)}\n" for path in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def _read_about(folder: Path) -> dict[str, Any]:
    with reading(folder):
        about = parse_json(read_text(folder / _ABOUT))
        return {name: about[name] for name in ("revision", "parts", "settings")}


def store_task(data_dir: Path, task: AbsTask) -> None:
    """Load a task by mteb's own means, which may download, and write what it then holds."""
    before = _settings(task)
    task.load_data()
    if isinstance(task, AbsTaskRetrieval):
        task.convert_v1_dataset_format_to_v2(num_proc=None)  # some tasks still load the old form
    target = data_dir / "tasks" / task.metadata.name
    temporary = temporary_path(target)
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
    """Load the data that `store_task` wrote into a task.

    Raises:
        DataError: The data is damaged.
    """
    folder = data_dir / "tasks" / task.metadata.name
    about = _read_about(folder)
    dataset: dict[Any, Any] = {}
    with reading(folder):
        for number, part in enumerate(about["parts"]):
            splits = dataset if part["subset"] is None else dataset.setdefault(part["subset"], {})
            place, judged = folder / str(number), folder / str(number) / "judged.json"
            content: Any = None
            if judged.exists():  # of retrieval
                content = parse_json(judged.read_text(encoding="utf-8"))
                content |= {name: load_from_disk(place / name) for name in ("corpus", "queries")}
            splits[part["split"]] = load_from_disk(place) if content is None else content
    plain = all(part["subset"] is None for part in about["parts"])
    task.dataset = DatasetDict(dataset) if plain else dataset
    if not plain and not isinstance(task, AbsTaskRetrieval):
        task.dataset = {subset: DatasetDict(splits) for subset, splits in dataset.items()}
    for name, value in about["settings"].items():
        setattr(task, name, value)
    task.data_loaded = True


def _splits(task: AbsTask) -> Iterator[tuple[str | None, str, Any]]:
    """Yield (subset or None, split, content) of the splits that an evaluation reads."""
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
    """Return what loading may change besides the data: some tasks set how many documents they cluster."""
    plain = (bool, int, float, str, type(None))
    return {key: value for key, value in vars(task).items() if key not in _NOT_DATA and isinstance(value, plain)}


def _number(path: Path, text: Any) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise DataError(f"{path}: the score {text!r} is no number.") from error
