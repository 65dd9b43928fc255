"""GLUE on one model: the points of every grid, the start of some tasks from the best MNLI model, and the results.

OUTPUT/NAME/glue/TASK holds a task's ledger and best weights, OUTPUT/NAME/glue.json and .md the results. The same
command resumes after a kill and repeats interrupted runs. Commands for other tasks may run at the same time.

The head is the one that transformers gives a model's kind: for our exports a linear layer on the first token, then tanh
with dropout (neobert) or GELU without (eurobert), then the classes. A folder that was fine-tuned on MNLI keeps all but
the last layer.

Names of tasks and columns are those of the data set on the Hub. WNLI is left out, as in the paper. The first metric
chooses models, all of them are averaged for the table. They are scikit-learn's and SciPy's as fractions of 1, and
never NaN, which would win or lose every comparison by accident: a metric that is not defined counts as 0, with a
warning.
Source: Wang et al. 2019, tables 1 and 5; arXiv 2502.19587 appendix C.
"""

import statistics
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from datasets import Dataset
from numpy.typing import NDArray
from scipy import stats
from sklearn import metrics
from transformers.modeling_layers import GenericForSequenceClassification

from megatron_neobert.errors import ConfigError, ConversionError, DataError, MissingInputError
from megatron_neobert.evaluation.data import columns_of, digest_of, read_split, spread
from megatron_neobert.evaluation.fine_tune import Rows, Task, resolve_device, shortest_first
from megatron_neobert.evaluation.ledger import Ledger
from megatron_neobert.evaluation.models import LoadOptions, fingerprint, load_model, load_tokenizer, longest_input
from megatron_neobert.evaluation.options import FETCH_GLUE, FineTuneOptions, GlueOptions, choose_glue_tasks
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
PAIR, HYPOTHESIS = ("sentence1", "sentence2"), ("premise", "hypothesis")
BINARY, ENTAILED = ("0", "1"), ("entailment", "not_entailment")


@dataclass(frozen=True)
class GlueTask(Task):
    """One task."""

    title: str  # of folders and submissions, as the benchmark writes it
    texts: tuple[str, ...]  # names of their columns
    labels: tuple[str, ...]  # words by class; none: a number from 0 to 5
    rows: tuple[int, ...]  # by split
    starts_from_mnli: bool = False

    collator = transformers.DataCollatorWithPadding
    eval_strategy = "steps"
    name_in_last_split = "{}_mismatched"

    @property
    def is_regression(self) -> bool:
        return not self.labels

    def load(self, folder: Path, options: LoadOptions) -> Any:
        """Return the model of a folder; layers that the folder lacks are drawn from torch's generator.

        Raises:
            ConversionError: transformers has no head for the model, or one that reads the last token.
            MissingInputError: There is no such folder.
        """
        model = load_model(
            folder,
            "AutoModelForSequenceClassification",
            options,
            num_labels=len(self.labels) or 1,
            # Given, because the config of a fine-tuned folder may name another.
            problem_type="regression" if self.is_regression else "single_label_classification",
        )
        if isinstance(model, GenericForSequenceClassification):
            raise ConversionError(
                f"{folder}: {type(model).__name__} classifies by the last token, as causal models do, which says "
                "little of an encoder; evaluate the eurobert or neobert export of the same checkpoint."
            )
        return model

    def encode(self, split: str, options: FineTuneOptions, tokenizer: Any, length: int) -> Rows:
        """Return a split, truncated after `length` tokens."""
        rows = _read(options.data_dir, self, split).spread(options.limit)
        texts = map(list, zip(*rows.texts, strict=True))
        data = Dataset.from_dict({**tokenizer(*texts, truncation=True, max_length=length), "labels": rows.labels})
        return Rows(
            data if split == "train" else shortest_first(data),
            lambda evaluated: compute_scores(self, evaluated.predictions, evaluated.label_ids),
        )


_ACCURACY, _WITH_F1, _CORRELATED = ("accuracy",), ("accuracy", "f1"), ("pearson", "spearman")
_SPLITS, _OF_MNLI = ("train", "validation"), ("train", "validation_matched", "validation_mismatched")
_CLASSES_OF_MNLI = ("entailment", "neutral", "contradiction")
_BOTH_ACCURACIES, _FOLLOWS = ("accuracy", "accuracy_mismatched"), True
_QNLI_TEXTS, _QQP_TEXTS = ("question", "sentence"), ("question1", "question2")
_TASKS = (  # in the order of the paper's table
    GlueTask("mnli", _OF_MNLI, _BOTH_ACCURACIES, "MNLI", HYPOTHESIS, _CLASSES_OF_MNLI, (392_702, 9_815, 9_832)),
    GlueTask("qnli", _SPLITS, _ACCURACY, "QNLI", _QNLI_TEXTS, ENTAILED, (104_743, 5_463), _FOLLOWS),
    GlueTask("qqp", _SPLITS, _WITH_F1, "QQP", _QQP_TEXTS, BINARY, (363_846, 40_430)),
    GlueTask("rte", _SPLITS, _ACCURACY, "RTE", PAIR, ENTAILED, (2_490, 277), _FOLLOWS),
    GlueTask("sst2", _SPLITS, _ACCURACY, "SST-2", ("sentence",), BINARY, (67_349, 872)),
    GlueTask("mrpc", _SPLITS, _WITH_F1, "MRPC", PAIR, BINARY, (3_668, 408), _FOLLOWS),
    GlueTask("cola", _SPLITS, ("matthews",), "CoLA", ("sentence",), BINARY, (8_551, 1_043)),
    GlueTask("stsb", _SPLITS, _CORRELATED, "STS-B", PAIR, (), (5_749, 1_500), _FOLLOWS),
)
TASKS = {task.name: task for task in _TASKS}


# --- rows


@dataclass(frozen=True)
class GlueSplit:
    """Rows of one split: the text or the pair, and the label."""

    texts: list[tuple[str, ...]]
    labels: list[int] | list[float]
    digest: str = ""  # of all values

    def spread(self, limit: int | None) -> "GlueSplit":
        """Return at most `limit` rows, evenly spread."""
        return GlueSplit(list(spread(self.texts, limit)), list(spread(self.labels, limit)), self.digest)


def read_task(data_dir: Path, task: GlueTask, split: str) -> GlueSplit:
    """Return one split of a task; warn if it has another number of rows than the benchmark's.

    Raises:
        MissingInputError: The task or the split is not there.
        DataError: A file has no rows, or other columns or labels than the task.
    """
    folder = next((data_dir / name for name in (task.title, task.name) if (data_dir / name).is_dir()), None)
    if folder is None:
        raise MissingInputError(f"--data-dir {data_dir} has no folder {task.title} or {task.name}; {FETCH_GLUE}")
    rows = read_split(folder, [split], texts=task.texts)
    if rows is None:
        raise MissingInputError(
            f"{folder} has no {split}.parquet, {split}.jsonl or {split}.csv; {FETCH_GLUE}. TSV files are not read: "
            "docs/evaluation.md has the line that makes CSV of them."
        )
    names = [*task.texts, "label"]
    *texts, labels = columns_of(rows, names, f"{folder}: {split}")
    if len(labels) != (expected := task.rows[task.splits.index(split)]):
        warnings.warn(
            f"{task.title} {split} has {len(labels):,} rows, the benchmark {expected:,}; the scores cannot be "
            "compared with published ones.",
            stacklevel=2,
        )
    numbers: Any = [_to_label(value, task, folder) for value in labels]
    return GlueSplit(list(zip(*texts, strict=True)), numbers, digest_of(rows, names))


_read = lru_cache(maxsize=4)(read_task)  # the runs of one process use the same few


def _to_label(value: Any, task: GlueTask, folder: Path) -> int | float:
    """Return a label, which may be a number or a word, as a number."""
    if task.is_regression:
        try:
            return float(value)
        except (TypeError, ValueError):  # an empty cell is None
            raise DataError(f"{folder}: {value!r} is no {task.title} score; they go from 0 to 5.") from None
    if isinstance(value, str):
        if value in task.labels:
            return task.labels.index(value)
    elif value in range(len(task.labels)):
        return int(value)
    raise DataError(f"{folder}: {value!r} is no {task.title} label; they are {', '.join(task.labels)}.")


# --- scores


_METRICS: dict[str, Callable[[NDArray[np.generic], NDArray[np.generic]], float]] = {
    "accuracy": metrics.accuracy_score,
    "f1": partial(metrics.f1_score, zero_division=0.0),
    "matthews": metrics.matthews_corrcoef,
    "pearson": lambda labels, predictions: stats.pearsonr(labels, predictions).statistic,
    "spearman": lambda labels, predictions: stats.spearmanr(labels, predictions).statistic,
}
_CORRELATIONS = ("matthews", "pearson", "spearman")


def compute_scores(task: GlueTask, logits: NDArray[np.floating], labels: NDArray[np.generic]) -> dict[str, float]:
    """Return every metric of the task that one set of rows gives; for MNLI the accuracy.

    Args:
        logits: [rows, outputs].
        labels: [rows], numbers of classes or scores.
    """
    names = [name for name in task.metrics if name in _METRICS]
    if not np.isfinite(logits).all():
        warnings.warn(f"{task.title}: the model gives values that are not finite; counted as 0.", stacklevel=2)
        return dict.fromkeys(names, 0.0)
    predictions: NDArray[np.generic] = logits.reshape(len(logits)) if task.is_regression else logits.argmax(axis=1)
    if len(labels) > 1 and np.ptp(predictions) == 0 and any(name in _CORRELATIONS for name in names):
        warnings.warn(f"{task.title}: every prediction is {predictions[0]}; correlations count as 0.", stacklevel=2)
        return dict.fromkeys(names, 0.0)
    scores = {name: float(_METRICS[name](labels, predictions)) for name in names}
    return {name: score if np.isfinite(score) else 0.0 for name, score in scores.items()}


# --- the evaluation


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
