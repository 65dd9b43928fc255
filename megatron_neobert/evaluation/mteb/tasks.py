"""Which tasks a command means: a benchmark of mteb, single tasks of it, or your own from plain files.

`local:NAME` reads the folder NAME under --data-dir, and its files decide what it is; docs/evaluation.md has the four
forms. They run through mteb's own tasks and have its metrics.
"""

import copy
import csv
import difflib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import mteb
from datasets import Dataset, DatasetDict
from mteb.abstasks import AbsTaskClassification, AbsTaskRetrieval, AbsTaskSTS
from mteb.abstasks.abstask import AbsTask
from mteb.abstasks.aggregated_task import AbsTaskAggregate
from mteb.abstasks.task_metadata import TaskMetadata

from megatron_neobert.errors import ConfigError, DataError, MissingInputError
from megatron_neobert.evaluation.local_data import check_data
from megatron_neobert.evaluation.reported_numbers import MTEB_BENCHMARKS
from megatron_neobert.runtime.atomic_files import sha256_of


def benchmark_tasks(name: str) -> list[AbsTask]:
    """The tasks of a benchmark in its own splits and languages; copies, because mteb gives everybody the same ones."""
    return copy.deepcopy(list(mteb.get_benchmark(name).tasks))


def tasks_by_name(names: Sequence[str], data_dir: Path) -> list[AbsTask]:
    """Tasks in the given order, English only; `local:NAME` reads data_dir/NAME.

    A task of the paper's benchmark is taken as that has it: MSMARCO's dev split, for example.

    Raises:
        ConfigError: mteb knows no such task, or a name comes twice.
        MissingInputError: A local task without files.
    """
    known = {task.metadata.name: task for name in MTEB_BENCHMARKS for task in mteb.get_benchmark(name).tasks}
    if len(set(names)) < len(names):
        raise ConfigError(f"--tasks {' '.join(names)} names a task twice; name each once.")
    tasks = []
    for name in names:
        if name.startswith(PREFIX):
            tasks.append(local_task(name.removeprefix(PREFIX), data_dir))
        else:
            tasks.append(copy.deepcopy(known[name]) if name in known else _any_task(name))
    return tasks


def flatten(tasks: Iterable[AbsTask]) -> list[AbsTask]:
    """Tasks with data: the twelve forums in place of CQADupstackRetrieval, which is their mean."""
    return [part for task in tasks for part in (task.tasks if isinstance(task, AbsTaskAggregate) else [task])]


def _any_task(name: str) -> AbsTask:
    try:
        return copy.deepcopy(mteb.get_task(name, languages=["eng"]))  # the parts of an aggregate belong to its class
    except KeyError:
        names = [task.metadata.name for task in mteb.get_tasks(languages=["eng"])]
        close = difflib.get_close_matches(name, names, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"local tasks are written {PREFIX}NAME."
        raise ConfigError(f"--tasks {name}: mteb {mteb.__version__} has no such task; {hint}") from None


PREFIX = "local:"
_CRANFIELD = ("cran.all.1400.trec-format", "cran.qry.trec-format", "cran.qrels.trec-format")
_FILES = (
    "corpus.jsonl, queries.jsonl and qrels.tsv; cran.all.1400.trec-format, cran.qry.trec-format and "
    "cran.qrels.trec-format; train.csv and test.csv; or test.tsv"
)


class _Local(AbsTask):
    """Describes itself per task, where mteb's tasks do per class."""

    def __init__(self, folder: Path, read: Callable[[Path], Any], metadata: TaskMetadata) -> None:
        self.metadata = metadata
        super().__init__()
        self._folder, self._read = folder, read

    def load_data(self, num_proc: int | None = None, **kwargs: Any) -> None:
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
    """The task of a folder.

    Raises:
        MissingInputError: There is no such folder, or no files of a known form in it.
    """
    folder = data_dir / name
    check_data(folder)
    if not folder.is_dir():
        raise MissingInputError(f"--tasks {PREFIX}{name}: {folder} is no folder; put its files there: {_FILES}.")
    forms: tuple[tuple[Any, Callable[[Path], Any], Any, str, tuple[str, ...]], ...] = (
        (LocalRetrieval, _read_beir, "Retrieval", "ndcg_at_10", ("corpus.jsonl", "queries.jsonl", "qrels.tsv")),
        (LocalRetrieval, _read_cranfield, "Retrieval", "ndcg_at_10", _CRANFIELD),
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


def _read_classification(folder: Path) -> DatasetDict:
    splits = {}
    for split in ("train", "test"):
        path = folder / f"{split}.csv"
        rows = _read_table(path, ("text",), delimiter=",")
        column = "label" if "label" in rows[0] else "category"
        if column not in rows[0]:
            raise DataError(f"{path}: has the columns {', '.join(rows[0])}, and none is called label or category.")
        splits[split] = [(row["text"], row[column]) for row in rows]
    numbers = {label: number for number, label in enumerate(sorted({label for _, label in splits["train"]}))}
    if unknown := sorted({label for _, label in splits["test"]} - set(numbers)):
        raise DataError(f"{folder}: test.csv has labels that train.csv lacks: {', '.join(unknown[:5])}.")
    columns = {
        split: {"text": [text for text, _ in rows], "label": [numbers[label] for _, label in rows]}
        for split, rows in splits.items()
    }
    return DatasetDict({split: Dataset.from_dict(column) for split, column in columns.items()})


def _read_pairs(folder: Path) -> DatasetDict:
    path = folder / "test.tsv"
    rows = _read_table(path, ("sentence1", "sentence2", "score"), delimiter="\t", quoting=csv.QUOTE_NONE)
    columns: dict[str, list[Any]] = {name: [row[name] for row in rows] for name in ("sentence1", "sentence2")}
    columns["score"] = [_number(path, row["score"]) for row in rows]
    return DatasetDict({"test": Dataset.from_dict(columns)})


def _read_beir(folder: Path) -> dict[str, Any]:
    documents = _read_jsonl(folder / "corpus.jsonl", ("_id", "text"))
    queries = _read_jsonl(folder / "queries.jsonl", ("_id", "text"))
    relevant: dict[str, dict[str, int]] = {}
    for row in _read_table(folder / "qrels.tsv", ("query-id", "corpus-id", "score"), delimiter="\t"):
        grade = int(_number(folder / "qrels.tsv", row["score"]))
        relevant.setdefault(row["query-id"], {})[row["corpus-id"]] = grade
    return _retrieval(
        {str(row["_id"]): (str(row.get("title") or ""), str(row["text"])) for row in documents},
        {str(row["_id"]): str(row["text"]) for row in queries},
        relevant,
    )


def _read_cranfield(folder: Path) -> dict[str, Any]:
    """Every judged document counts as relevant: the collection's grades run from 1, complete answer, to 4, of minimum
    interest, and gains that grow with them would be upside down."""
    corpus, queries, qrels = ((folder / name).read_text(encoding="utf-8", errors="replace") for name in _CRANFIELD)
    documents = {}
    for number, text in re.findall(r"<DOCNO>(\w+)</DOCNO>\s*<TEXT>(.*?)</TEXT>", corpus, flags=re.DOTALL):
        title = " ".join(text.partition("\n.A")[0].split())
        body = " ".join(text.rpartition("\n.W")[2].split())  # begins with the title again
        documents[number] = (title, body.removeprefix(title).strip())
    described = re.findall(r"<num> Number: (\w+).*?<desc> Description:(.*?)<narr>", queries, flags=re.DOTALL)
    relevant: dict[str, dict[str, int]] = {}
    for line in qrels.splitlines():
        query, _, document, _ = line.split()
        relevant.setdefault(query, {})[document] = 1
    return _retrieval(documents, {number: " ".join(text.split()) for number, text in described}, relevant)


def _retrieval(
    documents: dict[str, tuple[str, str]], queries: dict[str, str], relevant: dict[str, dict[str, int]]
) -> dict[str, Any]:
    """What mteb holds of a task with one split."""
    titles, texts = zip(*documents.values(), strict=True)
    judged = {query: text for query, text in queries.items() if query in relevant}
    content = {
        "corpus": Dataset.from_dict({"id": list(documents), "title": titles, "text": texts}),
        "queries": Dataset.from_dict({"id": list(judged), "text": list(judged.values())}),
        "relevant_docs": relevant,
        "top_ranked": None,
    }
    return {"default": {"test": content}}


def _read_table(path: Path, columns: tuple[str, ...], **form: Any) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream, **form))
    if not rows:
        raise DataError(f"{path}: has no lines below the header.")
    for number, row in enumerate(rows, start=2):
        if missing := [name for name in columns if row.get(name) is None]:
            raise DataError(
                f"{path}: line {number} lacks {', '.join(missing)}; the header has {', '.join(map(str, rows[0]))}, "
                f"expected {', '.join(columns)}."
            )
    return rows


def _read_jsonl(path: Path, keys: tuple[str, ...]) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}: line {number} is not JSON ({error}).") from error
        if not isinstance(row, dict) or not set(keys) <= set(row):
            raise DataError(f"{path}: line {number} lacks one of {', '.join(keys)}.")
        rows.append(row)
    return rows


def _number(path: Path, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise DataError(f"{path}: the score {text!r} is no number.") from error
