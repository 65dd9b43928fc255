"""Schedule, weight decay, clipping and accumulation do what their flags say."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from ranks import read_metrics, train_on_ranks
from test_layouts import largest_relative_gap
from tests_tiny import ITERATIONS
from tolerances import LAYOUT_LOSS

from megatron_neobert.checkpoint.contents import StoredTensors
from megatron_neobert.checkpoint.folder import list_checkpoints

PEAK, FLOOR = 2e-3, 2e-4


WARMUP, STABLE, END = 2, 3, 5  # with WSD the rate is constant between the first two


@pytest.mark.parametrize(
    ("style", "begin", "share_left"),
    [
        pytest.param("cosine", WARMUP, lambda done: (1 + math.cos(math.pi * done)) / 2, marks=pytest.mark.slow),
        pytest.param("linear", WARMUP, lambda done: 1 - done, marks=pytest.mark.slow),
        pytest.param("constant", WARMUP, lambda done: 1.0, marks=pytest.mark.slow),
        pytest.param("WSD exponential", STABLE, lambda done: 2 ** (1 - done) - 1, marks=pytest.mark.slow),
        ("WSD minus_sqrt", STABLE, lambda done: 1 - done**0.5),
    ],
)
def test_learning_rate_warms_up_linearly_and_then_follows_its_style(settings, style, begin, share_left):
    """Against a formula, which that of a linear decay from the warm-up on is not, and Megatron's scheduler by hand."""
    style, _, wsd_style = style.partition(" ")
    wsd = {"lr_wsd_decay_style": wsd_style, "lr_wsd_decay_iters": END - STABLE} if wsd_style else {}
    run = settings(optimizer={"lr_decay_style": style, "lr_warmup_iters": WARMUP, "lr_decay_iters": END, **wsd})
    train_on_ranks(run)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.0)
    megatron = OptimizerParamScheduler(
        *(optimizer, 0.0, PEAK, FLOOR, WARMUP, END, style, 0.0, 0.0, ITERATIONS, "constant"),
        wsd_decay_steps=END - STABLE,
        lr_wsd_decay_style=wsd_style,
    )
    rates, others = read_metrics(run.checkpoint.save, "lr"), []
    for iteration in range(1, ITERATIONS + 1):
        step = iteration - 1  # the first update is made with the rate of step 0
        assert rates[iteration] == optimizer.param_groups[0]["lr"] == pytest.approx(rate(step, begin, share_left))
        others.append(rate(step, WARMUP, lambda done: 1 - done))
        megatron.step(increment=1)
    assert (others == pytest.approx(list(rates.values()))) == (style == "linear")


def rate(step: int, begin: int, share_left: Callable[[float], float]) -> float:
    """The rate of an update, of which there have been `step`, with a decay from `begin` on."""
    if step < WARMUP:
        return PEAK * step / WARMUP
    return FLOOR + (PEAK - FLOOR) * share_left(min(1.0, max(0.0, (step - begin) / (END - begin))))


def final_norm_weights(save: str) -> torch.Tensor:
    return StoredTensors(Path(save) / f"iter_{ITERATIONS:07d}").read_whole("decoder.final_layernorm.weight")


def share_left_by_decay(save: str) -> float:
    """What a decay of 50 alone would leave of a weight: the product of 1 - 50 x rate over the updates."""
    return math.prod(1 - 50 * rate for rate in read_metrics(save, "lr").values())


def test_vectors_are_decayed_with_scope_all_and_spared_with_scope_matrices(settings):
    """Gradients alone move a norm by about the rate, 2e-3 per update; this decay takes up to a tenth."""
    means = {}
    for scope in ("all", "matrices"):
        run = settings(scope, optimizer={"weight_decay": 50.0, "weight_decay_scope": scope})
        train_on_ranks(run)
        means[scope] = final_norm_weights(run.checkpoint.save).mean().item()
    left = share_left_by_decay(run.checkpoint.save)
    assert left < 0.85
    assert means["all"] == pytest.approx(left, abs=0.02)
    assert means["matrices"] == pytest.approx(1.0, abs=0.02)


@pytest.mark.slow
def test_adam_puts_the_decay_into_the_gradient_and_adamw_does_not(settings):
    """Decoupled, the decay scales the weight; in the gradient, Adam divides its scale out again."""
    means = {}
    for optimizer in ("adam", "adamw"):
        run = settings(optimizer, optimizer={"optimizer": optimizer, "weight_decay": 50.0})
        train_on_ranks(run)
        means[optimizer] = final_norm_weights(run.checkpoint.save).mean().item()
    left = share_left_by_decay(run.checkpoint.save)
    assert means["adamw"] == pytest.approx(left, abs=0.02)
    assert left + 0.1 < means["adam"] < 1.0


@pytest.mark.slow
def test_clipping_limits_the_update_and_zero_switches_it_off(settings):
    curves = {}
    for clip in (0.0, 1e-12, 1e9):
        run = settings(f"clip {clip}", optimizer={"clip_grad": clip, "weight_decay": 0.0})
        train_on_ranks(run)
        curves[clip] = read_metrics(run.checkpoint.save)
    assert curves[0.0] == curves[1e9]
    # Adam divides the scale of the gradient out again, unless it falls below epsilon (1e-8), as here.
    still = curves[1e-12]
    assert max(still.values()) - min(still.values()) < 0.2 * (curves[0.0][1] - curves[0.0][ITERATIONS])


@pytest.mark.slow
def test_the_split_into_micro_batches_does_not_change_the_loss_curve(settings):
    curves = []
    for rows in (2, 4, 8):
        run = settings(f"{rows} rows", training={"micro_batch_size": rows})
        train_on_ranks(run)
        curves.append(read_metrics(run.checkpoint.save))
    assert largest_relative_gap(curves[0], curves[1]) <= LAYOUT_LOSS.gate
    assert largest_relative_gap(curves[0], curves[2]) <= LAYOUT_LOSS.gate


def test_time_limit_stops_and_saves_and_every_start_gets_further_although_a_validation_is_due(settings):
    run = settings(training={"exit_duration_in_mins": 0.0, "train_iters": 3, "eval_interval": 1})
    run = run.with_section("checkpoint", load=run.checkpoint.save)
    for iteration in (1, 2, 3):
        train_on_ranks(run)
        assert list_checkpoints(Path(run.checkpoint.save))[0].name == f"iter_{iteration:07}"
    assert list(read_metrics(run.checkpoint.save, "validation_loss")) == [1, 2, 3]
