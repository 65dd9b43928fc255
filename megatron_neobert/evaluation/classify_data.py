"""Datasets of texts with labels, for classification. Imports no torch, so that a wrong file is reported at once."""

import hashlib
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from datasets import Dataset

from megatron_neobert.errors import DataError, MissingInputError
from megatron_neobert.evaluation.data import SPLIT_NAMES, Rows, columns_of, digest_of, read_split, to_text
from megatron_neobert.evaluation.options import ClassifyOptions
from megatron_neobert.text import listed

_TEXTS, _LABEL = ("text", "text2"), "label"
_COLUMNS = (*_TEXTS, _LABEL)
_ENDINGS = (".csv", ".jsonl", ".parquet")
_WHOLE_FLOAT = re.compile(r"^(-?(?:0|[1-9]\d*))\.0+$")


def read_datasets(options: ClassifyOptions) -> Iterator[tuple[str, dict[str, Rows]]]:
    """Yield (name, {split: rows}) for each dataset that the options choose.

    Raises MissingInputError if there is no dataset, and DataError if a dataset has only one class or cannot be used.
    """
    names = list(dict.fromkeys(options.tasks or find_datasets(options.data_dir)))
    if not names:
        raise MissingInputError(
            f"--data-dir {options.data_dir} has no dataset; add NAME.csv with the columns text and label, or a folder "
            "NAME with train.csv."
        )
    for name in names:
        splits = read_dataset(options.data_dir, name)
        if len(labels := labels_of(splits)) < 2:
            raise DataError(f"{options.data_dir / name}: every row has the label {labels[0]!r:.80}; add other classes.")
        yield name, splits


def labels_of(splits: dict[str, Rows]) -> list[str]:
    """Return a dataset's class names, sorted."""
    return sorted({label for rows in splits.values() for label in rows.labels})


def find_datasets(data_dir: Path) -> list[str]:
    """Return the names of all datasets in `data_dir`: data files, and folders that contain a training set.

    Raise DataError if `data_dir` itself contains a training set, because each split would be taken for a dataset.
    """
    files = {re.sub(r"-\d+-of-\d+$", "", path.stem) for path in data_dir.iterdir() if path.suffix in _ENDINGS}
    if "train" in files:
        raise DataError(
            f"--data-dir {data_dir} is a dataset itself, because it has a training set; give the folder that contains "
            f"it, with --tasks {data_dir.resolve().name}."
        )
    folders = {path.name for path in data_dir.iterdir() if read_split(path, SPLIT_NAMES["train"], _COLUMNS) is not None}
    return sorted(files | folders)


@lru_cache(maxsize=4)  # the runs of one process use the same datasets
def read_dataset(data_dir: Path, name: str) -> dict[str, Rows]:
    """Return {split: rows} of a dataset (cached): train, validation and, if it exists, test. Labels are class names.

    Raises:
        MissingInputError: There is no such file, and no folder with a training set.
        DataError: A row has no text or no named label, or a split shares no class with the training set.
    """
    folder = data_dir / name
    if folder.is_dir():
        found = {split: read_split(folder, names, _COLUMNS, texts=_COLUMNS) for split, names in SPLIT_NAMES.items()}
    else:
        found = {"train": read_split(data_dir, [name], _COLUMNS, texts=_COLUMNS)}
    tables = {split: rows for split, rows in found.items() if rows is not None}
    if "train" not in tables:
        raise MissingInputError(
            f"--data-dir {data_dir} has neither {name}.csv, .jsonl or .parquet nor a folder {name} with train.csv; add "
            "the file, or name another dataset in --tasks."
        )
    needed = ("validation",) if folder.is_dir() else ("validation", "test")
    if missing := [split for split in needed if split not in tables]:
        tables |= _divide(tables["train"], missing, folder)
    columns = [name for name in _COLUMNS if name != "text2" or name in tables["train"].column_names]
    parts = {split: _to_rows(tables[split], columns, f"{folder}: {split}") for split in SPLIT_NAMES if split in tables}
    classes = set(parts["train"].labels)
    for split, part in parts.items():
        if classes.isdisjoint(part.labels):
            raise DataError(
                f"{folder}: {split} has the labels {listed(sorted(set(part.labels)))}, and train has none of them, but "
                f"{listed(sorted(classes))}; write the same names in all splits."
            )
    return parts


def _divide(rows: Dataset, splits: Sequence[str], where: Path) -> dict[str, Dataset]:
    """Give each of `splits` a tenth of the rows, chosen by a hash of the text. Return {split: rows} with "train"."""
    texts, _ = columns_of(rows, [_TEXTS[0], _LABEL], str(where))
    digits = np.array([int.from_bytes(hashlib.sha256(str(text).encode()).digest()[:8], "big") % 10 for text in texts])
    chosen = {split: digits == tenth for tenth, split in enumerate(splits)} | {"train": digits >= len(splits)}
    parts = {
        split: Dataset.from_dict(rows.select(np.flatnonzero(is_chosen)).to_dict(), features=rows.features)
        for split, is_chosen in chosen.items()
    }
    if empty := [split for split, part in parts.items() if not len(part)]:
        raise DataError(f"{where} has {len(rows)} rows, too few to divide: {empty[0]} is empty; add rows or splits.")
    return parts


def _to_rows(rows: Dataset, columns: Sequence[str], where: str) -> Rows:
    classes = getattr(rows.features.get(_LABEL), "names", None)
    values = columns_of(rows, columns, where)
    if classes:
        values[-1] = [classes[label] if label in range(len(classes)) else None for label in values[-1]]
    texts = [[to_text(value) for value in column] for column in values]
    if not classes:
        # The same text for each spelling of a number or a boolean: 1 for 1.0, and true for True.
        texts[-1] = [
            label.lower() if label.lower() in ("true", "false") else _WHOLE_FLOAT.sub(r"\1", label)
            for label in texts[-1]
        ]
    for column, cells in zip(columns, texts, strict=True):
        if "" in cells:
            raise DataError(f"{where} row {cells.index('')} has no {column}; write one text or number.")
    return Rows(texts[:-1], texts[-1], digest_of(rows, columns))
