"""GLUE's metrics equal their formulas, and count as 0 where they are undefined."""

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
def test_classification_scores_are_the_metrics_of_the_task(task, expected):
    assert compute_scores(TASKS[task], np.eye(2)[PREDICTED], LABELS) == pytest.approx(expected)


def test_stsb_scores_are_pearson_and_spearman_correlations():
    labels, predicted = np.array([0.0, 1.0, 2.5, 4.0, 5.0]), np.array([0.3, 0.1, 2.0, 9.0, 4.0])
    # Spearman's formula, from the squared differences of the ranks.
    squares = sum((a - b) ** 2 for a, b in zip([1, 2, 3, 4, 5], [2, 1, 3, 5, 4], strict=True))
    expected = {"pearson": np.corrcoef(labels, predicted)[0, 1], "spearman": 1 - 6 * squares / (5 * (25 - 1))}
    assert compute_scores(TASKS["stsb"], predicted[:, None], labels) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("task", "logits", "warning"),
    [
        ("stsb", np.full((8, 1), 2.0), "every prediction is"),
        ("cola", np.tile([0.0, 1.0], (8, 1)), "every prediction is"),
        ("mrpc", np.full((8, 2), np.nan), "not finite"),
        ("stsb", np.full((8, 1), np.inf), "not finite"),
    ],
)
def test_undefined_metrics_count_as_0_with_a_warning(task, logits, warning):
    with pytest.warns(UserWarning, match=warning):
        assert set(compute_scores(TASKS[task], logits, LABELS).values()) == {0.0}
