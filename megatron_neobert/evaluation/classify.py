"""Text classification on your own data: a sweep on every dataset of a folder.

A dataset is a file NAME.csv, NAME.jsonl or NAME.parquet, or a folder NAME with the splits train, and optionally
validation and test. Its columns are `text`, optionally `text2` for the second text of a pair, and `label`: the name or
the number of a class, equal in all formats (`1` is `1.0`, `true` is `True`). Missing splits are taken from the training
set by a hash of the text: a tenth for validation, and of a single file another tenth for the test. Equal texts
therefore stay together, and new rows move no old ones.

The protocol is GLUE's, with one evaluation per epoch and, where the model's class has the choice, a head on the mean of
the token states. The validation set chooses the step and the point by accuracy. Each run evaluates its best weights
once on the test set, if there is one. OUTPUT/NAME/classify/DATASET has the ledger, the best weights, and confusion.png:
which class was predicted for the rows of each class. OUTPUT/NAME/classify.json and .md have the results.
"""

import hashlib
import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import transformers
from datasets import Dataset
from matplotlib.figure import Figure
from numpy.typing import NDArray
from sklearn import metrics

from megatron_neobert.errors import DataError, MissingInputError
from megatron_neobert.evaluation.data import SPLIT_NAMES, columns_of, digest_of, read_split, to_text
from megatron_neobert.evaluation.fine_tune import Scores, resolve_device
from megatron_neobert.evaluation.models import LoadOptions, fingerprint, load_tokenizer, longest_input
from megatron_neobert.evaluation.options import ClassifyOptions, FineTuneOptions
from megatron_neobert.evaluation.plots import save_figure
from megatron_neobert.evaluation.sequence import Rows, SequenceTask
from megatron_neobert.evaluation.sweep import GRIDS, Sweep, last_sweep, run_sweep, task_folder
from megatron_neobert.huggingface.hub import model_name
from megatron_neobert.text import listed

_TEXTS, _LABEL = ("text", "text2"), "label"
_COLUMNS = (*_TEXTS, _LABEL)
_ENDINGS = (".csv", ".jsonl", ".parquet")
_WHOLE_FLOAT = re.compile(r"^(-?(?:0|[1-9]\d*))\.0+$")
_MOST_SHOWN_CLASSES = 16  # of a confusion matrix; the names of more classes are not readable on a screen


@dataclass(frozen=True)
class ClassifyTask(SequenceTask):
    # The accuracy can stay that of guessing for hundreds of steps, so with GLUE's interval a run could end too early.
    eval_strategy = "epoch"
    last_split_pattern = "test_{}"
    # docs/evaluation.md has the measurements. Classes without this setting, such as BERT's, keep their pooling.
    changes: ClassVar[dict[str, Any]] = {"classifier_pooling": "mean"}

    def read_rows(self, split: str, options: FineTuneOptions) -> Rows:
        rows = read_dataset(options.data_dir, self.name)[split]
        return replace(rows, labels=[self.labels.index(label) for label in rows.labels])

    def score(self, logits: NDArray[np.floating], labels: NDArray[np.generic]) -> Scores:
        """Return the accuracy of predictions [rows, classes], and their mean F1 over all classes of the head.

        F1 of a class without rows and predictions is 0.
        """
        # -1 is no class: outputs that are not finite count as wrong.
        predicted = np.where(np.isfinite(logits).all(axis=1), logits.argmax(axis=1), -1)
        classes = range(len(self.labels))
        macro_f1 = metrics.f1_score(labels, predicted, labels=classes, average="macro", zero_division=0.0)
        return {"accuracy": float(metrics.accuracy_score(labels, predicted)), "macro_f1": float(macro_f1)}


def run_classify(options: ClassifyOptions) -> Path:
    """Execute the unfinished runs. After each dataset, write the results; then all figures.

    Return OUTPUT/MODEL, the folder with classify.json and .md. Raises MissingInputError without a dataset, and
    DataError if a dataset has one class only.
    """
    options, folder = resolve_device(options), options.output / model_name(options.model)
    names = list(dict.fromkeys(options.tasks or find_datasets(options.data_dir)))
    if not names:
        raise MissingInputError(
            f"--data-dir {options.data_dir} has no dataset; add NAME.csv with the columns text and label, or a folder "
            "NAME with train.csv."
        )
    tasks = []
    for name in names:
        rows = read_dataset(options.data_dir, name)
        labels = sorted({label for split in rows.values() for label in split.labels})
        if len(labels) < 2:
            raise DataError(f"{options.data_dir / name}: every row has the label {labels[0]!r:.80}; add other classes.")
        tasks.append(ClassifyTask(name, tuple(rows), ("accuracy",), tuple(labels)))
    for task in tasks:
        splits = read_dataset(options.data_dir, task.name)
        sweep = Sweep(
            kind="classify",
            task=task,
            grid=GRIDS[options.grid].replace(options),
            start=options.model,
            data={split: rows.digest for split, rows in splits.items()},
            rows={split: rows.used(options.limit) for split, rows in splits.items()},
            options=options,
        )
        run_sweep(sweep)
    # After all runs, because it initializes CUDA, and each run chooses its GPU before that.
    for task in tasks:
        draw_confusion(task, folder, options)
    return folder


# --- data


def find_datasets(data_dir: Path) -> list[str]:
    """Return the names of files with rows and of folders with a training set.

    Raise DataError if `data_dir` itself has a training set, whose splits would be datasets of their own.
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
    """Return the splits of a dataset (cached): train, validation, and test if there is one. Labels are names.

    Raises:
        MissingInputError: There is no such file, and no folder with a training set.
        DataError: A row has no text or no named label, or a split has no class of the training set.
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
    """Return {split: rows}: for each of `splits` a tenth, chosen by a hash of the text, and the rest as "train"."""
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
        texts[-1] = list(map(_canonical, texts[-1]))
    for column, cells in zip(columns, texts, strict=True):
        if "" in cells:
            raise DataError(f"{where} row {cells.index('')} has no {column}; write one text or number.")
    return Rows(texts[:-1], texts[-1], digest_of(rows, columns))


def _canonical(label: str) -> str:
    """Return the same text for each spelling of a number or a boolean: 1 for 1.0, and true for True."""
    return label.lower() if label.lower() in ("true", "false") else _WHOLE_FLOAT.sub(r"\1", label)


# --- the figure


def draw_confusion(task: ClassifyTask, folder: Path, options: ClassifyOptions) -> None:
    """Draw confusion.png of a finished task from predictions for the last split, unless the weights were removed."""
    sweep = last_sweep(folder, "classify", task.name, fingerprint(options.model))
    if sweep is None or sweep["kept"] is None:
        return
    weights = Path(sweep["kept"])
    model, tokenizer = task.load(weights, LoadOptions(attention=options.attention)), load_tokenizer(weights)
    split = task.splits[-1]
    encoded = task.encode(split, options, tokenizer, longest_input(model, tokenizer, at_most=options.max_length))
    with tempfile.TemporaryDirectory() as scratch:
        arguments = transformers.TrainingArguments(
            scratch,
            per_device_eval_batch_size=32,
            report_to="none",
            disable_tqdm=True,
            use_cpu=options.device != "cuda",
        )
        trainer = transformers.Trainer(model, arguments, data_collator=task.collator(tokenizer))
        logits: Any = trainer.predict(encoded.dataset).predictions
    path = task_folder(folder, "classify", task.name) / "confusion.png"
    plot_confusion(path, task, split, encoded.dataset["labels"], logits.argmax(axis=1))


def plot_confusion(path: Path, task: ClassifyTask, split: str, labels: Iterable[int], predicted: Iterable[int]) -> None:
    """Draw the share of the rows of each class (a row of the matrix) that was predicted as each class, as PNG.

    With many classes, only the classes of the most frequent confusions are shown.
    """
    classes = len(task.labels)
    counts = metrics.confusion_matrix(labels, predicted, labels=range(classes))
    shown = most_confused(counts, _MOST_SHOWN_CLASSES)
    shares = (counts / np.maximum(counts.sum(axis=1, keepdims=True), 1))[np.ix_(shown, shown)]
    inches = 4.0 + 0.45 * len(shown)
    figure = Figure(figsize=(inches, inches), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    display = metrics.ConfusionMatrixDisplay(100 * shares, display_labels=[task.labels[label] for label in shown])
    display.plot(ax=axes, values_format=".0f", xticks_rotation="vertical", cmap="Blues", colorbar=False)
    for text in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        text.set(parse_math=False, fontsize=9)
    for text in display.text_.flat:
        text.set_visible(text.get_text() != "0")
    part = f", the {len(shown)} of {classes} classes with the most frequent confusions" if len(shown) < classes else ""
    axes.set_title(f"{task.name}, {split}: % of each class{part}", parse_math=False)
    save_figure(figure, path)


def most_confused(counts: NDArray[np.integer], count: int) -> list[int]:
    """Return the classes of the most frequent confusions, at most `count`, in increasing order.

    `counts` has the number of rows by true class and predicted class [classes, classes].
    """
    order = np.argsort(-(counts - np.diag(counts.diagonal())), axis=None, kind="stable").tolist()
    by_confusion = dict.fromkeys(label for confusion in order for label in divmod(confusion, len(counts)))
    return sorted(list(by_confusion)[:count])
