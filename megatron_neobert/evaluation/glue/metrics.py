"""GLUE's metrics by scikit-learn and scipy, as fractions of 1, and never NaN.

A NaN would win or lose every comparison by accident, so what is not defined counts as 0 and is said.
"""

import warnings
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from sklearn import metrics

from megatron_neobert.evaluation.glue.tasks import GlueTask


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


def _f1(labels: NDArray[np.generic], predictions: NDArray[np.generic]) -> float:
    return float(metrics.f1_score(labels, predictions, zero_division=0.0))


def _pearson(labels: NDArray[np.generic], predictions: NDArray[np.generic]) -> float:
    return float(stats.pearsonr(labels, predictions).statistic)


def _spearman(labels: NDArray[np.generic], predictions: NDArray[np.generic]) -> float:
    return float(stats.spearmanr(labels, predictions).statistic)


_METRICS: dict[str, Callable[[NDArray[np.generic], NDArray[np.generic]], float]] = {
    "accuracy": metrics.accuracy_score,
    "f1": _f1,
    "matthews": metrics.matthews_corrcoef,
    "pearson": _pearson,
    "spearman": _spearman,
}
_CORRELATIONS = ("matthews", "pearson", "spearman")
