"""The nine GLUE tasks and the diagnostic set: their labels, metrics and sizes, and their rows out of local files.

Names of tasks and columns are those of the data set on the Hub. Metrics: the first one chooses models, all of them are
averaged for the table. Files are Parquet, as neobert fetch glue writes them, JSON lines, CSV with a header, or saved
data sets.
Source: Wang et al. 2019, tables 1 and 5; arXiv 2502.19587 appendix C.
"""

import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_neobert.errors import ConfigError, DataError, MissingInputError
from megatron_neobert.evaluation.local_data import reading

PAIR = ("sentence1", "sentence2")
BINARY = ("0", "1")


@dataclass(frozen=True, kw_only=True)
class GlueTask:
    """One task."""

    name: str
    title: str  # of folders and submissions, as the benchmark writes it
    texts: tuple[str, ...]  # names of their columns
    labels: tuple[str, ...]  # words by class; none: a number from 0 to 5
    metrics: tuple[str, ...]
    rows: dict[str, int]  # by split
    validation: tuple[str, ...] = ("validation",)
    starts_from_mnli: bool = False

    @property
    def num_outputs(self) -> int:
        return len(self.labels) or 1

    @property
    def is_regression(self) -> bool:
        return not self.labels


def _rows(train: int, validation: int, test: int) -> dict[str, int]:
    return {"train": train, "validation": validation, "test": test}


_TASKS = (
    GlueTask(
        name="mnli",
        title="MNLI",
        texts=("premise", "hypothesis"),
        labels=("entailment", "neutral", "contradiction"),
        metrics=("accuracy", "accuracy_mismatched"),
        rows={
            "train": 392_702,
            "validation_matched": 9_815,
            "validation_mismatched": 9_832,
            "test_matched": 9_796,
            "test_mismatched": 9_847,
        },
        validation=("validation_matched", "validation_mismatched"),
    ),
    GlueTask(
        name="qnli",
        title="QNLI",
        texts=("question", "sentence"),
        labels=("entailment", "not_entailment"),
        metrics=("accuracy",),
        rows=_rows(104_743, 5_463, 5_463),
        starts_from_mnli=True,
    ),
    GlueTask(
        name="qqp",
        title="QQP",
        texts=("question1", "question2"),
        labels=BINARY,
        metrics=("accuracy", "f1"),
        rows=_rows(363_846, 40_430, 390_965),
    ),
    GlueTask(
        name="rte",
        title="RTE",
        texts=PAIR,
        labels=("entailment", "not_entailment"),
        metrics=("accuracy",),
        rows=_rows(2_490, 277, 3_000),
        starts_from_mnli=True,
    ),
    GlueTask(
        name="sst2",
        title="SST-2",
        texts=("sentence",),
        labels=BINARY,
        metrics=("accuracy",),
        rows=_rows(67_349, 872, 1_821),
    ),
    GlueTask(
        name="mrpc",
        title="MRPC",
        texts=PAIR,
        labels=BINARY,
        metrics=("accuracy", "f1"),
        rows=_rows(3_668, 408, 1_725),
        starts_from_mnli=True,
    ),
    GlueTask(
        name="cola",
        title="CoLA",
        texts=("sentence",),
        labels=BINARY,
        metrics=("matthews",),
        rows=_rows(8_551, 1_043, 1_063),
    ),
    GlueTask(
        name="stsb",
        title="STS-B",
        texts=PAIR,
        labels=(),
        metrics=("pearson", "spearman"),
        rows=_rows(5_749, 1_500, 1_379),
        starts_from_mnli=True,
    ),
    GlueTask(
        name="wnli",
        title="WNLI",
        texts=PAIR,
        labels=BINARY,
        metrics=("accuracy",),
        rows=_rows(635, 71, 146),
    ),
)
TASKS = {task.name: task for task in _TASKS}
PAPER_TASKS = tuple(task.name for task in _TASKS if task.name != "wnli")  # in the order of the paper's table

# No training set and no labels: the best MNLI model answers it for the server.
DIAGNOSTIC = GlueTask(
    name="ax",
    title="AX",
    texts=("premise", "hypothesis"),
    labels=TASKS["mnli"].labels,
    metrics=(),
    rows={"test": 1_104},
)


def choose_tasks(names: Sequence[str] | None, default: Iterable[str]) -> list[str]:
    """The tasks that are asked for.

    Raises:
        ConfigError: There is no such task.
    """
    chosen = list(default) if names is None else list(dict.fromkeys(name.lower().replace("-", "") for name in names))
    unknown = [name for name in chosen if name not in TASKS]
    if unknown:
        raise ConfigError(f"--tasks {' '.join(unknown)}: GLUE's tasks are {', '.join(TASKS)}.")
    return chosen


FETCH = "neobert fetch glue --output DIR"


@dataclass(frozen=True)
class GlueSplit:
    """Rows of one split: the text or the pair, and the label, which test sets lack."""

    texts: list[tuple[str, ...]]
    labels: list[int] | list[float] | None

    def spread(self, limit: int | None) -> "GlueSplit":
        """At most `limit` rows, evenly spread, since files are often sorted by source."""
        count = len(self.texts)
        if limit is None or count <= limit:
            return self
        rows = [number * count // limit for number in range(limit)]
        labels = None if self.labels is None else [self.labels[row] for row in rows]
        return GlueSplit([self.texts[row] for row in rows], labels)


def read_split(data_dir: Path, task: GlueTask, split: str, *, labelled: bool = True) -> GlueSplit:
    """Read one split of a task.

    Raises:
        MissingInputError: The task or the split is not there.
        DataError: A file has no rows, or other columns or labels than the task.
    """
    folder = find_task(data_dir, task)
    if folder is None:
        raise MissingInputError(
            f"--data-dir {data_dir} has no folder {task.title} or {task.name}; on a machine with network: {FETCH}"
        )
    with reading(folder):
        columns = _read_columns(folder, task, split)
    if missing := [name for name in task.texts if name not in columns]:
        raise DataError(f"{folder}: {split} has the columns {', '.join(columns)}, but no {', '.join(missing)}.")
    texts = list(zip(*(columns[name] for name in task.texts), strict=True))
    if not texts:
        raise DataError(f"{folder}: {split} has no rows; on a machine with network: {FETCH}")
    if not labelled:
        return GlueSplit(texts, None)
    if "label" not in columns:
        raise DataError(f"{folder}: {split} has no column label; only test sets may lack it.")
    return GlueSplit(texts, [_to_label(value, task, folder) for value in columns["label"]])


def _read_columns(folder: Path, task: GlueTask, split: str) -> dict[str, list[Any]]:
    """Return the values of every column in the files of a split."""
    for ending in ("parquet", "jsonl", "csv"):
        names = re.compile(rf"{split}(-\d+-of-\d+)?\.{ending}")
        files = sorted(path for path in folder.iterdir() if names.fullmatch(path.name))
        if files:
            import pyarrow

            return pyarrow.concat_tables([_read_table(path, task) for path in files]).to_pydict()
    if (folder / "dataset_dict.json").is_file():
        import datasets

        saved = datasets.load_from_disk(str(folder))
        if split not in saved:
            raise MissingInputError(f"{folder} has the splits {', '.join(saved)}, but no {split}; {FETCH}")
        return saved[split].to_dict()
    raise MissingInputError(
        f"{folder} has no {split}.parquet, {split}.jsonl or {split}.csv; on a machine with network: {FETCH}. TSV files "
        "are not read: docs/evaluation.md has the line that makes CSV of them."
    )


def _read_table(path: Path, task: GlueTask) -> Any:
    """Return a file's rows as a table of pyarrow."""
    import pyarrow
    from pyarrow import csv, json, parquet

    if path.suffix == ".parquet":
        return parquet.read_table(path)
    if path.suffix == ".jsonl":
        return json.read_json(path)
    texts = dict.fromkeys(task.texts, pyarrow.string())  # "1912" is a text, too
    return csv.read_csv(
        path,
        parse_options=csv.ParseOptions(newlines_in_values=True),
        convert_options=csv.ConvertOptions(column_types=texts),
    )


def find_task(data_dir: Path, task: GlueTask) -> Path | None:
    """Return the task's folder, under the benchmark's name or the Hub's."""
    return next((data_dir / name for name in (task.title, task.name) if (data_dir / name).is_dir()), None)


def check_rows(task: GlueTask, split: str, found: int) -> None:
    """Warns where a split has another number of rows than the benchmark's."""
    if found != task.rows[split]:
        warnings.warn(
            f"{task.title} {split} has {found:,} rows, the benchmark {task.rows[split]:,}; the scores cannot be "
            "compared with published ones.",
            stacklevel=2,
        )


def _to_label(value: Any, task: GlueTask, place: Path) -> int | float:
    """Its number, from a number or a word.

    Raises:
        DataError: The task has no such label.
    """
    if task.is_regression:
        try:
            return float(value)
        except (TypeError, ValueError):  # an empty cell is None
            raise DataError(f"{place}: {value!r} is no {task.title} score; they go from 0 to 5.") from None
    if isinstance(value, str):
        if value in task.labels:
            return task.labels.index(value)
    elif value in range(len(task.labels)):
        return int(value)
    raise DataError(f"{place}: {value!r} is no {task.title} label; they are {', '.join(task.labels)}.")
