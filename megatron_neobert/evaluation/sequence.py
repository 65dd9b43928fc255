"""Tasks whose rows are a text or a pair of texts with one label: the head, the encoding of rows, and predictions.

transformers chooses the classification head by model type. Our exports have a dense layer on the first token or on the
mean of the tokens, then tanh and dropout (neobert) or GELU without dropout (eurobert), then the output layer.
"""

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import transformers
from datasets import Dataset
from numpy.typing import NDArray
from transformers.modeling_layers import GenericForSequenceClassification

from megatron_neobert.errors import ConversionError
from megatron_neobert.evaluation.data import Rows, select_evenly
from megatron_neobert.evaluation.fine_tune import EncodedSplit, Scores, Task
from megatron_neobert.evaluation.models import LoadOptions, load_model
from megatron_neobert.evaluation.options import FineTuneOptions


@dataclass(frozen=True)
class SequenceTask(Task):
    """Classification or, without labels, regression of texts or pairs of texts."""

    labels: tuple[str, ...]  # names of the classes; empty for a regression

    collator = transformers.DataCollatorWithPadding
    changes: ClassVar[dict[str, Any]] = {}  # of the settings in config.json, as in `load_model`

    @property
    def is_regression(self) -> bool:
        return not self.labels

    @abstractmethod
    def read_rows(self, split: str, options: FineTuneOptions) -> Rows:
        """Return the rows of a split. The labels are class indices or scores."""

    @abstractmethod
    def score(self, logits: NDArray[np.floating], labels: NDArray[np.generic]) -> Scores:
        """Return the scores of predictions [rows, classes], as fractions of 1."""

    def load(self, folder: Path, options: LoadOptions) -> Any:
        """Return the model in a folder, in evaluation mode, with a head for this task. A missing head is random.

        Raises ConversionError if the head reads only the last token.
        """
        names: dict[str, Any] = {
            "id2label": dict(enumerate(self.labels)),
            "label2id": {label: number for number, label in enumerate(self.labels)},
        }
        model = load_model(
            folder,
            "AutoModelForSequenceClassification",
            options,
            **self.changes,
            num_labels=len(self.labels) or 1,
            **({} if self.is_regression else names),
            # Explicit, because the config of a fine-tuned folder may name another type.
            problem_type="regression" if self.is_regression else "single_label_classification",
        )
        if isinstance(model, GenericForSequenceClassification):
            raise ConversionError(
                f"{folder}: {type(model).__name__} classifies by the last token, as causal models do, which does not "
                "suit an encoder; evaluate the eurobert or neobert export of the same checkpoint."
            )
        return model

    def encode(self, split: str, options: FineTuneOptions, tokenizer: Any, length: int) -> EncodedSplit:
        """Return a tokenized split: at most `options.limit` evenly spaced rows, each truncated to `length` tokens.

        Splits other than train are sorted by length.
        """
        rows = self.read_rows(split, options)
        encoding = tokenizer(
            *(list(select_evenly(column, options.limit)) for column in rows.texts), truncation=True, max_length=length
        )
        dataset = Dataset.from_dict({**encoding, "labels": select_evenly(rows.labels, options.limit)})
        if split != "train":  # less padding; the order does not change scores
            lengths = list(map(len, dataset["input_ids"]))
            dataset = dataset.select(sorted(range(len(lengths)), key=lengths.__getitem__))
        return EncodedSplit(dataset, lambda prediction: self.score(prediction.predictions, prediction.label_ids))

    def count_rows(self, split: str, options: FineTuneOptions) -> int:
        return len(select_evenly(self.read_rows(split, options).labels, options.limit))
