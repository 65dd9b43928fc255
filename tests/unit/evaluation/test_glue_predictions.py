"""GLUE's metrics against their formulas, and where they are not defined."""

import math

import numpy as np
import pytest

from megatron_neobert.evaluation.glue import TASKS, compute_scores

LABELS = np.array([1, 1, 1, 0, 0, 0, 0, 1])
PREDICTED = np.array([1, 1, 0, 0, 0, 1, 0, 1])
TP, TN, FP, FN = 3, 3, 1, 1
F1 = 2 * TP / (2 * TP + FP + FN)
MATTHEWS = (TP * TN - FP * FN) / math.sqrt((TP + FP) * (TP + FN) * (TN + FP) * (TN + FN))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("cola", {"matthews": MATTHEWS}),
        ("mrpc", {"accuracy": 6 / 8, "f1": F1}),
        ("qqp", {"accuracy": 6 / 8, "f1": F1}),
        ("rte", {"accuracy": 6 / 8}),
    ],
)
def test_scores_of_classes_are_the_tasks_metrics(task, expected):
    scores = compute_scores(TASKS[task], np.eye(2)[PREDICTED], LABELS)
    assert scores == pytest.approx(expected)


def test_correlations_of_stsb_are_those_of_values_and_of_ranks():
    labels, predicted = np.array([0.0, 1.0, 2.5, 4.0, 5.0]), np.array([0.3, 0.1, 2.0, 9.0, 4.0])
    squares = sum((a - b) ** 2 for a, b in zip([1, 2, 3, 4, 5], [2, 1, 3, 5, 4], strict=True))  # of ranks
    expected = {"pearson": np.corrcoef(labels, predicted)[0, 1], "spearman": 1 - 6 * squares / (5 * (25 - 1))}
    assert compute_scores(TASKS["stsb"], predicted[:, None], labels) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("task", "logits", "said"),
    [
        ("stsb", np.full((8, 1), 2.0), "every prediction is"),
        ("cola", np.tile([0.0, 1.0], (8, 1)), "every prediction is"),
        ("mrpc", np.full((8, 2), np.nan), "not finite"),
        ("stsb", np.full((8, 1), np.inf), "not finite"),
    ],
)
def test_metrics_that_are_not_defined_count_as_0_and_are_said(task, logits, said):
    with pytest.warns(UserWarning, match=said):
        assert set(compute_scores(TASKS[task], logits, LABELS).values()) == {0.0}
