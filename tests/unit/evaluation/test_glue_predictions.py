"""GLUE's metrics against their formulas, and where they are not defined."""

import math

import numpy as np
import pytest

from megatron_neobert.evaluation.glue_tasks import TASKS, average, compute_scores

LABELS = np.array([1, 1, 1, 0, 0, 0, 0, 1])
PREDICTED = np.array([1, 1, 0, 0, 0, 1, 0, 1])
TRUE_POSITIVE, TRUE_NEGATIVE, FALSE_POSITIVE, FALSE_NEGATIVE = 3, 3, 1, 1


def logits_of(predicted):
    return np.eye(3)[predicted][:, : max(2, predicted.max() + 1)]


@pytest.mark.filterwarnings("error")
def test_matthews_correlation_of_cola():
    tp, tn, fp, fn = TRUE_POSITIVE, TRUE_NEGATIVE, FALSE_POSITIVE, FALSE_NEGATIVE
    expected = (tp * tn - fp * fn) / math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    assert compute_scores(TASKS["cola"], logits_of(PREDICTED), LABELS) == {"matthews": pytest.approx(expected)}


@pytest.mark.parametrize("task", ["mrpc", "qqp"])
def test_accuracy_and_f1_of_the_second_class(task):
    f1 = 2 * TRUE_POSITIVE / (2 * TRUE_POSITIVE + FALSE_POSITIVE + FALSE_NEGATIVE)
    scores = compute_scores(TASKS[task], logits_of(PREDICTED), LABELS)
    assert scores == {"accuracy": 6 / 8, "f1": pytest.approx(f1)}
    assert average(TASKS[task], scores) == pytest.approx((6 / 8 + f1) / 2)


def test_correlations_of_stsb():
    labels, predicted = np.array([0.0, 1.0, 2.5, 4.0, 5.0]), np.array([0.3, 0.1, 2.0, 9.0, 4.0])
    pearson = np.corrcoef(labels, predicted)[0, 1]
    squares = sum((a - b) ** 2 for a, b in zip([1, 2, 3, 4, 5], [2, 1, 3, 5, 4], strict=True))  # of ranks
    expected = {"pearson": pytest.approx(pearson), "spearman": pytest.approx(1 - 6 * squares / (5 * (25 - 1)))}
    scores = compute_scores(TASKS["stsb"], predicted[:, None], labels)
    assert scores == expected
    assert average(TASKS["stsb"], scores) == pytest.approx((scores["pearson"] + scores["spearman"]) / 2)


def test_mnli_is_the_average_of_both_of_its_sets():
    assert average(TASKS["mnli"], {"accuracy": 0.5, "accuracy_mismatched": 0.7}) == pytest.approx(0.6)
    assert compute_scores(TASKS["mnli"], np.eye(3), np.array([0, 1, 0])) == {"accuracy": pytest.approx(2 / 3)}


@pytest.mark.parametrize(("task", "logits"), [("stsb", np.full((8, 1), 2.0)), ("cola", np.tile([0.0, 1.0], (8, 1)))])
def test_constant_predictions_correlate_with_nothing_and_are_said(task, logits):
    with pytest.warns(UserWarning, match="every prediction is"):
        scores = compute_scores(TASKS[task], logits, LABELS)
    assert set(scores.values()) == {0.0}


@pytest.mark.parametrize("task", ["mrpc", "cola", "stsb", "rte"])
def test_values_that_are_not_finite_count_as_0_and_never_win(task):
    logits = np.full((8, TASKS[task].num_outputs), np.nan)
    with pytest.warns(UserWarning, match="not finite"):
        assert set(compute_scores(TASKS[task], logits, LABELS).values()) == {0.0}
