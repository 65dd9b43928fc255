"""Tasks from plain files: `local:NAME` reads the folder NAME under --data-dir, and its files say what it is.

- retrieval: corpus.jsonl (_id, title, text), queries.jsonl (_id, text) and qrels.tsv (query-id, corpus-id, score, with
  a header): the form of BEIR;
- retrieval: the three *.trec-format files of the Cranfield collection as it is distributed;
- classification: train.csv and test.csv with the columns text and label (or category);
- semantic similarity: test.tsv with the columns sentence1, sentence2 and score, without quoting.

They run through mteb's own tasks and have its metrics: nDCG@10, accuracy of a logistic regression on 8 examples per
class (10 draws), Spearman correlation of cosines.
"""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict
from mteb.abstasks import AbsTaskClassification, AbsTaskRetrieval, AbsTaskSTS
from mteb.abstasks.abstask import AbsTask
from mteb.abstasks.task_metadata import TaskMetadata

from megatron_neobert.errors import DataError, MissingInputError
from megatron_neobert.runtime.atomic_files import sha256_of

PREFIX = "local:"
_CRANFIELD = {"corpus": "cran.all.1400", "queries": "cran.qry", "qrels": "cran.qrels"}
_FORMS = (
    "corpus.jsonl, queries.jsonl and qrels.tsv; cran.all.1400.trec-format, cran.qry.trec-format and "
    "cran.qrels.trec-format; train.csv and test.csv; or test.tsv"
)


class _Local(AbsTask):
    """Describes itself per task, where mteb's tasks do per class; so unloading must leave the description."""

    def unload_data(self) -> None:
        self.dataset, self.data_loaded = None, False


class LocalRetrieval(_Local, AbsTaskRetrieval):
    """Documents, queries and judgements from files."""

    def __init__(self, folder: Path, read: Callable[[Path], dict[str, Any]], metadata: TaskMetadata) -> None:
        self.metadata = metadata
        super().__init__()
        self._folder, self._read = folder, read

    def load_data(self, num_proc: int | None = None, **kwargs: Any) -> None:
        self.dataset = {"default": {"test": self._read(self._folder)}}  # type: ignore[dict-item]
        self.data_loaded = True


class LocalClassification(_Local, AbsTaskClassification):
    """Texts and labels from two CSV files."""

    def __init__(self, folder: Path, metadata: TaskMetadata) -> None:
        self.metadata = metadata
        super().__init__()
        self._folder = folder

    def load_data(self, num_proc: int | None = None, **kwargs: Any) -> None:
        splits = {split: _read_labelled(self._folder / f"{split}.csv") for split in ("train", "test")}
        numbers = {label: number for number, label in enumerate(sorted({label for _, label in splits["train"]}))}
        if unknown := sorted({label for _, label in splits["test"]} - set(numbers)):
            raise DataError(f"{self._folder}: test.csv has labels that train.csv lacks: {', '.join(unknown[:5])}.")
        columns = {
            split: {"text": [text for text, _ in rows], "label": [numbers[label] for _, label in rows]}
            for split, rows in splits.items()
        }
        self.dataset = DatasetDict({split: Dataset.from_dict(column) for split, column in columns.items()})
        self.data_loaded = True


class LocalSTS(_Local, AbsTaskSTS):
    """Pairs of sentences and how similar people find them, on any scale."""

    def __init__(self, folder: Path, metadata: TaskMetadata) -> None:
        self.metadata = metadata
        super().__init__()
        self._file = folder / "test.tsv"

    def load_data(self, num_proc: int | None = None, **kwargs: Any) -> None:
        rows = _read_table(self._file, ("sentence1", "sentence2", "score"), delimiter="\t", quoting=csv.QUOTE_NONE)
        columns: dict[str, list[Any]] = {name: [row[name] for row in rows] for name in ("sentence1", "sentence2")}
        columns["score"] = [_number(self._file, row["score"]) for row in rows]
        self.dataset = DatasetDict({"test": Dataset.from_dict(columns)})
        self.data_loaded = True


def local_task(name: str, data_dir: Path) -> AbsTask:
    """The task of a folder.

    Raises:
        MissingInputError: There is no such folder, or no files of a known form in it.
    """
    folder = data_dir / name
    if not folder.is_dir():
        raise MissingInputError(f"--tasks {PREFIX}{name}: {folder} is no folder; put its files there: {_FORMS}.")
    beir = [folder / file for file in ("corpus.jsonl", "queries.jsonl", "qrels.tsv")]
    cranfield = [folder / f"{stem}.trec-format" for stem in _CRANFIELD.values()]
    labelled, pairs = [folder / "train.csv", folder / "test.csv"], [folder / "test.tsv"]
    if _all_there(beir):
        return LocalRetrieval(folder, _read_beir, _metadata(name, "Retrieval", "ndcg_at_10", beir))
    if _all_there(cranfield):
        return LocalRetrieval(folder, _read_cranfield, _metadata(name, "Retrieval", "ndcg_at_10", cranfield))
    if _all_there(labelled):
        return LocalClassification(folder, _metadata(name, "Classification", "accuracy", labelled))
    if _all_there(pairs):
        return LocalSTS(folder, _metadata(name, "STS", "cosine_spearman", pairs))
    there = ", ".join(sorted(path.name for path in folder.iterdir())[:10]) or "nothing"
    raise MissingInputError(f"--tasks {PREFIX}{name}: {folder} holds {there}; expected {_FORMS}.")


def _all_there(files: list[Path]) -> bool:
    return all(file.is_file() for file in files)


def _metadata(name: str, kind: Any, metric: str, files: list[Path]) -> TaskMetadata:
    revision = "-".join(sha256_of(file)[:8] for file in files)  # other files, other results
    return TaskMetadata(
        name=f"{PREFIX}{name}",
        dataset={"path": f"local/{name}", "revision": revision},
        description=f"Local files of {name}.",
        type=kind,
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        main_score=metric,
    )


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
    corpus, queries, qrels = (
        (folder / f"{stem}.trec-format").read_text(encoding="utf-8", errors="replace") for stem in _CRANFIELD.values()
    )
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
    """What mteb holds of a split."""
    titles, texts = zip(*documents.values(), strict=True)
    judged = {query: text for query, text in queries.items() if query in relevant}
    return {
        "corpus": Dataset.from_dict({"id": list(documents), "title": titles, "text": texts}),
        "queries": Dataset.from_dict({"id": list(judged), "text": list(judged.values())}),
        "relevant_docs": relevant,
        "top_ranked": None,
    }


def _read_labelled(path: Path) -> list[tuple[str, str]]:
    rows = _read_table(path, ("text",), delimiter=",")
    column = "label" if "label" in rows[0] else "category"
    if column not in rows[0]:
        raise DataError(f"{path}: has the columns {', '.join(rows[0])}, and none is called label or category.")
    return [(row["text"], row[column]) for row in rows]


def _read_table(path: Path, columns: tuple[str, ...], **form: Any) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream, **form))
    if not rows:
        raise DataError(f"{path}: has no lines below the header.")
    for number, row in enumerate(rows, start=2):
        if missing := [name for name in columns if row.get(name) is None]:
            raise DataError(f"{path}: line {number} lacks {', '.join(missing)}; expected {', '.join(columns)}.")
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
