"""Schedule, weight decay, clipping and accumulation do what their flags say."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import read_metrics, train_on_ranks
from tests_tiny import ITERATIONS

from megatron_neobert.checkpoint.contents import StoredTensors

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
    """Against a formula, which that of a linear decay from the warm-up on is not."""
    style, _, wsd_style = style.partition(" ")
    wsd = {"lr_wsd_decay_style": wsd_style, "lr_wsd_decay_iters": END - STABLE} if wsd_style else {}
    run = settings(optimizer={"lr_decay_style": style, "lr_warmup_iters": WARMUP, "lr_decay_iters": END, **wsd})
    train_on_ranks(run)
    rates = list(read_metrics(run.checkpoint.save, "lr").values())  # the first update has the rate of step 0
    assert rates == pytest.approx([rate(step, begin, share_left) for step in range(ITERATIONS)])
    linear = [rate(step, WARMUP, lambda done: 1 - done) for step in range(ITERATIONS)]
    assert (rates == pytest.approx(linear)) == (style == "linear")


def rate(step: int, begin: int, share_left: Callable[[float], float]) -> float:
    """The rate of an update, of which there have been `step`, with a decay from `begin` on."""
    if step < WARMUP:
        return PEAK * step / WARMUP
    return FLOOR + (PEAK - FLOOR) * share_left(min(1.0, max(0.0, (step - begin) / (END - begin))))


def test_vectors_are_decayed_with_scope_all_and_spared_with_scope_matrices(settings):
    """Gradients alone move a norm by about the rate, 2e-3 per update; this decay takes up to a tenth."""
    means = {}
    for scope in ("all", "matrices"):
        run = settings(scope, optimizer={"weight_decay": 50.0, "weight_decay_scope": scope})
        train_on_ranks(run)
        stored = StoredTensors(Path(run.checkpoint.save) / f"iter_{ITERATIONS:07d}")
        means[scope] = stored.read_whole("decoder.final_layernorm.weight").mean().item()
    # What a decay of 50 alone would leave of a weight.
    left = math.prod(1 - 50 * rate for rate in read_metrics(run.checkpoint.save, "lr").values())
    assert left < 0.85
    assert means["all"] == pytest.approx(left, abs=0.02)
    assert means["matrices"] == pytest.approx(1.0, abs=0.02)
