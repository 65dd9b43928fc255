"""Print the table of a speedrun: the time that recipes take to a validation loss, from the logs of their runs.

    python benchmarks/speedrun.py speedrun_run/runs/laptop_plain speedrun_run/runs/laptop --target 5.25

Each folder holds a run for each seed. A recipe reaches the target if the mean of its last validation losses lies below
it with p < 0.01. Its time is that of training alone: reading data, forward, backward and update; neither start, nor
validation, nor saving. The first recipe is what the others are compared with, seed by seed. p is exact: the differences
get all patterns of signs, and p is the share of those whose mean is as low as theirs; of ten seeds 0.001 at least.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout before any that is installed

from benchmarks.shared import describe_machine, print_table, write_figures
from megatron_neobert.cli import Parser
from megatron_neobert.errors import DataError, run_command
from megatron_neobert.inspection.run_log import RunLog, read_run

MOST_SEEDS = 16  # 65,536 patterns of signs
PACKAGES = ("torch", "megatron-core", "numpy")


@dataclass(frozen=True)
class Finish:
    """The end of one run."""

    loss: float  # nats per masked token, of the last validation
    tokens: float  # that training has seen
    seconds: float  # of training


def main() -> None:
    """Print a line for each recipe, and the seconds that it takes less than the first."""
    arguments = _parse()
    recipes = {folder.name: read_recipe(folder) for folder in arguments.recipes}
    machine = describe_machine(PACKAGES)
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    lines = [line_of(name, finishes, target=arguments.target) for name, finishes in recipes.items()]
    print_table(lines)
    first, *others = recipes
    comparisons = [compare(first, recipes[first], name, recipes[name]) for name in others]
    if comparisons:
        print_table(comparisons)
    write_figures(arguments.output, {"machine": machine, "recipes": lines, "comparisons": comparisons})


def read_recipe(folder: Path) -> dict[str, Finish]:
    """Return the ends of all runs of a recipe, by the name of their folder.

    Raises:
        MissingInputError: A folder holds no log.
        DataError: There are no runs, or too many for an exact test, or one has not validated after its last iteration.
    """
    runs = sorted(path for path in folder.glob("*") if path.is_dir())
    if not 2 <= len(runs) <= MOST_SEEDS:
        raise DataError(f"{folder} holds {len(runs)} runs; give a folder with 2 to {MOST_SEEDS}, one for each seed.")
    return {path.name: finish_of(read_run(path, name=str(path))) for path in runs}


def finish_of(run: RunLog) -> Finish:
    """Return the end of a run; its seconds are tokens by tokens/s, which counts neither validation nor saving."""
    last = max(run.values)
    if "validation_loss" not in run.values[last]:
        raise DataError(f"{run.name} has not been validated after iteration {last}; let it finish.")
    seconds, before = 0.0, 0.0
    for logged in run.values.values():
        if "consumed_tokens" in logged:
            seconds += (logged["consumed_tokens"] - before) / logged["tokens_per_second"]
            before = logged["consumed_tokens"]
    return Finish(loss=run.values[last]["validation_loss"], tokens=before, seconds=seconds)


def line_of(name: str, finishes: dict[str, Finish], *, target: float) -> dict[str, Any]:
    """Return the line of a recipe: whether it reaches the target, and in which time."""
    losses = [finish.loss for finish in finishes.values()]
    seconds = [finish.seconds for finish in finishes.values()]
    return {
        "recipe": name,
        "seeds": len(losses),
        "loss": f"{fmean(losses):.4f} ± {stdev(losses):.4f}",
        f"p (below {target:g})": f"{p_below([loss - target for loss in losses]):.4f}",
        "million tokens": f"{fmean(finish.tokens for finish in finishes.values()) / 1e6:.3f}",
        "seconds": f"{fmean(seconds):.1f} ± {stdev(seconds):.1f}",
    }


def compare(first: str, plain: dict[str, Finish], name: str, other: dict[str, Finish]) -> dict[str, Any]:
    """Return how much less time a recipe takes than the first, seed by seed.

    Raises:
        DataError: They were not run with the same seeds.
    """
    if plain.keys() != other.keys():
        raise DataError(f"{name} has the runs {', '.join(other)}, {first} has {', '.join(plain)}; run the same seeds.")
    ratios = [other[seed].seconds / plain[seed].seconds for seed in plain]
    return {
        "compared": f"{name} : {first}",
        "time": f"{math.exp(fmean(map(math.log, ratios))):.3f}",
        "fastest": f"{min(ratios):.3f}",
        "slowest": f"{max(ratios):.3f}",
        "p (less time)": f"{p_below([math.log(ratio) for ratio in ratios]):.4f}",
    }


def p_below(differences: Sequence[float]) -> float:
    """Return p of an exact one-sided test that the mean is below 0: the share of sign patterns with no higher mean."""
    magnitudes = [abs(difference) for difference in differences]
    found = sum(differences)
    patterns = itertools.product((-1, 1), repeat=len(magnitudes))
    sums = [sum(sign * size for sign, size in zip(signs, magnitudes, strict=True)) for signs in patterns]
    return sum(one <= found + 1e-12 for one in sums) / len(sums)  # rounding apart, the found one is among them


def _parse() -> argparse.Namespace:
    parser = Parser((__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("recipes", nargs="+", type=Path, metavar="FOLDER", help="folder of a recipe, with the --save of each seed")
    add("--target", type=float, required=True, help="validation loss in nats per masked token")
    add("--output", type=Path, metavar="FILE", help="the same figures as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    run_command(main)
