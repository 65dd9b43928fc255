"""The learning rate of an iteration, as Megatron's scheduler computes it, without torch: for the plan and warnings."""

import math
from collections.abc import Iterator

from megatron_neobert.config.schema import Settings


def rate_at(settings: Settings, iteration: int) -> float:
    """Return the learning rate of an iteration (1-based).

    Source: megatron-core 0.16.1 optimizer_param_scheduler.py, get_lr; the test compares all styles with it.
    """
    optimizer, end, done = settings.optimizer, settings.lr_decay_end, iteration - 1
    warmup, style = optimizer.lr_warmup_iters, optimizer.lr_decay_style
    if warmup and done <= warmup:
        return optimizer.lr * done / warmup
    if style == "constant":
        return optimizer.lr
    if done > end:
        return optimizer.min_lr
    if style == "inverse-square-root":
        return max(optimizer.min_lr, optimizer.lr * math.sqrt(max(warmup, 1) / max(done, 1)))
    begin = end - optimizer.lr_wsd_decay_iters if style == "WSD" and optimizer.lr_wsd_decay_iters else warmup
    share = max(0.0, (done - begin) / (end - begin))  # of the decay
    remaining = {
        "linear": 1 - share,
        "cosine": (math.cos(math.pi * share) + 1) / 2,
        "exponential": 2 * 0.5**share - 1,
        "minus_sqrt": 1 - math.sqrt(share),
    }[optimizer.lr_wsd_decay_style if style == "WSD" else style]
    return optimizer.min_lr + remaining * (optimizer.lr - optimizer.min_lr)


def describe_schedule(settings: Settings) -> str:
    """Format the schedule on one line: "warm-up to 6e-4 at 2,000, cosine to 6e-5 at 900,000, last rate 6e-5"."""
    optimizer, last = settings.optimizer, settings.training.train_iters
    style, end = optimizer.lr_decay_style, settings.lr_decay_end
    warmup = f"warm-up to {_rate(optimizer.lr)} at {optimizer.lr_warmup_iters:,}"
    decay = "constant" if style == "constant" else f"{style} to {_rate(optimizer.min_lr)} at {end:,}"
    return f"{warmup}, {decay}, last rate {_rate(rate_at(settings, last))}"


def schedule_warnings(settings: Settings) -> Iterator[str]:
    """Yield a warning if the run ends before its warm-up or decay ends."""
    optimizer, last, end = settings.optimizer, settings.training.train_iters, settings.lr_decay_end
    rate = f"the last of {last:,} iterations has the rate {_rate(rate_at(settings, last))}"
    if optimizer.lr_warmup_iters > last:
        warmup = f"{optimizer.lr_warmup_iters:,}"
        yield f"warning: the run ends before its warm-up does, at {warmup}: {rate}; lower --lr-warmup-iters"
    elif end > last and optimizer.lr_decay_style != "constant":
        yield f"warning: the run ends before its decay does, at {end:,}: {rate}; remove --lr-decay-iters, or lower it"


def _rate(rate: float) -> str:
    """Format a learning rate with at most three digits, such as 6e-4."""
    digits, exponent = f"{rate:.2e}".split("e")
    return f"{float(digits):g}e{int(exponent)}" if rate else "0"
