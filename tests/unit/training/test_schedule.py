"""The learning rate that the plan states is that of Megatron's scheduler, and a run that ends too early warns."""

import pytest
import torch

from megatron_neobert.config.schedule import describe_schedule, rate_at, schedule_warnings
from megatron_neobert.config.schema import OptimizerConfig, Settings, TrainingConfig
from megatron_neobert.training.optimizer import build_scheduler

STYLES = [{"lr_decay_style": style} for style in ("cosine", "linear", "constant", "inverse-square-root")]
STYLES += [
    {"lr_decay_style": "WSD", "lr_wsd_decay_style": style, "lr_wsd_decay_iters": 8}
    for style in ("exponential", "linear", "cosine", "minus_sqrt")
]


def settings_of(train_iters: int, **optimizer: object) -> Settings:
    values = {"lr": 6e-4, "min_lr": 6e-5, "lr_warmup_iters": 2000, **optimizer}
    return Settings(optimizer=OptimizerConfig(**values), training=TrainingConfig(train_iters=train_iters))


@pytest.mark.parametrize("warmup", [0, 5])
@pytest.mark.parametrize("style", STYLES, ids=lambda style: "-".join(map(str, style.values())))
def test_the_rate_of_every_iteration_is_that_of_megatrons_scheduler(style, warmup):
    settings = settings_of(30, lr_warmup_iters=warmup, **style)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = build_scheduler(settings, optimizer)
    for iteration in range(1, 31):
        assert rate_at(settings, iteration) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12), iteration
        scheduler.step(increment=1)


@pytest.mark.parametrize(
    ("train_iters", "decay_iters", "line", "warning"),
    [
        (143_000, None, "warm-up to 6e-4 at 2,000, cosine to 6e-5 at 128,700, last rate 6e-5", None),
        (143_000, 900_000, "cosine to 6e-5 at 900,000, last rate 5.68e-4", "its decay does, at 900,000: the last of"),
        (1000, 900_000, "last rate 3e-4", "its warm-up does, at 2,000: the last of 1,000 iterations has the rate 3e-4"),
    ],
)
def test_a_shorter_run_keeps_its_decay_or_warns(train_iters, decay_iters, line, warning):
    settings = settings_of(train_iters, lr_decay_iters=decay_iters)
    assert line in describe_schedule(settings)
    warnings = list(schedule_warnings(settings))
    assert warnings == [] if warning is None else warning in warnings[0]
