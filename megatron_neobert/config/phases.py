"""Phases of a run: ranges of iterations that have their own settings, from `--phases`. Standard library only.

A run without --phases has one phase, with the settings of the run.
"""

import functools
from dataclasses import dataclass, replace
from operator import attrgetter

from megatron_neobert.config.schema import Settings

# Section -> settings that a phase can change.
_SECTIONS = {
    "data": ("data_path", "seq_length", "objective", "mask_prob", "mask_replacement"),
    "training": ("micro_batch_size", "global_batch_size"),
}

# Settings that the order of the documents depends on.
order_settings = attrgetter("data.share_of_data_path", "data.document_block_size", "training.seed")


@dataclass(frozen=True)
class Phase:
    """Settings of the iterations `first` to `last`, counted from 1."""

    number: int  # 0: the iterations before the first entry of --phases
    first: int
    last: int | None  # None: until the end of the run
    settings: Settings


@functools.lru_cache(maxsize=8)  # called in every iteration; resolving 100 phases takes 2.9 ms
def resolve_phases(settings: Settings) -> tuple[Phase, ...]:
    """Return a run's phases in order, with complete settings. If a phase changes the corpora, its seed is 1 higher."""
    current = settings.with_section("training", phases=())
    phases = [Phase(0, 1, None, current)]
    for number, change in enumerate(settings.training.phases, start=1):
        values = change.values
        if values.get("data_path", current.data.data_path) != current.data.data_path:
            # Another seed of order and masks, so that a corpus that is read again gives other batches.
            current = current.with_section("training", seed=current.training.seed + 1)
        for section, names in _SECTIONS.items():
            current = current.with_section(section, **{name: values[name] for name in names if name in values})
        phases[-1] = replace(phases[-1], last=change.after_iters)
        phases.append(Phase(number, change.after_iters + 1, None, current))
    return tuple(phases)


def fit_micro_batch(settings: Settings, *, world_size: int) -> Settings | None:
    """Lower the micro-batch size of a phase's resolved settings until it divides each rank's share of a global batch.

    With `loss_normalization` "micro_batch", the size is not changed, because the loss depends on it. Return None if the
    global batch cannot be divided by the data-parallel ranks and the micro-batches.
    """
    training, replicas = settings.training, settings.data_parallel_size(world_size)
    if not replicas or world_size % settings.parallel.ranks_per_model or training.global_batch_size % replicas:
        return None
    share, largest = training.global_batch_size // replicas, training.micro_batch_size
    sizes = [largest] if training.loss_normalization == "micro_batch" else range(min(largest, share), 0, -1)
    fitting = next((size for size in sizes if share % size == 0), None)
    return None if fitting is None else settings.with_section("training", micro_batch_size=fitting)


def fit_micro_batches(settings: Settings, *, world_size: int) -> Settings:
    """Apply `fit_micro_batch` to every phase, and return the settings. A phase that does not fit keeps its size."""
    resolved = [phase.settings for phase in resolve_phases(settings)]
    fitted = [fit_micro_batch(each, world_size=world_size) or each for each in resolved]
    sizes = [each.training.micro_batch_size for each in fitted]
    changes = tuple(
        replace(change, micro_batch_size=None if size == before else size)
        for change, before, size in zip(settings.training.phases, sizes, sizes[1:], strict=False)
    )
    return settings.with_section("training", micro_batch_size=sizes[0], phases=changes)


def phases_until(settings: Settings, iteration: int) -> list[Phase]:
    """Return the phases that have begun by an iteration (1-based). For iteration 0, return the first phase."""
    return [phase for phase in resolve_phases(settings) if phase.first <= max(iteration, 1)]


def phase_at(settings: Settings, iteration: int) -> Phase:
    """Return the phase that contains an iteration (1-based). Iteration 0 belongs to the first phase."""
    return phases_until(settings, iteration)[-1]
