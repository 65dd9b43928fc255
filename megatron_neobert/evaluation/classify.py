"""Text classification on your own data: a sweep on every dataset of a folder.

A dataset is a file NAME.csv, NAME.jsonl or NAME.parquet, or a folder NAME with the splits train, and optionally
validation and test. Its columns are `text`, optionally `text2` for the second text of a pair, and `label`: the name or
number of a class, read alike from every format (`1` equals `1.0`, `true` equals `True`). Missing splits are taken from
the training set by a hash of the text: a tenth for validation and, if the dataset is a single file, another tenth for
testing. So equal texts stay together, and additional rows do not move existing ones.

The protocol is GLUE's, with one evaluation per epoch and, if the model's class offers it, a head on the mean of the
token states. The validation set chooses the step and the point by accuracy. Each run evaluates its best weights
once on the test set, if there is one. confusion.png shows which class was predicted for the rows of each class.
"""

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import transformers
from datasets import Dataset
from matplotlib.figure import Figure
from numpy.typing import NDArray
from sklearn import metrics

from megatron_neobert.evaluation.classify_data import labels_of, read_dataset, read_datasets
from megatron_neobert.evaluation.data import Rows
from megatron_neobert.evaluation.fine_tune import Scores, Task, resolve_device
from megatron_neobert.evaluation.models import fingerprint, load_tokenizer, longest_input
from megatron_neobert.evaluation.options import ClassifyOptions
from megatron_neobert.evaluation.plots import save_figure
from megatron_neobert.evaluation.sweep import GRIDS, last_sweep, run_sweep, task_folder
from megatron_neobert.huggingface.hub import model_name

_MOST_SHOWN_CLASSES = 16  # of a confusion matrix; the names of more classes are not readable on a screen


@dataclass(frozen=True)
class ClassifyTask(Task):
    kind = "classify"
    # docs/evaluation.md has the measurements. Classes without this setting, such as BERT's, keep their pooling.
    changes: ClassVar[dict[str, Any]] = {"classifier_pooling": "mean"}

    def read_rows(self, split: str, data_dir: Path) -> Rows:
        rows = read_dataset(data_dir, self.name)[split]
        return replace(rows, labels=[self.labels.index(label) for label in rows.labels])

    def score(self, prediction: Any, encoded: Dataset) -> Scores:
        """Return accuracy and macro_f1 of predictions [rows, classes]. macro_f1 is the mean F1 of the head's classes.

        The F1 of a class without rows and predictions is 0.
        """
        logits, labels = prediction.predictions, prediction.label_ids
        # -1 is no class: outputs that are not finite count as wrong.
        predicted = np.where(np.isfinite(logits).all(axis=1), logits.argmax(axis=1), -1)
        classes = range(len(self.labels))
        macro_f1 = metrics.f1_score(labels, predicted, labels=classes, average="macro", zero_division=0.0)
        return {"accuracy": float(metrics.accuracy_score(labels, predicted)), "macro_f1": float(macro_f1)}


def run_classify(options: ClassifyOptions) -> Path:
    """Execute the unfinished runs, draw the figures, and return OUTPUT/MODEL, the folder with classify.json and .md.

    Raises MissingInputError if there is no dataset, and DataError if a dataset has only one class.
    """
    options, folder = resolve_device(options), options.output / model_name(options.model)
    tasks = [
        ClassifyTask(name, tuple(splits), ("accuracy",), tuple(labels_of(splits)))
        for name, splits in read_datasets(options)
    ]
    for task in tasks:
        run_sweep(task, GRIDS[options.grid].replace(options), options.model, options)
    # After all runs, because it initializes CUDA, and each run chooses its GPU before that.
    for task in tasks:
        draw_confusion(task, folder, options)
    return folder


# --- the figure


def draw_confusion(task: ClassifyTask, folder: Path, options: ClassifyOptions) -> None:
    """Draw confusion.png for a task's last split. Do nothing if no sweep is finished or its weights were removed."""
    sweep = last_sweep(folder, "classify", task.name, fingerprint(options.model))
    if sweep is None or sweep["kept"] is None:
        return
    weights = Path(sweep["kept"])
    model, tokenizer = task.load(weights, options.attention), load_tokenizer(weights)
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
        logits: Any = trainer.predict(encoded).predictions
    path = task_folder(folder, "classify", task.name) / "confusion.png"
    plot_confusion(path, task, split, encoded["labels"], logits.argmax(axis=1))


def plot_confusion(path: Path, task: ClassifyTask, split: str, labels: Iterable[int], predicted: Iterable[int]) -> None:
    """Draw a confusion matrix as PNG: for each true class (a row), the share that was predicted as each class.

    With more than 16 classes, only the classes with the most frequent confusions are shown.
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
    """Return the indices of at most `count` classes with the most frequent confusions, in increasing order.

    `counts[i, j]` is the number of rows of class i that were predicted as class j.
    """
    order = np.argsort(-(counts - np.diag(counts.diagonal())), axis=None, kind="stable").tolist()
    by_confusion = dict.fromkeys(label for confusion in order for label in divmod(confusion, len(counts)))
    return sorted(list(by_confusion)[:count])
