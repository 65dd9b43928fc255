"""Which updates are skipped, how they are counted, and when a run has to end."""

from dataclasses import replace
from statistics import fmean, pstdev

import pytest

from megatron_neobert.config.schema import TrainingConfig
from megatron_neobert.state import MetricSums, StepResult, TrainState
from megatron_neobert.training import skip_update
from megatron_neobert.training.skip_update import count_update, skip_reason, too_many_skips

WINDOW = 8
PLAIN = TrainingConfig()
SPIKES = TrainingConfig(loss_spike_sigma=4.0)
START = TrainState(corpus_sha256="")


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
    monkeypatch.setattr(skip_update, "SPIKE_WINDOW", WINDOW)
    monkeypatch.setattr(skip_update, "MOST_SKIPPED", 3)


def report_of(loss: float, grad_norm: float, skip_reason: str | None = None) -> StepResult:
    return StepResult(MetricSums(loss, masked_tokens=1), grad_norm=grad_norm, skip_reason=skip_reason)


def after(reports: list[StepResult], training: TrainingConfig = SPIKES) -> TrainState:
    state = START
    for report in reports:
        state = count_update(replace(state, iteration=state.iteration + 1), report, training)
    return state


def reason(state: TrainState, loss: float, grad_norm: float, training: TrainingConfig = SPIKES) -> str | None:
    return skip_reason(state, loss=loss, grad_norm=grad_norm, training=training)


GOOD = [report_of(2.0 + 0.1 * (number % 3), 1.0 + 0.2 * (number % 2)) for number in range(WINDOW)]
BAD = report_of(float("nan"), float("nan"), "loss nan")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_loss_or_gradient_that_is_not_finite_is_skipped_and_both_are_named(bad):
    assert reason(START, bad, 1.0, PLAIN) == f"loss {bad:.4f}, gradient norm 1.000"
    assert reason(START, 2.0, bad, PLAIN) == f"loss 2.0000, gradient norm {bad:.3f}"


@pytest.mark.parametrize("column", [0, 1])
def test_a_spike_is_what_exceeds_the_mean_by_the_given_number_of_deviations(column):
    values = [(report.sums.mean_loss, report.grad_norm)[column] for report in GOOD]
    limit = fmean(values) + 4.0 * pstdev(values)
    for factor, is_skipped in ((0.999, False), (1.001, True)):
        loss, grad_norm = (limit * factor, 1.0) if column == 0 else (2.0, limit * factor)
        assert (reason(after(GOOD), loss, grad_norm) is not None) == is_skipped
    said = reason(after(GOOD), loss, grad_norm)
    assert said.startswith(("loss", "gradient norm")[column]) and f"{limit:.4f}" in said and "last 8 updates" in said


def test_spikes_are_judged_once_half_the_window_is_filled():
    assert reason(after(GOOD[: WINDOW // 2 - 1]), 1e9, 1.0) is None
    assert reason(after(GOOD[: WINDOW // 2]), 1e9, 1.0) is not None


def test_the_window_holds_the_last_good_updates_alone():
    """Neither a skipped one, nor a batch without a masked token, whose loss is 0 for want of one."""
    reports = [report_of(float(number + 1), 1.0) for number in range(WINDOW + 3)]
    reports[5:5] = [BAD, report_of(0.0, 0.0)]
    losses = [loss for loss, _ in after(reports).recent_updates]
    assert losses == [float(number + 1) for number in range(3, WINDOW + 3)]


def test_skipped_updates_are_counted_in_all_and_in_a_row():
    state = after([BAD, *GOOD[:2], BAD, BAD], PLAIN)
    assert (state.skipped_iterations, state.skipped_in_a_row) == (3, 2)
    assert after([BAD, BAD, GOOD[0]], PLAIN).skipped_in_a_row == 0


def test_a_run_ends_at_each_multiple_of_so_many_skips_in_a_row():
    ends = [
        too_many_skips(after(GOOD[:2] + [BAD] * skipped, PLAIN), PLAIN, save=None) is not None for skipped in range(8)
    ]
    assert ends == [False, False, False, True, False, False, True, False]
