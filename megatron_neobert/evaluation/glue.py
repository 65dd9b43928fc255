"""GLUE on one model: the points of every grid, the start of some tasks from the best MNLI model, and the results.

OUTPUT/NAME/glue/TASK holds a task's ledger and best weights, OUTPUT/NAME/glue.json and .md the results. The same
command resumes after a kill and repeats interrupted runs. Commands for other tasks may run at the same time.

The head is the one that transformers gives a model's kind: for our exports a linear layer on the first token, then tanh
with dropout (neobert) or GELU without (eurobert), then the classes. A folder that was fine-tuned on MNLI keeps all but
the last layer.
"""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_neobert.errors import ConfigError, MissingInputError
from megatron_neobert.evaluation.fine_tune import resolve_device
from megatron_neobert.evaluation.glue_tasks import TASKS, read_task
from megatron_neobert.evaluation.ledger import Ledger
from megatron_neobert.evaluation.models import LoadOptions, fingerprint, load_tokenizer, longest_input
from megatron_neobert.evaluation.options import GlueOptions, choose_glue_tasks
from megatron_neobert.evaluation.paper import GLUE_BEST_POINTS
from megatron_neobert.evaluation.sweep import (
    GRIDS,
    Grid,
    Progress,
    Result,
    Sweep,
    best_weights,
    last_sweep,
    run_sweep,
    show_progress,
)

SOURCE = "mnli"


def evaluate(options: GlueOptions, on_progress: Progress = show_progress) -> Path:
    """Run what is not finished, and write the results after every task, with those of earlier commands.

    Returns:
        The folder of the model's results.

    Raises:
        ConfigError, MissingInputError, DataError, ConversionError: Model, data or settings cannot be used; nothing
            has been run.
        OutputError: Another command is writing the output.
    """
    tasks = sorted(choose_glue_tasks(options.tasks or tuple(TASKS)), key=list(TASKS).index)  # MNLI is the first
    options, folder = resolve_device(options), options.output / options.model.resolve().name
    model = fingerprint(options.model)
    followers = [task for task in tasks if TASKS[task].starts_from_mnli and not options.no_transfer]
    if followers and SOURCE not in tasks:
        _best_mnli(folder / "glue" / SOURCE, model)
    data = {
        task: {split: read_task(options.data_dir, TASKS[task], split).digest for split in TASKS[task].splits}
        for task in tasks
    }
    about = _check_model(options)
    for task in tasks:
        start = _best_mnli(folder / "glue" / SOURCE, model) if task in followers else options.model
        sweep = Sweep(
            kind="glue",
            task=TASKS[task],
            grid=choose_grid(options, task),
            model=model,
            start=start,
            data=data[task],
            about={**about, "from_mnli": task in followers},
            options=options,
        )
        run_sweep(sweep, on_progress, average_tasks)
    return folder


def choose_grid(options: GlueOptions, task: str) -> Grid:
    """Return the grid of the options for a task."""
    if options.grid != "best":
        return GRIDS[options.grid].replace(options)
    batch, rate, decay = GLUE_BEST_POINTS[TASKS[task].title]
    return Grid(batch_sizes=(batch,), learning_rates=(rate,), weight_decays=(decay,)).replace(options)


def _best_mnli(folder: Path, model: str) -> Path:
    """Return the best weights of the MNLI sweep that was finished last.

    Raises:
        ConfigError: No sweep is finished.
        MissingInputError: The user has removed the weights.
    """
    ledger = Ledger(folder)
    if (line := last_sweep(ledger, model)) is None:
        raise ConfigError(
            "--tasks: the paper starts RTE, MRPC, STS-B and QNLI from the best MNLI model, and no sweep of MNLI is "
            f"finished for this model in {folder}. Add mnli to --tasks, or start from --model with --no-transfer."
        )
    if (weights := best_weights(ledger, line)) is None:
        raise MissingInputError(f"{folder}: the best weights are gone; remove the folder to run MNLI again.")
    return weights


def _check_model(options: GlueOptions) -> dict[str, Any]:
    """Load what the runs will load, once; return the head and the longest input that they will use."""
    model = TASKS["cola"].load(options.model, LoadOptions(attention=options.attention))
    length = longest_input(model, load_tokenizer(options.model), at_most=options.max_length)
    return {"head": type(model).__name__, "longest_input_tokens": length}


# --- results


def average_tasks(tasks: Mapping[str, Result], settings: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the average over the tasks, or why it would mean nothing, and the tasks that are missing.

    Grids may differ: the paper's best points do.
    """
    there = [task for task in TASKS if task in tasks]
    alike = [
        {name: settings[task][name] for name in ("protocol", "seeds")}
        | ({"start from MNLI": settings[task]["from_mnli"]} if TASKS[task].starts_from_mnli else {})
        for task in there
    ]
    common = {name: value for each in alike for name, value in each.items()}
    different = sorted({name for each in alike for name, value in each.items() if value != common[name]})
    why_none = f"tasks differ in {', '.join(different)}" if different else None
    if len(there) < len(TASKS):
        why_none = f"{len(there)} of {len(TASKS)} tasks"
    return {
        "average": statistics.fmean(tasks[task]["score"]["mean"] for task in there) if why_none is None else None,
        "no_average": why_none,
        "missing": [task for task in TASKS if task not in tasks],
    }
