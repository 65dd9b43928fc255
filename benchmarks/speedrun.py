"""Print the table of a speedrun: the time that recipes take to reach a validation loss, from the logs of their runs.

    python benchmarks/speedrun.py speedrun_run/runs/laptop_plain speedrun_run/runs/laptop --target 5.25

Each folder has one run per seed. A recipe reaches the target if the mean of its last validation losses is below the
target with p < 0.01. The time is the time of training steps, including reading of data, without start, validation and
saving. The other recipes are compared with the first, seed by seed. p comes from an exact test: the share of all sign
patterns of the differences whose mean is at most the observed mean. Ten seeds give at least p = 0.001.
"""

import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, before an installed package

from benchmarks.shared import build_parser, report
from megatron_neobert.errors import DataError, run_command
from megatron_neobert.inspection.plot import RunLog, read_run

MOST_SEEDS = 16  # 65,536 sign patterns
PACKAGES = ("torch", "megatron-core", "numpy")


@dataclass(frozen=True)
class Finish:
    """Loss, tokens and time of a finished run."""

    loss: float  # last validation loss, nats per masked token
    tokens: float  # tokens trained on
    seconds: float  # training time


def main() -> None:
    """Print a line for each recipe, and for each comparison with the first recipe. Write both to --output if given."""
    parser = build_parser(__doc__)
    add = parser.add_argument
    add("recipes", nargs="+", type=Path, metavar="FOLDER", help="folder of a recipe, with one --save folder per seed")
    add("--target", type=float, required=True, help="validation loss to reach, in nats per masked token")
    arguments = parser.parse_args()
    recipes = {folder.name: read_recipe(folder) for folder in arguments.recipes}
    lines = [line_of(name, finishes, target=arguments.target) for name, finishes in recipes.items()]
    first, *later = recipes
    comparisons = [compare(first, recipes[first], name, recipes[name]) for name in later]
    report(arguments.output, PACKAGES, {"recipes": lines, "comparisons": comparisons})


def read_recipe(folder: Path) -> dict[str, Finish]:
    """Return the runs of a recipe as subfolder name -> result. Each subfolder of `folder` is a run.

    Raise DataError if there are no runs or more than 16, or if a log is empty or does not end with a validation.
    """
    runs = sorted(path for path in folder.glob("*") if path.is_dir())
    if not 1 <= len(runs) <= MOST_SEEDS:
        raise DataError(f"{folder} holds {len(runs)} runs; give a folder with 1 to {MOST_SEEDS} runs, one per seed.")
    return {path.name: finish_of(read_run(path, name=str(path))) for path in runs}


def finish_of(run: RunLog) -> Finish:
    """Return a run's last validation loss, tokens, and training seconds (without validation and saving).

    Raise DataError if the last iteration in the log has no validation loss.
    """
    last = max(run.values)
    if "validation_loss" not in run.values[last]:
        raise DataError(f"{run.name} has not been validated after iteration {last}; let it finish.")
    seconds, tokens = 0.0, 0.0
    for logged in run.values.values():
        if "consumed_tokens" in logged:
            # tokens_per_second excludes validation and saving.
            seconds += (logged["consumed_tokens"] - tokens) / logged["tokens_per_second"]
            tokens = logged["consumed_tokens"]
    return Finish(loss=run.values[last]["validation_loss"], tokens=tokens, seconds=seconds)


def line_of(name: str, finishes: dict[str, Finish], *, target: float) -> dict[str, Any]:
    """Return a row: number of runs, mean loss, tokens and seconds, and p-value of a test for mean loss < `target`."""
    losses = [finish.loss for finish in finishes.values()]
    seconds = [finish.seconds for finish in finishes.values()]
    return {
        "recipe": name,
        "seeds": len(losses),
        "loss": with_deviation(losses, digits=4),
        f"p (below {target:g})": f"{p_below([loss - target for loss in losses]):.4f}",
        "million tokens": f"{fmean(finish.tokens for finish in finishes.values()) / 1e6:.3f}",
        "seconds": with_deviation(seconds, digits=1),
    }


def with_deviation(values: Sequence[float], *, digits: int) -> str:
    """Format the mean and, if there are several values, the standard deviation, such as `5.12 ± 0.05`."""
    deviation = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{deviation}"


def compare(first: str, baseline: dict[str, Finish], name: str, finishes: dict[str, Finish]) -> dict[str, Any]:
    """Return a row of texts about the ratio of training seconds, `name` / `first`: geometric mean, extremes, p-value.

    Raise DataError if the run names of the two recipes differ.
    """
    if baseline.keys() != finishes.keys():
        names = f"{name} has the runs {', '.join(finishes)}, {first} has {', '.join(baseline)}"
        raise DataError(f"{names}; run the same seeds.")
    ratios = [finishes[seed].seconds / baseline[seed].seconds for seed in baseline]
    return {
        "compared": f"{name} : {first}",
        "time": f"{math.exp(fmean(map(math.log, ratios))):.3f}",
        "fastest": f"{min(ratios):.3f}",
        "slowest": f"{max(ratios):.3f}",
        "p (less time)": f"{p_below([math.log(ratio) for ratio in ratios]):.4f}",
    }


def p_below(differences: Sequence[float]) -> float:
    """Return the p-value of an exact one-sided sign-flip test that the mean difference is below 0."""
    observed = sum(differences) + 1e-12  # rounding must not exclude the observed pattern itself
    sums = [sum(signed) for signed in itertools.product(*((size, -size) for size in differences))]
    return sum(total <= observed for total in sums) / len(sums)


if __name__ == "__main__":
    run_command(main)
