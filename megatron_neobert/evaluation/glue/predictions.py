"""A model with a head for one GLUE task, what its outputs are worth, and its answers for the GLUE server.

The head is the one that transformers gives a model's kind: for our exports a linear layer on the first token, then tanh
with dropout (neobert) or GELU without (eurobert), then the classes. A folder that was fine-tuned on MNLI keeps all but
the last layer. Metrics are scikit-learn's and scipy's as fractions of 1, and never NaN, which would win or lose every
comparison by accident: what is not defined counts as 0, with a warning.
"""

import warnings
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from sklearn import metrics
from transformers.modeling_layers import GenericForSequenceClassification

from megatron_neobert.errors import ConversionError
from megatron_neobert.evaluation.encoders import LoadOptions, load_model, load_tokenizer, longest_input
from megatron_neobert.evaluation.fine_tuning.settings import Protocol
from megatron_neobert.evaluation.fine_tuning.trainer import EVALUATION_BATCH
from megatron_neobert.evaluation.glue.tasks import (
    DIAGNOSTIC,
    TASKS,
    GlueSplit,
    GlueTask,
    check_rows,
    find_task,
    read_split,
)
from megatron_neobert.runtime.atomic_files import replace_file, replacing


def load_classifier(folder: Path, task: GlueTask, options: LoadOptions) -> Any:
    """The model, its new layers drawn from torch's generator.

    Raises:
        ConversionError: transformers has no head for it, or one that reads the last token.
        MissingInputError: There is no such folder.
    """
    model = load_model(
        folder,
        "AutoModelForSequenceClassification",
        options,
        num_labels=task.num_outputs,
        # Given, because the config of a fine-tuned folder may name another.
        problem_type="regression" if task.is_regression else "single_label_classification",
    )
    if isinstance(model, GenericForSequenceClassification):
        raise ConversionError(
            f"{folder}: {type(model).__name__} classifies by the last token, as causal models do, which says little of "
            "an encoder; evaluate the eurobert or neobert export of the same checkpoint."
        )
    return model


def compute_scores(task: GlueTask, logits: NDArray[np.floating], labels: NDArray[np.generic]) -> dict[str, float]:
    """Every metric of the task that one set of rows gives; for MNLI the accuracy.

    Args:
        logits: [rows, outputs].
        labels: [rows], numbers of classes or scores.
    """
    names = [name for name in task.metrics if name in _METRICS]
    if not np.isfinite(logits).all():
        warnings.warn(f"{task.title}: the model gives values that are not finite; counted as 0.", stacklevel=2)
        return dict.fromkeys(names, 0.0)
    predictions = to_predictions(task, logits)
    if len(labels) > 1 and np.ptp(predictions) == 0 and any(name in _CORRELATIONS for name in names):
        warnings.warn(f"{task.title}: every prediction is {predictions[0]}; correlations count as 0.", stacklevel=2)
        return dict.fromkeys(names, 0.0)
    scores = {name: float(_METRICS[name](labels, predictions)) for name in names}
    return {name: score if np.isfinite(score) else 0.0 for name, score in scores.items()}


def to_predictions(task: GlueTask, logits: NDArray[np.floating]) -> NDArray[np.generic]:
    """The class of every row, or its score."""
    return logits.reshape(len(logits)) if task.is_regression else logits.argmax(axis=1)


def average(task: GlueTask, scores: Mapping[str, float]) -> float:
    """The task's number in the table: the mean of its metrics."""
    return sum(scores[name] for name in task.metrics) / len(task.metrics)


_METRICS: dict[str, Callable[[NDArray[np.generic], NDArray[np.generic]], float]] = {
    "accuracy": metrics.accuracy_score,
    "f1": partial(metrics.f1_score, zero_division=0.0),
    "matthews": metrics.matthews_corrcoef,
    "pearson": lambda labels, predictions: stats.pearsonr(labels, predictions).statistic,
    "spearman": lambda labels, predictions: stats.spearmanr(labels, predictions).statistic,
}
_CORRELATIONS = ("matthews", "pearson", "spearman")
# Of the server's sample submission, as are header and words; other files are named by the task's title.
_FILE_NAMES = {"test_matched": "MNLI-m.tsv", "test_mismatched": "MNLI-mm.tsv"}


def write_submission(name: str, weights: Path, data_dir: Path, output: Path, protocol: Protocol) -> list[Path]:
    """The files of one task, and with MNLI those of the diagnostic set.

    Raises:
        MissingInputError, DataError: As `read_test_sets`.
    """
    task = TASKS[name]
    options = LoadOptions(device=protocol.device, attention=protocol.attention)
    model, tokenizer = load_classifier(weights, task, options), load_tokenizer(weights)
    length = longest_input(model, tokenizer, at_most=protocol.max_length)
    output.mkdir(parents=True, exist_ok=True)
    written = []
    for asked, split, rows in read_test_sets(name, data_dir):
        answers = to_answers(asked, predict(model, tokenizer, rows, length))
        written.append(output / _FILE_NAMES.get(split, f"{asked.title}.tsv"))
        lines = ["index\tprediction", *(f"{number}\t{answer}" for number, answer in enumerate(answers))]
        replace_file(written[-1], "\n".join(lines) + "\n")
    return written


def zip_submission(folder: Path, written: Collection[Path]) -> tuple[Path, list[str]]:
    """Write FOLDER.zip for the server from answers in `folder`, and return its path and the file names that it lacks.

    Args:
        written: Answers of this command; files that an earlier command left may be of other weights.
    """
    tests = [(task, split) for task in (*TASKS.values(), DIAGNOSTIC) for split in task.rows if split.startswith("test")]
    wanted = [_FILE_NAMES.get(split, f"{task.title}.tsv") for task, split in tests]
    there = [name for name in wanted if folder / name in written]
    with replacing(folder.with_suffix(".zip")) as path, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in there:
            archive.write(folder / name, name)
    return folder.with_suffix(".zip"), [name for name in wanted if name not in there]


def read_test_sets(name: str, data_dir: Path) -> Iterator[tuple[GlueTask, str, GlueSplit]]:
    """What the server asks about a task, with MNLI the diagnostic set too; warns where rows are missing.

    Raises:
        MissingInputError, DataError: A test set is not there, or cannot be answered row by row.
    """
    task = TASKS[name]
    wanted = [(task, split) for split in task.rows if split.startswith("test")]
    if name == "mnli" and find_task(data_dir, DIAGNOSTIC) is not None:
        wanted.append((DIAGNOSTIC, "test"))
    for asked, split in wanted:
        rows = read_split(data_dir, asked, split, labelled=False)
        check_rows(asked, split, len(rows.texts))
        yield asked, split, rows


@torch.no_grad()
def predict(model: Any, tokenizer: Any, rows: GlueSplit, length: int) -> NDArray[np.floating]:
    """Logits [rows, outputs] of every row."""
    parts = []
    for start in range(0, len(rows.texts), EVALUATION_BATCH):
        columns = zip(*rows.texts[start : start + EVALUATION_BATCH], strict=True)
        batch = tokenizer(
            *(list(column) for column in columns), truncation=True, max_length=length, padding=True, return_tensors="pt"
        )
        parts.append(model(**batch.to(model.device)).logits.float().cpu().numpy())
    return np.concatenate(parts)


def to_answers(task: GlueTask, logits: NDArray[np.floating]) -> list[str]:
    """The server's word for every row; scores with three digits, within 0 and 5."""
    predictions = to_predictions(task, logits)
    if task.is_regression:
        return [f"{score:.3f}" for score in np.clip(predictions.astype(float), 0.0, 5.0)]
    return [task.labels[int(number)] for number in predictions]
