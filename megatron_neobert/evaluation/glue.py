"""GLUE evaluation of one model: sweeps on all tasks, and transfer from MNLI.

With transfer from MNLI, all layers except the output layer start from the fine-tuned weights.

Task and column names are from nyu-mll/glue on the Hub. WNLI is excluded, as in the paper. Scores are computed by
scikit-learn and SciPy, as fractions of 1. An undefined score counts as 0, with a warning, because NaN would win or lose
every comparison by accident.

Source: Wang et al. 2019, tables 1 and 5; arXiv 2502.19587 appendix C.
"""

import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from scipy import stats
from sklearn import metrics

from megatron_neobert.errors import ConfigError, DataError, MissingInputError
from megatron_neobert.evaluation.data import Rows, columns_of, digest_of, read_split
from megatron_neobert.evaluation.fine_tune import Scores, Task, resolve_device
from megatron_neobert.evaluation.models import fingerprint
from megatron_neobert.evaluation.options import FETCH_GLUE, GlueOptions
from megatron_neobert.evaluation.paper import GLUE_BEST_POINTS
from megatron_neobert.evaluation.sweep import GRIDS, Grid, last_sweep, run_sweep
from megatron_neobert.huggingface.hub import model_name

MNLI = "mnli"
_METRICS: dict[str, Callable[[Any, Any], float]] = {
    "accuracy": metrics.accuracy_score,
    "f1": partial(metrics.f1_score, zero_division=0.0),
    "matthews": metrics.matthews_corrcoef,
    "pearson": lambda labels, predictions: stats.pearsonr(labels, predictions).statistic,
    "spearman": lambda labels, predictions: stats.spearmanr(labels, predictions).statistic,
}


@dataclass(frozen=True)
class GlueTask(Task):
    """One GLUE task. If `labels` is empty, the task is to predict a score from 0 to 5."""

    title: str  # the benchmark's spelling, also accepted as a folder name
    text_columns: tuple[str, ...]
    row_counts: tuple[int, ...]  # by split; MNLI's mismatched split included
    starts_from_mnli: bool = False

    kind = "glue"
    eval_strategy = "steps"
    last_split_pattern = "{}_mismatched"

    def read_rows(self, split: str, data_dir: Path) -> Rows:
        return read_task(data_dir, self, split)

    def score(self, prediction: Any, encoded: Dataset) -> Scores:
        """Return {metric: score} for one split, in fractions of 1. Both splits of MNLI have the key "accuracy".

        An undefined score is 0. All scores are 0, with a warning, if a logit is not finite.
        """
        logits = prediction.predictions
        names = [name for name in self.metrics if name in _METRICS]
        if not np.isfinite(logits).all():
            warnings.warn(f"{self.title}: the model's outputs are not finite; its scores count as 0.", stacklevel=2)
            return dict.fromkeys(names, 0.0)
        predicted = logits.argmax(axis=1) if self.labels else logits.reshape(len(logits))
        scores = {name: float(_METRICS[name](prediction.label_ids, predicted)) for name in names}
        return {name: score if np.isfinite(score) else 0.0 for name, score in scores.items()}


_SPLITS, _ACCURACY, _ACCURACY_F1 = ("train", "validation"), ("accuracy",), ("accuracy", "f1")
_PAIR, _QUESTION = ("sentence1", "sentence2"), ("question", "sentence")
_BINARY, _ENTAILED = ("0", "1"), ("entailment", "not_entailment")
# In the order of the paper's table.
_TASKS = (
    GlueTask(
        MNLI,
        ("train", "validation_matched", "validation_mismatched"),
        ("accuracy", "accuracy_mismatched"),
        ("entailment", "neutral", "contradiction"),
        "MNLI",
        ("premise", "hypothesis"),
        (392_702, 9_815, 9_832),
    ),
    GlueTask("qnli", _SPLITS, _ACCURACY, _ENTAILED, "QNLI", _QUESTION, (104_743, 5_463), starts_from_mnli=True),
    GlueTask("qqp", _SPLITS, _ACCURACY_F1, _BINARY, "QQP", ("question1", "question2"), (363_846, 40_430)),
    GlueTask("rte", _SPLITS, _ACCURACY, _ENTAILED, "RTE", _PAIR, (2_490, 277), starts_from_mnli=True),
    GlueTask("sst2", _SPLITS, _ACCURACY, _BINARY, "SST-2", ("sentence",), (67_349, 872)),
    GlueTask("mrpc", _SPLITS, _ACCURACY_F1, _BINARY, "MRPC", _PAIR, (3_668, 408), starts_from_mnli=True),
    GlueTask("cola", _SPLITS, ("matthews",), _BINARY, "CoLA", ("sentence",), (8_551, 1_043)),
    GlueTask("stsb", _SPLITS, ("pearson", "spearman"), (), "STS-B", _PAIR, (5_749, 1_500), starts_from_mnli=True),
)
TASKS = {task.name: task for task in _TASKS}


# --- rows


@lru_cache(maxsize=4)  # the runs of one process use the same splits
def read_task(data_dir: Path, task: GlueTask, split: str) -> Rows:
    """Return one split of a task (cached). Warn if its number of rows differs from the benchmark's.

    Raises MissingInputError if the task's folder, or the split in this folder, is missing.
    """
    folder = next((data_dir / name for name in (task.title, task.name) if (data_dir / name).is_dir()), None)
    if folder is None:
        raise MissingInputError(f"--data-dir {data_dir} has no folder {task.title} or {task.name}; {FETCH_GLUE}")
    names = [*task.text_columns, "label"]
    rows = read_split(folder, [split], names, texts=task.text_columns)
    if rows is None:
        raise MissingInputError(
            f"{folder} has no {split}.parquet, {split}.jsonl or {split}.csv; {FETCH_GLUE}. TSV files are not read; "
            "write them as CSV with the Hub's column names."
        )
    *texts, labels = columns_of(rows, names, f"{folder}: {split}")
    if len(labels) != (expected := task.row_counts[task.splits.index(split)]):
        warnings.warn(
            f"{task.title} {split} has {len(labels):,} rows, the benchmark {expected:,}. Do not compare the scores "
            "with published scores.",
            stacklevel=2,
        )
    return Rows(texts, [_to_label(value, task, folder) for value in labels], digest_of(rows, names))


def _to_label(value: Any, task: GlueTask, folder: Path) -> int | float:
    """Return a label's class index or, for regression, its value as float. Raises DataError for an invalid value."""
    if not task.labels:
        with suppress(TypeError, ValueError):  # an empty cell is None
            if 0 <= float(value) <= 5:
                return float(value)
        raise DataError(f"{folder}: {value!r} is not a score of {task.title} (0 to 5); correct the row.")
    if isinstance(value, str):
        if value in task.labels:
            return task.labels.index(value)
    elif value in range(len(task.labels)):
        return int(value)
    raise DataError(f"{folder}: {value!r} is not a label of {task.title} ({', '.join(task.labels)}); correct the row.")


# --- the evaluation


def run_glue(options: GlueOptions) -> Path:
    """Execute the unfinished runs, and return OUTPUT/MODEL, the folder with glue.json and glue.md."""
    # In the order of TASKS, because the best MNLI model must exist before other tasks start from it.
    tasks = [task for task in TASKS if task in (options.tasks or TASKS)]
    options, folder = resolve_device(options), options.output / model_name(options.model)
    model = fingerprint(options.model)
    transfer_tasks = [task for task in tasks if TASKS[task].starts_from_mnli and not options.no_transfer]
    if transfer_tasks and MNLI not in tasks:
        _best_mnli(folder, model)
    for task in tasks:
        for split in TASKS[task].splits:
            read_task(options.data_dir, TASKS[task], split)  # fails before the first run
    for task in tasks:
        start = _best_mnli(folder, model) if task in transfer_tasks else options.model
        run_sweep(TASKS[task], choose_grid(options, task), start, options)
    return folder


def choose_grid(options: GlueOptions, task: str) -> Grid:
    """Return a task's grid: the grid that `--grid` selects, with values replaced by other options."""
    if options.grid != "best":
        return GRIDS[options.grid].replace(options)
    batch_size, rate, decay = GLUE_BEST_POINTS[TASKS[task].title]
    return Grid(batch_sizes=(batch_size,), learning_rates=(rate,), weight_decays=(decay,)).replace(options)


def _best_mnli(folder: Path, model: str) -> Path:
    """Return the folder with the best weights from the last finished MNLI sweep. `model` is the model's fingerprint.

    Raises ConfigError if the model has finished no MNLI sweep, and MissingInputError if the weights were removed.
    """
    if (sweep := last_sweep(folder, "glue", MNLI, model)) is None:
        raise ConfigError(
            "--tasks: RTE, MRPC, STS-B and QNLI start from the best MNLI model, but no sweep of MNLI is finished for "
            f"this model in {folder}. Add mnli to --tasks, or start from --model with --no-transfer."
        )
    if sweep["kept"] is None:
        raise MissingInputError(f"{folder / 'glue' / MNLI}: the best weights are gone; remove it to run MNLI again.")
    return Path(sweep["kept"])
