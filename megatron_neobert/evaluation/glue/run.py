"""GLUE on one model: the points of every grid, the start of some tasks from the best MNLI model, and the results.

OUTPUT/NAME/glue/TASK holds a task's runs and best weights, OUTPUT/NAME/glue.json, .csv and .md the results. The same
command resumes after a kill; the runs that were under way then start again. Commands for other tasks may run meanwhile.
Source of the best points: arXiv 2502.19587 table 6, of NeoBERT-4096.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import transformers
from datasets import Dataset

from megatron_neobert.errors import ConfigError, MissingInputError
from megatron_neobert.evaluation.encoders import LoadOptions, fingerprint, load_tokenizer, longest_input
from megatron_neobert.evaluation.fine_tuning.settings import GRIDS, Grid
from megatron_neobert.evaluation.fine_tuning.study import BEST, FineTuning, Progress, Result, save_result, summarise
from megatron_neobert.evaluation.fine_tuning.trainer import PaperTrainer, Run, shortest_first
from megatron_neobert.evaluation.glue.predictions import average, compute_scores, load_classifier, read_test_sets
from megatron_neobert.evaluation.glue.results import write_results
from megatron_neobert.evaluation.glue.tasks import TASKS, check_rows, read_split
from megatron_neobert.evaluation.records import hold
from megatron_neobert.evaluation.reported_numbers import GLUE_BEST_POINTS


@dataclass(frozen=True, kw_only=True)
class GlueRun(Run):
    """One point on one of GLUE's tasks."""

    def build_trainer(self) -> PaperTrainer:
        """Its head is drawn from the point's seed."""
        task, protocol = TASKS[self.task], self.protocol
        transformers.set_seed(self.point.seed)  # of the head
        options = LoadOptions(device=protocol.device, attention=protocol.attention)
        model, tokenizer = load_classifier(self.start, task, options), load_tokenizer(self.start)
        length = longest_input(model, tokenizer, at_most=protocol.max_length)

        def compute_metrics(evaluated: Any) -> dict[str, float]:
            return compute_scores(task, evaluated.predictions, evaluated.label_ids)

        return PaperTrainer(
            self,
            model,
            tokenizer,
            train=tokenize_split(self, "train", tokenizer, length),
            validation=shortest_first(tokenize_split(self, task.validation[0], tokenizer, length)),
            collator=transformers.DataCollatorWithPadding(tokenizer),
            metric=task.metrics[0],
            compute=compute_metrics,
        )

    def collect_scores(self, trainer: PaperTrainer, best: dict[str, float]) -> dict[str, float]:
        """The task's metrics."""
        task = TASKS[self.task]
        scores = {name: best[name] for name in task.metrics if name in best}
        for split in task.validation[1:]:  # MNLI's other one, which chooses nothing
            length = longest_input(trainer.model, trainer.processing_class, at_most=self.protocol.max_length)
            rows = shortest_first(tokenize_split(self, split, trainer.processing_class, length))
            found: Any = trainer.predict(rows)
            scores["accuracy_mismatched"] = compute_scores(task, found.predictions, found.label_ids)["accuracy"]
        return scores

    def average(self, scores: dict[str, float]) -> float:
        """The mean of the task's metrics."""
        return average(TASKS[self.task], scores)


def tokenize_split(run: Run, split: str, tokenizer: Any, length: int) -> Dataset:
    """One split of the run's task, as the model takes it."""
    rows = _read(run.data_dir, run.task, split).spread(run.protocol.limit)
    encoded = tokenizer(*(list(column) for column in zip(*rows.texts, strict=True)), truncation=True, max_length=length)
    return Dataset.from_dict({**encoded, "labels": rows.labels})


@lru_cache(maxsize=4)  # the runs of one process use the same few
def _read(data_dir: Path, task: str, split: str) -> Any:
    return read_split(data_dir, TASKS[task], split)


def choose_grid(name: str, task: str, **replaced: Sequence[Any] | None) -> Grid:
    """The grid of that name for a task; `replaced` holds values for fields of Grid, or None.

    Raises:
        ConfigError: The paper has no best point for the task, and not all values are given.
    """
    given = {field: tuple(values) for field, values in replaced.items() if values}
    best = GLUE_BEST_POINTS.get(TASKS[task].title)
    if name == "best" and best is not None:
        batch, rate, decay = best
        return replace(Grid(batch_sizes=(batch,), learning_rates=(rate,), weight_decays=(decay,)), **given)
    if name == "best" and len(given) < len(fields(Grid)):
        raise ConfigError(
            f"--grid best: the paper has no best point for {task}; choose another --grid, or give --batch-size, "
            "--learning-rate and --weight-decay."
        )
    return replace(GRIDS["paper" if name == "best" else name], **given)


SOURCE = "mnli"


@dataclass(frozen=True, kw_only=True)
class GlueEvaluation(FineTuning):
    """What is asked for.

    `transfer_from` is a folder with a model fine-tuned on MNLI, "mnli" for the best one of this evaluation, or None.
    """

    kind, run = "glue", GlueRun
    grids: Mapping[str, Grid]  # by task
    transfer_from: str | Path | None
    predict: bool = False  # the test sets will be asked for

    @property
    def tasks(self) -> list[str]:
        """MNLI first, because others may start from it."""
        return sorted(self.grids, key=list(TASKS).index)

    def starts_elsewhere(self, task: str) -> bool:
        return self.transfer_from is not None and TASKS[task].starts_from_mnli


def evaluate(evaluation: GlueEvaluation, on_progress: Progress) -> None:
    """Runs what has not been run, and writes the results after every task, with those of earlier commands.

    Raises:
        ConfigError, MissingInputError, DataError, ConversionError: Of model or data, before anything is run.
        OutputError: The output is of other settings, or another command is writing it.
    """
    _check_transfer(evaluation)
    rows = _count_rows(evaluation)
    head = _check_model(evaluation)
    model = fingerprint(evaluation.model)
    for task in evaluation.tasks:
        with hold(evaluation.task_folder(task) / "lock"):
            result, settings = _evaluate_task(evaluation, task, head, rows[task], on_progress)
            save_result(evaluation.task_folder(task), result, model=model, settings=settings)
        device = evaluation.protocol.device
        write_results(evaluation.folder, evaluation.model, fingerprint=model, device=device)


def _evaluate_task(
    evaluation: GlueEvaluation, task: str, head: dict[str, Any], rows: dict[str, int], on_progress: Progress
) -> tuple[Result, dict[str, Any]]:
    """The result, and the settings that it was found with."""
    source = evaluation.transfer_from if evaluation.starts_elsewhere(task) else evaluation.model
    start = source if isinstance(source, Path) else best_model(evaluation, SOURCE)
    study, outcomes, settings = evaluation.run_task(
        task, evaluation.grids[task], start=start, rows=rows, on_progress=on_progress
    )
    result = summarise(outcomes, TASKS[task].metrics, kept=study.kept)
    return result | {"from_mnli": start != evaluation.model}, settings | head


def best_model(evaluation: GlueEvaluation, task: str) -> Path:
    """Folder of the best weights of a task that has been run.

    Raises:
        MissingInputError: Somebody has removed it.
    """
    folder = evaluation.task_folder(task)
    if not (folder / BEST).is_dir():
        raise MissingInputError(f"{folder / BEST}: the best weights are gone; remove {folder} to run {task} again.")
    return folder / BEST


def _check_transfer(evaluation: GlueEvaluation) -> None:
    followers = [task for task in evaluation.tasks if evaluation.starts_elsewhere(task)]
    if evaluation.transfer_from != SOURCE or not followers or SOURCE in evaluation.grids:
        return
    if not (evaluation.task_folder(SOURCE) / BEST).is_dir():
        raise ConfigError(
            f"--tasks {' '.join(followers)}: the paper starts them from the best MNLI model, and MNLI has not been run "
            f"in {evaluation.folder}. Add mnli to --tasks, name a model with --transfer-from DIR, or start from the "
            "pre-trained one with --no-transfer."
        )


def _count_rows(evaluation: GlueEvaluation) -> dict[str, dict[str, int]]:
    """By task and split, of files that can be read; warns where they are not the benchmark's."""
    rows: dict[str, dict[str, int]] = {}
    for name in evaluation.tasks:
        task = TASKS[name]
        for split in ("train", *task.validation):
            count = len(read_split(evaluation.data_dir, task, split).texts)
            check_rows(task, split, count)
            rows.setdefault(name, {})[split] = count
        if evaluation.predict:  # not part of the rows that results depend on
            for _ in read_test_sets(name, evaluation.data_dir):
                pass
    return rows


def _check_model(evaluation: GlueEvaluation) -> dict[str, Any]:
    """Loads what the runs will load, once, and gives what they will use."""
    starts = {evaluation.model}
    if isinstance(evaluation.transfer_from, Path):
        starts.add(evaluation.transfer_from)
    for start in starts:
        model = load_classifier(start, TASKS["cola"], LoadOptions(attention=evaluation.protocol.attention))
        length = longest_input(model, load_tokenizer(start), at_most=evaluation.protocol.max_length)
    return {"head": type(model).__name__, "longest_input_tokens": length}
