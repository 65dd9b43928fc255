"""GLUE from local files: the benchmark's TSV files, parquet as tools/fetch_glue.py writes it, or saved data sets.

Quotes in the TSV files are bare, so nothing is unquoted. Some distributions are cut otherwise (CoLA, RTE and WNLI with
a part of the training set as val.tsv, SST-2 with the benchmark's dev set as a labelled test.tsv); they are put together
as the benchmark has them.
"""

import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_neobert.errors import DataError, MissingInputError
from megatron_neobert.evaluation.glue.tasks import DIAGNOSTIC, GlueTask

FETCH = "python tools/fetch_glue.py --output DIR"
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
    files = sorted(path for path in folder.iterdir() if re.fullmatch(rf"{split}(-\d+-of-\d+)?\.parquet", path.name))
    place, columns = folder, None
    if files:
        import pyarrow.parquet

        columns = pyarrow.concat_tables([pyarrow.parquet.read_table(path) for path in files]).to_pydict()
    elif (folder / "dataset_dict.json").is_file():
        import datasets

        saved = datasets.load_from_disk(str(folder))
        if split not in saved:
            raise MissingInputError(f"{folder} has the splits {', '.join(saved)}, but no {split}; {FETCH}")
        columns = saved[split].to_dict()
    if columns is None:
        columns, place = _read_tsv_files(folder, task, split, labelled=labelled)
    if missing := [name for name in task.texts if name not in columns]:
        raise DataError(f"{place} has the columns {', '.join(columns)}, but no {', '.join(missing)}.")
    texts = list(zip(*(columns[name] for name in task.texts), strict=True))
    if not labelled:
        return GlueSplit(texts, None)
    if "label" not in columns:
        raise DataError(f"{place}: {split} has no column of labels; only test sets may lack it.")
    return GlueSplit(texts, [_to_label(value, task, place) for value in columns["label"]])


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
