"""The phases of a run: ranges of iterations, each with settings of its own. Standard library only.

A run without --phases has one phase, with the settings of the run.
"""

import functools
from dataclasses import dataclass, replace

from megatron_neobert.config.schema import Settings

# Sections of the settings that a phase can change.
_SECTIONS = {
    "data": ("data_path", "seq_length", "mask_prob", "mask_replacement"),
    "training": ("micro_batch_size", "global_batch_size"),
}


@dataclass(frozen=True)
class Phase:
    """Iterations `first` to `last`, counted from 1, that share their settings."""

    number: int  # 0: the iterations before the first entry of --phases
    first: int
    last: int | None  # None: the last iteration of the run
    settings: Settings


@functools.lru_cache(maxsize=8)  # called in every iteration; 100 phases took 2.9 ms
def resolve_phases(settings: Settings) -> tuple[Phase, ...]:
    """Return the phases of a run in their order.

    Each time --data-path changes, the seed of order and masks rises by one: documents that are read again are read in
    another order and with other masks.
    """
    current = settings.with_section("training", phases=())
    phases = [Phase(0, 1, None, current)]
    for number, change in enumerate(settings.training.phases, start=1):
        values = change.values
        if values.get("data_path", current.data.data_path) != current.data.data_path:
            current = current.with_section("training", seed=current.training.seed + 1)
        for section, names in _SECTIONS.items():
            current = current.with_section(section, **{name: values[name] for name in names if name in values})
        phases[-1] = replace(phases[-1], last=change.after_iters)
        phases.append(Phase(number, change.after_iters + 1, None, current))
    return tuple(phases)


def phase_at(settings: Settings, iteration: int) -> Phase:
    """Return the phase of an iteration, counted from 1; before the first iteration, the first phase."""
    return next(phase for phase in reversed(resolve_phases(settings)) if phase.first <= max(iteration, 1))
