"""Whether an update is made: not if its loss or gradient would break the weights.

The answer follows from numbers that all ranks hold alike, the loss and the gradient norm of the whole batch, so no
rank needs to be asked. A skipped update costs its batch and nothing else: weights, moments and Adam's step count stay,
data and schedule continue.
"""

import math
import statistics
from dataclasses import replace

from megatron_neobert.config.schema import TrainingConfig
from megatron_neobert.state import StepResult, TrainState

SPIKE_WINDOW = 128  # updates whose mean and deviation a new one is compared with
MOST_SKIPPED = 10  # updates in a row, before a run ends as diverged


def skip_reason(state: TrainState, *, loss: float, grad_norm: float, training: TrainingConfig) -> str | None:
    """Return why an update with this loss (nats per masked token) and gradient norm must not be made; None if it may.

    With --loss-spike-sigma, both are compared with the last good updates, once there are half of SPIKE_WINDOW.
    """
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        return f"loss {loss:.4f}, gradient norm {grad_norm:.3f}"
    recent = state.recent_updates
    if training.loss_spike_sigma is None or 2 * len(recent) < SPIKE_WINDOW:
        return None
    for name, value, column in (("loss", loss, 0), ("gradient norm", grad_norm, 1)):
        values = [update[column] for update in recent]
        mean = statistics.fmean(values)
        limit = mean + training.loss_spike_sigma * statistics.pstdev(values, mu=mean)
        if value > limit:
            return (
                f"{name} {value:.4f} is above {limit:.4f}, the mean of the last {len(recent)} updates plus "
                f"{training.loss_spike_sigma:g} standard deviations"
            )
    return None


def count_update(state: TrainState, result: StepResult, training: TrainingConfig) -> TrainState:
    """Return the train state after a step was trained or skipped."""
    if result.skip_reason is not None:
        return replace(
            state,
            skipped_iterations=state.skipped_iterations + 1,
            skipped_in_a_row=state.skipped_in_a_row + 1,
        )
    recent = state.recent_updates
    if training.loss_spike_sigma is None:
        recent = ()
    elif result.sums.mean_loss > 0:  # without a masked token there is no loss, and nothing to compare others with
        recent = (*recent, (result.sums.mean_loss, result.grad_norm))[-SPIKE_WINDOW:]
    return replace(state, skipped_in_a_row=0, recent_updates=recent)


def too_many_skips(state: TrainState, training: TrainingConfig, *, save: str | None) -> str | None:
    """Return why the run must end; None while it may continue.

    A run that is started again may skip as many updates once more.
    """
    skipped = state.skipped_in_a_row
    if skipped == 0 or skipped % MOST_SKIPPED:
        return None
    spike = "" if training.loss_spike_sigma is None else f" or above --loss-spike-sigma {training.loss_spike_sigma:g}"
    last = state.iteration
    return (
        f"the updates of the last {skipped} iterations, {last - skipped + 1} to {last}, were skipped because loss or "
        f"gradient norm was not finite{spike}; at most {MOST_SKIPPED} in a row are skipped. Look at the batch with "
        f"neobert replay --load {save or 'SAVE'} --iteration {last} --checkpoint-iteration {last}; then "
        "continue from an earlier checkpoint, with a lower --lr or other data."
    )
