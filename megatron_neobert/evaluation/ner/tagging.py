"""A model with a head for tags: the rows that it trains on, the tags that it gives, and what they are worth.

The first token of a word carries its tag, and nothing else is trained on. A word without one, because it lies beyond
the longest input or gives no token, counts as outside of every entity. Scores are seqeval's over whole sentences:
precision, recall and F1 of entities, of which both bounds and the kind must be right.
"""

import warnings
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from seqeval.metrics import classification_report, f1_score, precision_score, recall_score

from megatron_neobert.errors import ConversionError
from megatron_neobert.evaluation.encoders import LoadOptions, load_model
from megatron_neobert.evaluation.fine_tuning.trainer import EVALUATION_BATCH
from megatron_neobert.evaluation.ner.data import OUTSIDE, Sentence

METRICS = {"f1": f1_score, "precision": precision_score, "recall": recall_score}
_NOT_TRAINED_ON = -100  # torch's cross-entropy ignores it


def load_tagger(folder: Path, labels: Sequence[str], options: LoadOptions) -> Any:
    """The model, its new layers drawn from torch's generator.

    Raises:
        ConversionError: transformers has no head for it.
        MissingInputError: There is no such folder.
    """
    return load_model(
        folder,
        "AutoModelForTokenClassification",
        options,
        num_labels=len(labels),
        id2label=dict(enumerate(labels)),
        label2id={label: number for number, label in enumerate(labels)},
    )


@dataclass(frozen=True)
class TaggedRows:
    """Sentences as the model takes them, in an order that needs little padding."""

    rows: Dataset  # input_ids, attention_mask, labels
    sentences: list[Sentence]  # by row
    labels: list[str]

    def score(self, numbers: NDArray[np.integer]) -> dict[str, float]:
        """The metrics of the labels [rows, tokens] that a model gives, the rows filled up behind their ends."""
        return score([sentence.tags for sentence in self.sentences], self.to_tags(numbers))

    def to_tags(self, numbers: Iterable[NDArray[np.integer]]) -> list[list[str]]:
        """The tag of every word."""
        tags = [[OUTSIDE] * len(sentence.words) for sentence in self.sentences]
        for own, row, places in zip(tags, numbers, self.rows["word_places"], strict=True):
            for token, word in enumerate(places):
                if word >= 0:
                    own[word] = self.labels[row[token]]
        return tags


def to_rows(sentences: Sequence[Sentence], labels: list[str], tokenizer: Any, length: int) -> TaggedRows:
    """Warns where words lie beyond `length` tokens.

    Raises:
        ConversionError: The tokenizer does not say which token belongs to which word.
    """
    if not tokenizer.is_fast:
        raise ConversionError(
            f"{tokenizer.name_or_path}: {type(tokenizer).__name__} does not tell which token belongs to which word; "
            "give the folder a tokenizer.json."
        )
    number_of = {label: number for number, label in enumerate(labels)}
    texts = [" ".join(sentence.words) for sentence in sentences]  # as running text, which byte-level tokenizers expect
    encoded = tokenizer(texts, truncation=True, max_length=length, return_offsets_mapping=True)
    offsets = encoded.pop("offset_mapping")
    places = [_first_tokens(sentence.words, own) for sentence, own in zip(sentences, offsets, strict=True)]
    tags = [
        [number_of[sentence.tags[word]] if word >= 0 else _NOT_TRAINED_ON for word in own]
        for sentence, own in zip(sentences, places, strict=True)
    ]
    beyond = sum(len(s.words) - 1 - max(own) for s, own in zip(sentences, places, strict=True))
    if beyond:
        warnings.warn(f"{beyond:,} words lie beyond {length:,} tokens and count as outside of entities.", stacklevel=2)
    order = sorted(range(len(sentences)), key=lambda row: len(places[row]))
    columns = {**encoded, "labels": tags, "word_places": places}
    sorted_columns = {name: [column[row] for row in order] for name, column in columns.items()}
    return TaggedRows(Dataset.from_dict(sorted_columns), [sentences[row] for row in order], labels)


def _first_tokens(words: Sequence[str], offsets: Sequence[tuple[int, int]]) -> list[int]:
    """For each token the word that it begins; -1: none. `offsets`: of the tokens in the words' text."""
    text = " ".join(words)
    begins = list(accumulate((len(word) + 1 for word in words), initial=0))[:-1]
    places, last = [], -1
    for begin, end in offsets:
        begin += len(text[begin:end]) - len(text[begin:end].lstrip())  # a byte-level token has the space before it
        word = bisect_right(begins, begin) - 1 if begin < end else -1
        places.append(word if word > last else -1)
        last = max(last, word)
    return places


def score(expected: list[list[str]], found: list[list[str]]) -> dict[str, float]:
    """Of all entities together."""
    return {name: float(metric(expected, found, zero_division=0)) for name, metric in METRICS.items()}


def score_kinds(expected: list[list[str]], found: list[list[str]]) -> dict[str, dict[str, float]]:
    """The metrics and the number of expected entities, by their kind."""
    report = classification_report(expected, found, output_dict=True, zero_division=0)
    return {
        kind: {"f1": float(own["f1-score"]), "entities": int(own["support"])}
        for kind, own in report.items()
        if not kind.endswith(" avg")
    }


@torch.no_grad()
def predict(model: Any, tokenizer: Any, tagged: TaggedRows) -> list[list[str]]:
    """The tags of every word of every row."""
    numbers: list[NDArray[np.integer]] = []
    inputs = tagged.rows.select_columns(["input_ids", "attention_mask"])
    for start in range(0, len(inputs), EVALUATION_BATCH):
        batch = tokenizer.pad(inputs[start : start + EVALUATION_BATCH], return_tensors="pt")
        numbers += list(model(**batch.to(model.device)).logits.argmax(-1).cpu().numpy())
    return tagged.to_tags(numbers)
