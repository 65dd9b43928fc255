"""The nine GLUE tasks: their rows out of local files, and the scores of a model's outputs.

Names of tasks and columns are those of the data set on the Hub. Metrics: the first one chooses models, all of them are
averaged for the table. They are scikit-learn's and SciPy's as fractions of 1, and never NaN, which would win or lose
every comparison by accident: a metric that is not defined counts as 0, with a warning.
Source: Wang et al. 2019, tables 1 and 5; arXiv 2502.19587 appendix C.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from sklearn import metrics

from megatron_neobert.errors import DataError, MissingInputError
from megatron_neobert.evaluation.data import columns_of, digest_of, read_split, spread

PAIR, HYPOTHESIS = ("sentence1", "sentence2"), ("premise", "hypothesis")
BINARY, ENTAILED = ("0", "1"), ("entailment", "not_entailment")
FETCH = "on a machine with network: neobert fetch glue --output DIR"


@dataclass(frozen=True)
class GlueTask:
    """One task."""

    name: str
    title: str  # of folders and submissions, as the benchmark writes it
    texts: tuple[str, ...]  # names of their columns
    labels: tuple[str, ...]  # words by class; none: a number from 0 to 5
    metrics: tuple[str, ...]
    rows: dict[str, int]  # by split; the training set first, then the validation set that chooses
    starts_from_mnli: bool = False

    @property
    def validation(self) -> tuple[str, ...]:
        """Names of the validation sets, the one that chooses weights first."""
        return tuple(self.rows)[1:]

    @property
    def num_outputs(self) -> int:
        return len(self.labels) or 1

    @property
    def is_regression(self) -> bool:
        return not self.labels


_MNLI = GlueTask(
    "mnli",
    "MNLI",
    HYPOTHESIS,
    ("entailment", "neutral", "contradiction"),
    ("accuracy", "accuracy_mismatched"),
    {"train": 392_702, "validation_matched": 9_815, "validation_mismatched": 9_832},
)
_ACCURACY, _WITH_F1, _CORRELATED = ("accuracy",), ("accuracy", "f1"), ("pearson", "spearman")
_FOLLOWS: dict[str, Any] = {"starts_from_mnli": True}
_QNLI_TEXTS, _QQP_TEXTS = ("question", "sentence"), ("question1", "question2")


def _rows(train: int, validation: int) -> dict[str, int]:
    return {"train": train, "validation": validation}


_TASKS = (
    _MNLI,
    GlueTask("qnli", "QNLI", _QNLI_TEXTS, ENTAILED, _ACCURACY, _rows(104_743, 5_463), **_FOLLOWS),
    GlueTask("qqp", "QQP", _QQP_TEXTS, BINARY, _WITH_F1, _rows(363_846, 40_430)),
    GlueTask("rte", "RTE", PAIR, ENTAILED, _ACCURACY, _rows(2_490, 277), **_FOLLOWS),
    GlueTask("sst2", "SST-2", ("sentence",), BINARY, _ACCURACY, _rows(67_349, 872)),
    GlueTask("mrpc", "MRPC", PAIR, BINARY, _WITH_F1, _rows(3_668, 408), **_FOLLOWS),
    GlueTask("cola", "CoLA", ("sentence",), BINARY, ("matthews",), _rows(8_551, 1_043)),
    GlueTask("stsb", "STS-B", PAIR, (), _CORRELATED, _rows(5_749, 1_500), **_FOLLOWS),
    GlueTask("wnli", "WNLI", PAIR, BINARY, _ACCURACY, _rows(635, 71)),
)
TASKS = {task.name: task for task in _TASKS}
PAPER_TASKS = tuple(task.name for task in _TASKS if task.name != "wnli")  # in the order of the paper's table


# --- rows


@dataclass(frozen=True)
class GlueSplit:
    """Rows of one split: the text or the pair, and the label."""

    texts: list[tuple[str, ...]]
    labels: list[int] | list[float]
    digest: str = ""  # of all values

    def spread(self, limit: int | None) -> "GlueSplit":
        """Return at most `limit` rows, evenly spread."""
        return GlueSplit(list(spread(self.texts, limit)), list(spread(self.labels, limit)), self.digest)


def read_task(data_dir: Path, task: GlueTask, split: str) -> GlueSplit:
    """Return one split of a task; warn if it has another number of rows than the benchmark's.

    Raises:
        MissingInputError: The task or the split is not there.
        DataError: A file has no rows, or other columns or labels than the task.
    """
    folder = next((data_dir / name for name in (task.title, task.name) if (data_dir / name).is_dir()), None)
    if folder is None:
        raise MissingInputError(f"--data-dir {data_dir} has no folder {task.title} or {task.name}; {FETCH}")
    rows = read_split(folder, [split], texts=task.texts)
    if rows is None:
        raise MissingInputError(
            f"{folder} has no {split}.parquet, {split}.jsonl or {split}.csv; {FETCH}. TSV files are not read: "
            "docs/evaluation.md has the line that makes CSV of them."
        )
    names = [*task.texts, "label"]
    *texts, labels = columns_of(rows, names, f"{folder}: {split}")
    if len(labels) != task.rows[split]:
        warnings.warn(
            f"{task.title} {split} has {len(labels):,} rows, the benchmark {task.rows[split]:,}; the scores cannot be "
            "compared with published ones.",
            stacklevel=2,
        )
    numbers: Any = [_to_label(value, task, folder) for value in labels]
    return GlueSplit(list(zip(*texts, strict=True)), numbers, digest_of(rows, names))


def _to_label(value: Any, task: GlueTask, folder: Path) -> int | float:
    """Return a label, which may be a number or a word, as a number."""
    if task.is_regression:
        try:
            return float(value)
        except (TypeError, ValueError):  # an empty cell is None
            raise DataError(f"{folder}: {value!r} is no {task.title} score; they go from 0 to 5.") from None
    if isinstance(value, str):
        if value in task.labels:
            return task.labels.index(value)
    elif value in range(len(task.labels)):
        return int(value)
    raise DataError(f"{folder}: {value!r} is no {task.title} label; they are {', '.join(task.labels)}.")


# --- scores


_METRICS: dict[str, Callable[[NDArray[np.generic], NDArray[np.generic]], float]] = {
    "accuracy": metrics.accuracy_score,
    "f1": partial(metrics.f1_score, zero_division=0.0),
    "matthews": metrics.matthews_corrcoef,
    "pearson": lambda labels, predictions: stats.pearsonr(labels, predictions).statistic,
    "spearman": lambda labels, predictions: stats.spearmanr(labels, predictions).statistic,
}
_CORRELATIONS = ("matthews", "pearson", "spearman")


def compute_scores(task: GlueTask, logits: NDArray[np.floating], labels: NDArray[np.generic]) -> dict[str, float]:
    """Return every metric of the task that one set of rows gives; for MNLI the accuracy.

    Args:
        logits: [rows, outputs].
        labels: [rows], numbers of classes or scores.
    """
    names = [name for name in task.metrics if name in _METRICS]
    if not np.isfinite(logits).all():
        warnings.warn(f"{task.title}: the model gives values that are not finite; counted as 0.", stacklevel=2)
        return dict.fromkeys(names, 0.0)
    predictions: NDArray[np.generic] = logits.reshape(len(logits)) if task.is_regression else logits.argmax(axis=1)
    if len(labels) > 1 and np.ptp(predictions) == 0 and any(name in _CORRELATIONS for name in names):
        warnings.warn(f"{task.title}: every prediction is {predictions[0]}; correlations count as 0.", stacklevel=2)
        return dict.fromkeys(names, 0.0)
    scores = {name: float(_METRICS[name](labels, predictions)) for name in names}
    return {name: score if np.isfinite(score) else 0.0 for name, score in scores.items()}


def average(task: GlueTask, scores: Mapping[str, float]) -> float:
    """Return the task's number in the table: the mean of its metrics."""
    return sum(scores[name] for name in task.metrics) / len(task.metrics)
