"""The settings of each iteration, out of those of the run and its phases. Standard library only.

A run without phases has one stretch of iterations, and nothing here changes its settings.
"""

import functools
from typing import NamedTuple

from megatron_neobert.config.schema import Settings

# Where the settings of a phase live.
_HOMES = {
    "data": ("data_path", "seq_length", "mask_prob", "mask_replacement"),
    "training": ("micro_batch_size", "global_batch_size"),
}


class Stretch(NamedTuple):
    """Iterations first to last, counted from 1, that share their settings."""

    first: int
    last: int | None  # None: that of the run
    settings: Settings


def settings_at(settings: Settings, iteration: int) -> Settings:
    """Those of one iteration, counted from 1: of a run that has them all along, without phases."""
    return stretch_of(settings, iteration).settings


def stretch_of(settings: Settings, iteration: int) -> Stretch:
    """The stretch that an iteration lies in; before the first iteration, the first."""
    return [one for one in stretches(settings) if one.first <= max(iteration, 1)][-1]


@functools.lru_cache(maxsize=8)  # called in every iteration; 100 phases took 2.9 ms
def stretches(settings: Settings) -> tuple[Stretch, ...]:
    """All of them, in their order.

    Each time --data-path changes, the seed of order and masks rises by one: documents that come again come in another
    order and with other masks.
    """
    phases = settings.training.phases
    current = settings.with_section("training", phases=())
    found = [Stretch(1, None, current)]
    for phase in phases:
        changes = phase.changes
        path = changes.get("data_path")
        if path is not None and path != current.data.data_path:
            current = current.with_section("training", seed=current.training.seed + 1)
        for section, names in _HOMES.items():
            current = current.with_section(section, **{name: changes[name] for name in names if name in changes})
        found[-1] = found[-1]._replace(last=phase.after_iters)
        found.append(Stretch(phase.after_iters + 1, None, current))
    return tuple(found)
