"""The nine GLUE tasks and the diagnostic set: their labels, metrics and sizes, and their rows out of local files.

Names of tasks and columns are those of the data set on the Hub; the benchmark's own TSV files call some columns
otherwise. Metrics: the first one chooses models, all of them are averaged for the table. Files are the benchmark's TSV,
parquet as neobert fetch glue writes it, or saved data sets. Quotes in the TSV files are bare, so nothing is unquoted.
Some distributions are cut otherwise (CoLA, RTE and WNLI with a part of the training set as val.tsv, SST-2 with the
benchmark's dev set as a labelled test.tsv); they are put together as the benchmark has them.
Source: Wang et al. 2019, tables 1 and 5; arXiv 2502.19587 appendix C.
"""

import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_neobert.errors import ConfigError, DataError, MissingInputError
from megatron_neobert.evaluation.local_data import reading

PAIR = ("sentence1", "sentence2")
BINARY = ("0", "1")
RTE_COLUMNS = ("index", *PAIR, "label")


@dataclass(frozen=True, kw_only=True)
class GlueTask:
    """One task.

    `rows` names every split and its size. `columns` are those of the benchmark's labelled TSV file, in its order;
    `tsv_names` what it calls the columns that are read, where that is not the Hub's name.
    """

    name: str
    title: str  # of folders and submissions, as the benchmark writes it
    texts: tuple[str, ...]
    labels: tuple[str, ...]  # words by class; none: a number from 0 to 5
    metrics: tuple[str, ...]
    columns: tuple[str, ...]
    rows: dict[str, int]
    tsv_names: dict[str, str] = field(default_factory=dict)
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
        columns=(
            *("index", "promptID", "pairID", "genre", "sentence1_binary_parse", "sentence2_binary_parse"),
            *("sentence1_parse", "sentence2_parse", *PAIR, "label1", "gold_label"),
        ),
        tsv_names={"premise": "sentence1", "hypothesis": "sentence2", "label": "gold_label"},
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
        columns=("index", "question", "sentence", "label"),
        rows=_rows(104_743, 5_463, 5_463),
        starts_from_mnli=True,
    ),
    GlueTask(
        name="qqp",
        title="QQP",
        texts=("question1", "question2"),
        labels=BINARY,
        metrics=("accuracy", "f1"),
        columns=("id", "qid1", "qid2", "question1", "question2", "is_duplicate"),
        tsv_names={"label": "is_duplicate"},
        rows=_rows(363_846, 40_430, 390_965),
    ),
    GlueTask(
        name="rte",
        title="RTE",
        texts=PAIR,
        labels=("entailment", "not_entailment"),
        metrics=("accuracy",),
        columns=RTE_COLUMNS,
        rows=_rows(2_490, 277, 3_000),
        starts_from_mnli=True,
    ),
    GlueTask(
        name="sst2",
        title="SST-2",
        texts=("sentence",),
        labels=BINARY,
        metrics=("accuracy",),
        columns=("sentence", "label"),
        rows=_rows(67_349, 872, 1_821),
    ),
    GlueTask(
        name="mrpc",
        title="MRPC",
        texts=PAIR,
        labels=BINARY,
        metrics=("accuracy", "f1"),
        columns=("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"),
        tsv_names={"sentence1": "#1 String", "sentence2": "#2 String", "label": "Quality"},
        rows=_rows(3_668, 408, 1_725),
        starts_from_mnli=True,
    ),
    GlueTask(
        name="cola",
        title="CoLA",
        texts=("sentence",),
        labels=BINARY,
        metrics=("matthews",),
        columns=("source", "label", "star", "sentence"),
        rows=_rows(8_551, 1_043, 1_063),
    ),
    GlueTask(
        name="stsb",
        title="STS-B",
        texts=PAIR,
        labels=(),
        metrics=("pearson", "spearman"),
        columns=("index", "genre", "filename", "year", "old_index", "source1", "source2", *PAIR, "score"),
        tsv_names={"label": "score"},
        rows=_rows(5_749, 1_500, 1_379),
        starts_from_mnli=True,
    ),
    GlueTask(
        name="wnli",
        title="WNLI",
        texts=PAIR,
        labels=BINARY,
        metrics=("accuracy",),
        columns=RTE_COLUMNS,
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
    columns=("index", *PAIR),
    tsv_names={"premise": "sentence1", "hypothesis": "sentence2"},
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
_TSV_SPLITS = {
    "train": ("train.tsv",),
    "validation": ("dev.tsv",),
    "validation_matched": ("dev_matched.tsv",),
    "validation_mismatched": ("dev_mismatched.tsv",),
    "test": ("test.tsv", "diagnostic.tsv", "AX.tsv"),
    "test_matched": ("test_matched.tsv",),
    "test_mismatched": ("test_mismatched.tsv",),
}

Columns = dict[str, list[Any]]


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
    """One split of a task.

    Raises:
        MissingInputError: The task or the split is not there.
        DataError: A file has other columns or labels than the task, or one without labels has a row cut short.
    """
    folder = find_task(data_dir, task)
    if folder is None:
        raise MissingInputError(
            f"--data-dir {data_dir} has no folder {task.title} or {task.name}; on a machine with network: {FETCH}"
        )
    with reading(folder):
        columns, place = _read_columns(folder, task, split, labelled=labelled)
    if missing := [name for name in task.texts if name not in columns]:
        raise DataError(f"{place} has the columns {', '.join(columns)}, but no {', '.join(missing)}.")
    texts = list(zip(*(columns[name] for name in task.texts), strict=True))
    if not labelled:
        return GlueSplit(texts, None)
    if "label" not in columns:
        raise DataError(f"{place}: {split} has no column of labels; only test sets may lack it.")
    return GlueSplit(texts, [_to_label(value, task, place) for value in columns["label"]])


def _read_columns(folder: Path, task: GlueTask, split: str, *, labelled: bool) -> tuple[Columns, Path]:
    """Return the columns of a split, and the file or folder that messages name."""
    files = sorted(path for path in folder.iterdir() if re.fullmatch(rf"{split}(-\d+-of-\d+)?\.parquet", path.name))
    if files:
        import pyarrow.parquet

        return pyarrow.concat_tables([pyarrow.parquet.read_table(path) for path in files]).to_pydict(), folder
    if (folder / "dataset_dict.json").is_file():
        import datasets

        saved = datasets.load_from_disk(str(folder))
        if split not in saved:
            raise MissingInputError(f"{folder} has the splits {', '.join(saved)}, but no {split}; {FETCH}")
        return saved[split].to_dict(), folder
    return _read_tsv_files(folder, task, split, labelled=labelled)


def find_task(data_dir: Path, task: GlueTask) -> Path | None:
    """The task's folder, under the benchmark's name or the Hub's."""
    names = [task.title, task.name, *(["diagnostic"] if task is DIAGNOSTIC else [])]
    return next((data_dir / name for name in names if (data_dir / name).is_dir()), None)


def check_rows(task: GlueTask, split: str, found: int) -> None:
    """Warns where a split has another number of rows than the benchmark's."""
    if found != task.rows[split]:
        warnings.warn(
            f"{task.title} {split} has {found:,} rows, the benchmark {task.rows[split]:,}; the scores cannot be "
            "compared with published ones.",
            stacklevel=2,
        )


def _read_tsv_files(folder: Path, task: GlueTask, split: str, *, labelled: bool) -> tuple[Columns, Path]:
    files = [folder / name for name in _tsv_names(folder, task, split)]
    if not files:
        raise MissingInputError(
            f"{folder} has no test set: its test.tsv is the benchmark's labelled dev set; on a machine with network: "
            f"{FETCH}"
        )
    found = [path for path in files if path.is_file()]
    if not found:
        raise MissingInputError(
            f"{folder} has no {split}.parquet and no {files[0].name}; on a machine with network: {FETCH}"
        )
    parts = [_read_tsv(path, task, labelled=labelled) for path in found]
    shared = set.intersection(*(set(part) for part in parts))
    return {name: [value for part in parts for value in part[name]] for name in shared}, found[0]


def _tsv_names(folder: Path, task: GlueTask, split: str) -> tuple[str, ...]:
    """The files that make up the benchmark's split; of those for test sets, the one that is there."""
    if task.name == "sst2" and (folder / "test.tsv").is_file():
        with (folder / "test.tsv").open(encoding="utf-8-sig", newline="\n") as stream:
            labelled = "label" in stream.readline().rstrip("\r\n").split("\t")
        if labelled:  # the set cut anew
            return {"train": ("train.tsv", "dev.tsv"), "validation": ("test.tsv",)}.get(split, ())
    if split == "train" and (folder / "val.tsv").is_file():
        return "train.tsv", "val.tsv"
    names = _TSV_SPLITS[split]
    return tuple(name for name in names if (folder / name).is_file())[:1] or names[:1]


def _read_tsv(path: Path, task: GlueTask, *, labelled: bool) -> Columns:
    """The columns that are needed.

    Rows that are too short for them are left out, as the Hub's data set does, unless their numbers count: the answers
    to a test set are known by them.
    """
    with path.open(encoding="utf-8-sig", newline="\n") as stream:  # other line ends occur within texts
        rows = [line.rstrip("\r\n").split("\t") for line in stream if line.strip()]
    wanted = {name: task.tsv_names.get(name, name) for name in (*task.texts, "label")}
    named = bool(rows) and wanted[task.texts[0]] in rows[0]
    header = rows.pop(0) if named else list(task.columns)
    if (
        not rows
        or any(wanted[name] not in header for name in task.texts)
        or (not named and len(rows[0]) != len(header))
    ):
        raise DataError(
            f"{path}: its first line has {len(rows[0]) if rows else 0} fields; a {task.title} file has the columns "
            f"{', '.join(task.columns)}, with or without a line that names them."
        )
    places = {name: header.index(column) for name, column in wanted.items() if column in header}
    complete = [row for row in rows if len(row) > max(places.values())]
    if len(complete) < len(rows) and not labelled:
        first = next(number for number, row in enumerate(rows) if len(row) <= max(places.values()))
        raise DataError(f"{path}: row {first} (from 0) is cut short, so that answers would have wrong numbers; {FETCH}")
    if len(complete) < len(rows):
        warnings.warn(f"{path}: {len(rows) - len(complete):,} rows are cut short and left out.", stacklevel=2)
    return {name: [row[place] for row in complete] for name, place in places.items()}


def _to_label(value: Any, task: GlueTask, place: Path) -> int | float:
    """Its number, from a number or a word.

    Raises:
        DataError: The task has no such label.
    """
    if task.is_regression:
        try:
            return float(value)
        except ValueError:
            raise DataError(f"{place}: {value!r} is no {task.title} score; they go from 0 to 5.") from None
    if isinstance(value, str):
        if value in task.labels:
            return task.labels.index(value)
    elif value in range(len(task.labels)):
        return int(value)
    raise DataError(f"{place}: {value!r} is no {task.title} label; they are {', '.join(task.labels)}.")
