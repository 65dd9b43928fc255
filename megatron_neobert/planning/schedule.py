"""The learning rate of an iteration, and its curve as text."""

import math
from collections.abc import Sequence

from megatron_neobert.config.schema import Settings

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def learning_rate(settings: Settings, iteration: int) -> float:
    """Behind `iteration` updates; what Megatron's scheduler gives (tests/unit/planning/test_plan.py compares them)."""
    optimizer, end = settings.optimizer, settings.lr_decay_end
    if optimizer.lr_warmup_iters > 0 and iteration <= optimizer.lr_warmup_iters:
        return optimizer.lr * iteration / optimizer.lr_warmup_iters
    if optimizer.lr_decay_style == "constant":
        return optimizer.lr
    done = min(1.0, (iteration - optimizer.lr_warmup_iters) / (end - optimizer.lr_warmup_iters))
    left = 1 - done if optimizer.lr_decay_style == "linear" else (1 + math.cos(math.pi * done)) / 2
    return optimizer.min_lr + (optimizer.lr - optimizer.min_lr) * left


def draw_curve(values: Sequence[float], *, height: int, unicode: bool) -> list[str]:
    """Columns from 0 up to each value, the largest `height` lines high; ASCII rounds to whole lines.

    Args:
        values: At least one above 0.
    """
    eighths = [round(8 * height * value / max(values)) for value in values]
    lines = []
    for line in reversed(range(height)):
        cells = [min(8, max(0, column - 8 * line)) for column in eighths]
        lines.append("".join(_EIGHTHS[cell] if unicode else " #"[cell >= 4] for cell in cells).rstrip())
    return lines
