"""GLUE on one model: the points of every grid, the start of some tasks from the best MNLI model, and the results.

OUTPUT/NAME/glue/TASK holds a task's ledger and best weights, OUTPUT/NAME/glue.json and .md the results. The same
command resumes after a kill and repeats interrupted runs. Commands for other tasks may run at the same time.

The head is the one that transformers gives a model's kind: for our exports a linear layer on the first token, then tanh
with dropout (neobert) or GELU without (eurobert), then the classes. A folder that was fine-tuned on MNLI keeps all but
the last layer.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import transformers
from datasets import Dataset
from transformers.modeling_layers import GenericForSequenceClassification

from megatron_neobert.errors import ConfigError, ConversionError, MissingInputError
from megatron_neobert.evaluation.fine_tune import PaperTrainer, Run, resolve_device, shortest_first
from megatron_neobert.evaluation.glue_tasks import (
    PAPER_TASKS,
    TASKS,
    GlueSplit,
    GlueTask,
    average,
    compute_scores,
    read_task,
)
from megatron_neobert.evaluation.ledger import Ledger, open_ledger
from megatron_neobert.evaluation.models import LoadOptions, fingerprint, load_model, load_tokenizer, longest_input
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
    write_results,
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
    tasks = sorted(choose_glue_tasks(options.tasks or PAPER_TASKS), key=list(TASKS).index)  # others may start from MNLI
    grids = {task: choose_grid(options, task) for task in tasks}
    options, folder = resolve_device(options), options.output / options.model.resolve().name
    model = fingerprint(options.model)
    followers = [task for task in tasks if TASKS[task].starts_from_mnli and not options.no_transfer]
    if followers and SOURCE not in tasks:
        _best_mnli(folder / "glue" / SOURCE, model)
    data = {
        task: {split: read_task(options.data_dir, TASKS[task], split).digest for split in TASKS[task].rows}
        for task in tasks
    }
    about = _check_model(options)
    for task in tasks:
        start = _best_mnli(folder / "glue" / SOURCE, model) if task in followers else options.model
        with open_ledger(folder / "glue" / task, options.device) as ledger:
            sweep = Sweep(
                run=GlueRun,
                task=task,
                grid=grids[task],
                model=model,
                start=start,
                data=data[task],
                metrics=TASKS[task].metrics,
                about={**about, "from_mnli": task in followers},
                options=options,
            )
            run_sweep(ledger, sweep, on_progress)
        write_results("glue", folder, options.model, average_tasks)
    return folder


def choose_grid(options: GlueOptions, task: str) -> Grid:
    """Return the grid of the options for a task.

    Raises:
        ConfigError: The paper has no best point for the task, and not all values are given.
    """
    best = GLUE_BEST_POINTS.get(TASKS[task].title)
    if options.grid != "best":
        return GRIDS[options.grid].replace(options)
    if best is not None:
        batch, rate, decay = best
        return Grid(batch_sizes=(batch,), learning_rates=(rate,), weight_decays=(decay,)).replace(options)
    if not (options.batch_size and options.learning_rate and options.weight_decay):
        raise ConfigError(
            f"--grid best: the paper has no best point for {task}; choose another --grid, or give --batch-size, "
            "--learning-rate and --weight-decay."
        )
    return GRIDS["paper"].replace(options)


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
    model = load_classifier(options.model, TASKS["cola"], LoadOptions(attention=options.attention))
    length = longest_input(model, load_tokenizer(options.model), at_most=options.max_length)
    return {"head": type(model).__name__, "longest_input_tokens": length}


# --- one run


@dataclass(frozen=True, kw_only=True)
class GlueRun(Run):
    """One point on one of GLUE's tasks."""

    def build_trainer(self) -> PaperTrainer:
        """Build the trainer; the head of its model is drawn from the point's seed."""
        task = TASKS[self.task]
        transformers.set_seed(self.point.seed)  # of the head
        model, tokenizer = load_classifier(self.start, task, self.loading), load_tokenizer(self.start)
        length = longest_input(model, tokenizer, at_most=self.options.max_length)

        def compute_metrics(evaluated: Any) -> dict[str, float]:
            return compute_scores(task, evaluated.predictions, evaluated.label_ids)

        return PaperTrainer(
            self,
            model,
            tokenizer,
            train=self.tokenize("train", tokenizer, length),
            validation=shortest_first(self.tokenize(task.validation[0], tokenizer, length)),
            collator=transformers.DataCollatorWithPadding(tokenizer),
            metric=task.metrics[0],
            compute=compute_metrics,
        )

    def collect_scores(self, trainer: PaperTrainer, best: dict[str, float]) -> dict[str, float]:
        """Return the task's metrics."""
        task = TASKS[self.task]
        scores = {name: best[name] for name in task.metrics if name in best}
        for split in task.validation[1:]:  # MNLI's other one, which chooses nothing
            length = longest_input(trainer.model, trainer.processing_class, at_most=self.options.max_length)
            found: Any = trainer.predict(shortest_first(self.tokenize(split, trainer.processing_class, length)))
            scores["accuracy_mismatched"] = compute_scores(task, found.predictions, found.label_ids)["accuracy"]
        return scores

    def average(self, scores: dict[str, float]) -> float:
        """Return the mean of the task's metrics."""
        return average(TASKS[self.task], scores)

    def tokenize(self, split: str, tokenizer: Any, length: int) -> Dataset:
        """Return one split of the task, as the model takes it."""
        rows = _read(self.options.data_dir, self.task, split).spread(self.options.limit)
        texts = map(list, zip(*rows.texts, strict=True))
        encoded = tokenizer(*texts, truncation=True, max_length=length)
        return Dataset.from_dict({**encoded, "labels": rows.labels})


@lru_cache(maxsize=4)  # the runs of one process use the same few
def _read(data_dir: Path, task: str, split: str) -> GlueSplit:
    return read_task(data_dir, TASKS[task], split)


def load_classifier(folder: Path, task: GlueTask, options: LoadOptions) -> Any:
    """Return the model for a task, its new layers drawn from torch's generator.

    Raises:
        ConversionError: transformers has no head for the model, or one that reads the last token.
        MissingInputError: There is no such folder.
    """
    model = load_model(
        folder,
        "AutoModelForSequenceClassification",
        options,
        num_labels=task.num_outputs,
        # Given, because the config of a fine-tuned folder may name another.
        problem_type="regression" if task.is_regression else "single_label_classification",
    )
    if isinstance(model, GenericForSequenceClassification):
        raise ConversionError(
            f"{folder}: {type(model).__name__} classifies by the last token, as causal models do, which says little of "
            "an encoder; evaluate the eurobert or neobert export of the same checkpoint."
        )
    return model


# --- results


def average_tasks(tasks: Mapping[str, Result], settings: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the average over the paper's tasks, or why it would mean nothing, and the tasks that are missing.

    Grids may differ: the paper's best points do.
    """
    eight = [task for task in PAPER_TASKS if task in tasks]  # without WNLI
    alike = [
        {name: settings[task][name] for name in ("protocol", "seeds")}
        | ({"start from MNLI": settings[task]["from_mnli"]} if TASKS[task].starts_from_mnli else {})
        for task in eight
    ]
    common = {name: value for each in alike for name, value in each.items()}
    different = sorted({name for each in alike for name, value in each.items() if value != common[name]})
    why_none = f"tasks differ in {', '.join(different)}" if different else None
    if len(eight) < len(PAPER_TASKS):
        why_none = f"{len(eight)} of {len(PAPER_TASKS)} tasks"
    return {
        "average": statistics.fmean(tasks[task]["score"]["mean"] for task in eight) if why_none is None else None,
        "no_average": why_none,
        "missing": [task for task in PAPER_TASKS if task not in tasks],
    }
