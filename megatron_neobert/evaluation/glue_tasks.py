"""GLUE's tasks, without WNLI as in the paper: their rows out of local files, and the scores of a model's outputs.

Names of tasks and columns are those of the data set on the Hub. Metrics: the first one chooses models, all of them are
averaged for the table. They are scikit-learn's and SciPy's as fractions of 1, and never NaN, which would win or lose
every comparison by accident: a metric that is not defined counts as 0, with a warning.
Source: Wang et al. 2019, tables 1 and 5; arXiv 2502.19587 appendix C.
"""

import warnings
from collections.abc import Callable
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

from megatron_neobert.errors import ConversionError, DataError, MissingInputError
from megatron_neobert.evaluation.data import columns_of, digest_of, read_split, spread
from megatron_neobert.evaluation.fine_tune import Rows, Task, shortest_first
from megatron_neobert.evaluation.models import LoadOptions, load_model
from megatron_neobert.evaluation.options import FineTuneOptions

PAIR, HYPOTHESIS = ("sentence1", "sentence2"), ("premise", "hypothesis")
BINARY, ENTAILED = ("0", "1"), ("entailment", "not_entailment")
FETCH = "on a machine with network: neobert fetch glue --output DIR"


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
        raise MissingInputError(f"--data-dir {data_dir} has no folder {task.title} or {task.name}; {FETCH}")
    rows = read_split(folder, [split], texts=task.texts)
    if rows is None:
        raise MissingInputError(
            f"{folder} has no {split}.parquet, {split}.jsonl or {split}.csv; {FETCH}. TSV files are not read: "
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
