"""Learning-rate schedules and weight decay follow their flags."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import read_metrics, train_on_ranks
from tests_tiny import ITERATIONS

from megatron_neobert.checkpoint.contents import StoredTensors

PEAK, FLOOR = 2e-3, 2e-4
WARMUP, STABLE, END = 2, 3, 5  # iterations; with WSD the rate is constant from WARMUP to STABLE


@pytest.mark.parametrize(
    ("style", "begin", "decay"),
    [
        pytest.param("cosine", WARMUP, lambda done: (1 + math.cos(math.pi * done)) / 2, marks=pytest.mark.slow),
        ("WSD minus_sqrt", STABLE, lambda done: 1 - done**0.5),
    ],
)
def test_learning_rate_warms_up_linearly_and_then_follows_its_style(settings, style, begin, decay):
    """The control is the formula of a linear decay after the warm-up."""
    style, _, wsd_style = style.partition(" ")
    wsd = {"lr_wsd_decay_style": wsd_style, "lr_wsd_decay_iters": END - STABLE} if wsd_style else {}
    run = settings(optimizer={"lr_decay_style": style, "lr_warmup_iters": WARMUP, "lr_decay_iters": END, **wsd})
    train_on_ranks(run)
    rates = list(read_metrics(run.checkpoint.save, "lr").values())  # the first update has the rate of step 0
    assert rates == pytest.approx([rate(step, begin, decay) for step in range(ITERATIONS)])
    linear = [rate(step, WARMUP, lambda done: 1 - done) for step in range(ITERATIONS)]
    assert rates != pytest.approx(linear)


def rate(step: int, begin: int, decay: Callable[[float], float]) -> float:
    """Return the learning rate after `step` updates, with a decay that starts at `begin`."""
    if step < WARMUP:
        return PEAK * step / WARMUP
    return FLOOR + (PEAK - FLOOR) * decay(min(1.0, max(0.0, (step - begin) / (END - begin))))


def test_weight_decay_applies_to_vectors_only_with_scope_all(settings):
    """An update without decay changes a norm weight by about 2e-3, and this decay by up to a tenth."""
    means = {}
    for scope in ("all", "matrices"):
        run = settings(scope, optimizer={"weight_decay": 50.0, "weight_decay_scope": scope})
        train_on_ranks(run)
        stored = StoredTensors(Path(run.checkpoint.save) / f"iter_{ITERATIONS:07d}")
        means[scope] = stored.read_whole("decoder.final_layernorm.weight").mean().item()
    # A weight of 1 after all updates of the decay alone.
    decayed = math.prod(1 - 50 * rate for rate in read_metrics(run.checkpoint.save, "lr").values())
    assert decayed < 0.85
    assert means["all"] == pytest.approx(decayed, abs=0.02)
    assert means["matrices"] == pytest.approx(1.0, abs=0.02)
