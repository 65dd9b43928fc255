"""Which points of a grid are run: the paper's, its best ones, the ablations', or a user's.

Source: arXiv 2502.19587 table 6 (grid, and best points of NeoBERT-4096); for the ablations section 4, which does not
state their weight decay.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_neobert.errors import ConfigError
from megatron_neobert.evaluation.glue.tasks import TASKS
from megatron_neobert.evaluation.glue.training import Point
from megatron_neobert.evaluation.reported_numbers import GLUE_BEST_POINTS


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Every combination is a point."""

    batch_sizes: tuple[int, ...]
    learning_rates: tuple[float, ...]
    weight_decays: tuple[float, ...]

    def points(self, seeds: Sequence[int]) -> list[Point]:
        combinations = itertools.product(self.batch_sizes, self.learning_rates, self.weight_decays, seeds)
        return [
            Point(batch_size=batch, learning_rate=rate, weight_decay=decay, seed=seed)
            for batch, rate, decay, seed in combinations
        ]


GRIDS = {
    "paper": Grid(
        batch_sizes=(2, 4, 8, 16, 32),
        learning_rates=(5e-6, 6e-6, 8e-6, 1e-5, 2e-5, 3e-5),
        weight_decays=(1e-2, 1e-5),
    ),
    "small": Grid(batch_sizes=(16, 32), learning_rates=(1e-5, 2e-5, 3e-5), weight_decays=(1e-5,)),
}
BEST_OF = "NeoBERT-4096"


def choose_grid(
    name: str,
    task: str,
    *,
    batch_sizes: Sequence[int] | None = None,
    learning_rates: Sequence[float] | None = None,
    weight_decays: Sequence[float] | None = None,
) -> Grid:
    """The grid of that name for a task; what is given replaces its values.

    Raises:
        ConfigError: The paper has no best point for the task, and not all values are given.
    """
    if name != "best":
        grid = GRIDS[name]
    elif (best := GLUE_BEST_POINTS[BEST_OF].get(TASKS[task].title)) is not None:
        batch, rate, decay = best
        grid = Grid(batch_sizes=(batch,), learning_rates=(rate,), weight_decays=(decay,))
    elif batch_sizes and learning_rates and weight_decays:
        grid = GRIDS["paper"]  # all of it is replaced
    else:
        raise ConfigError(
            f"--grid best: the paper has no best point for {task}; choose another --grid, or give --batch-size, "
            "--learning-rate and --weight-decay."
        )
    return replace(
        grid,
        batch_sizes=tuple(batch_sizes or grid.batch_sizes),
        learning_rates=tuple(learning_rates or grid.learning_rates),
        weight_decays=tuple(weight_decays or grid.weight_decays),
    )
