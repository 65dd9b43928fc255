"""Named-entity recognition of one model: a sweep on every dataset.

A dataset is a folder with the splits train, validation and optionally test, as CoNLL text, Parquet or a saved dataset.
Tags are O, or B-, I-, E- or S- followed by the entity type. The first token of a word has its tag as a label, and other
tokens have none. Words without a token, or beyond the longest input, are predicted as O. Scores are seqeval's
precision, recall and F1 over entities: both boundaries and the type must match. seqeval's default mode is used, which
reads tags of all schemes like the script conlleval: an I- tag after O or after another type begins an entity.

The protocol is GLUE's, with one evaluation per epoch. The validation set chooses the step and the point. Each run
evaluates its best weights once on the test set, if there is one.
"""

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from datasets import Dataset
from numpy.typing import NDArray
from seqeval.metrics import f1_score, precision_score, recall_score

from megatron_neobert.errors import ConversionError, DataError, MissingInputError
from megatron_neobert.evaluation.data import SPLIT_NAMES, Rows, columns_of, digest_of, read_split
from megatron_neobert.evaluation.fine_tune import Scores, Task, resolve_device
from megatron_neobert.evaluation.models import load_tokenizer
from megatron_neobert.evaluation.options import FineTuneOptions, NerOptions
from megatron_neobert.evaluation.sweep import GRIDS, run_sweep
from megatron_neobert.huggingface.hub import model_name
from megatron_neobert.text import listed

METRICS = {"f1": f1_score, "precision": precision_score, "recall": recall_score}
OUTSIDE = "O"
_TAG = re.compile(r"O|[BIES]-.+")
_WORD_COLUMNS, _TAG_COLUMNS = ("tokens", "words"), ("ner_tags", "tags", "labels")
_COLUMNS = (*_WORD_COLUMNS, *_TAG_COLUMNS)
_IGNORED_LABEL = -100  # torch's cross-entropy skips it


@dataclass(frozen=True)
class NerTask(Task):
    kind = "ner"
    auto_class = "AutoModelForTokenClassification"
    collator = transformers.DataCollatorForTokenClassification

    def read_rows(self, split: str, data_dir: Path) -> Rows:
        return read_dataset(data_dir, self.name)[split]

    def encode(self, split: str, options: FineTuneOptions, tokenizer: Any, length: int) -> Dataset:
        rows = self.read_rows(split, options.data_dir).select(options.limit)
        return encode_sentences(rows, self.labels, tokenizer, length)

    def score(self, prediction: Any, encoded: Dataset) -> Scores:
        """Return micro-averaged entity F1, precision and recall (seqeval) of logits [rows, tokens, labels]."""
        predicted = to_tags(prediction.predictions.argmax(-1), encoded, self.labels)
        expected = list(encoded["tags"])
        return {name: float(metric(expected, predicted, zero_division=0)) for name, metric in METRICS.items()}


def run_ner(options: NerOptions) -> Path:
    """Execute the unfinished runs, and return OUTPUT/MODEL, the folder with ner.json and ner.md.

    Raises MissingInputError if there is no dataset, and ConversionError if the tokenizer cannot map words to tokens.
    """
    options, folder = resolve_device(options), options.output / model_name(options.model)
    names = list(dict.fromkeys(options.tasks or find_datasets(options.data_dir)))
    if not names:
        raise MissingInputError(
            f"--data-dir {options.data_dir}: no folder in it has a training set. Create a folder per dataset, with "
            "train.txt, validation.txt and optionally test.txt, or with the Hub's Parquet files."
        )
    tasks = []
    for name in names:
        splits = read_dataset(options.data_dir, name)
        tags = {tag for rows in splits.values() for tags in rows.select(options.limit).labels for tag in tags}
        tasks.append(NerTask(name, tuple(splits), ("f1",), (OUTSIDE, *sorted(tags - {OUTSIDE}))))
    tokenizer = load_tokenizer(options.model)
    if not tokenizer.is_fast:
        raise ConversionError(
            f"{tokenizer.name_or_path}: {type(tokenizer).__name__} cannot map words to tokens; add a tokenizer.json to "
            "the folder."
        )
    for task in tasks:
        run_sweep(task, GRIDS[options.grid].replace(options), options.model, options)
    return folder


# --- data


def find_datasets(data_dir: Path) -> list[str]:
    """Return the names, NAME or NAME/PART, of all folders in data_dir that contain a training set."""
    folders = [path for pattern in ("*", "*/*") for path in sorted(data_dir.glob(pattern)) if path.is_dir()]
    names = [str(path.relative_to(data_dir)) for path in folders]
    return [
        name for name in names if read_split(data_dir / name, SPLIT_NAMES["train"], _COLUMNS, tagged=True) is not None
    ]


@lru_cache(maxsize=4)  # the runs of one process use the same datasets
def read_dataset(data_dir: Path, name: str) -> dict[str, Rows]:
    """Return {split: rows} of a dataset (cached). Each row is a sentence: its words, and its tags as text.

    Raises:
        MissingInputError: The folder, its training set or its validation set is missing.
        DataError: A split shares no entity type with the training set.
    """
    splits, folder, types = dict[str, Rows](), data_dir / name, dict[str, set[str]]()
    for split, split_names in SPLIT_NAMES.items():
        table = read_split(folder, split_names, _COLUMNS, tagged=True)
        if table is not None:
            rows = splits[split] = to_rows(table, f"{folder}: {split}")
            types[split] = {tag[2:] for tags in rows.labels for tag in tags if tag != OUTSIDE}
        elif split != "test":
            raise MissingInputError(
                f"{folder} has no {split}: expected {split}.parquet, {split}-00000-of-00001.parquet, {split}.txt or a "
                "saved dataset; add the file, or name another dataset in --tasks."
            )
    for split, found in types.items():
        if found.isdisjoint(types["train"]):
            raise DataError(
                f"{folder}: {split} has {_entities(found)}, and train has {_entities(types['train'])}; every "
                "score would be 0. Write the same names in all splits."
            )
    return splits


def _entities(types: set[str]) -> str:
    return f"the entity types {listed(sorted(types))}" if types else "no entities"


def to_rows(table: Dataset, split: str) -> Rows:
    """Return the sentences of a split. Rows without words are skipped. `split` is for messages.

    The columns are `tokens` or `words`, and `ner_tags`, `tags` or `labels`. Raises DataError if a column is missing,
    there are no rows, a row has different numbers of words and tags, or a tag is invalid.
    """
    columns = [
        next((name for name in names if name in table.column_names), names[0])
        for names in (_WORD_COLUMNS, _TAG_COLUMNS)
    ]
    tag_names = getattr(getattr(table.features.get(columns[1]), "feature", None), "names", None)
    sentences, labels = [], []
    for number, (words, tags) in enumerate(zip(*columns_of(table, columns, split), strict=True)):
        row = f"{split} row {number}"
        if len(words) != len(tags):
            raise DataError(f"{row} has {len(words)} words, but {len(tags)} tags; correct the row.")
        if words:
            sentences.append(words)
            labels.append([_to_tag(tag, tag_names, row) for tag in tags])
    return Rows([sentences], labels, digest_of(table, [name for name in table.column_names if name in _COLUMNS]))


def _to_tag(tag: Any, names: Sequence[str] | None, row: str) -> str:
    if isinstance(tag, int):
        if names is None or not 0 <= tag < len(names):
            known = "no tag names" if names is None else f"names for {len(names)} tags only"
            raise DataError(f"{row}: tag {tag} has no name, because the file has {known}; write the tags as text.")
        tag = names[tag]
    if not isinstance(tag, str) or not _TAG.fullmatch(tag):
        raise DataError(f"{row}: {tag!r} is not a tag; write O, or B-, I-, E- or S- and the entity type.")
    return tag


# --- tokens


def to_tags(label_ids: NDArray[np.integer], encoded: Dataset, labels: Sequence[str]) -> list[list[str]]:
    """Return the predicted tag of every word. `label_ids`, [rows, tokens], may have padding at the row ends."""
    return [
        [OUTSIDE if token < 0 else labels[row_ids[token]] for token in tokens]
        for row_ids, tokens in zip(label_ids, encoded["word_tokens"], strict=True)
    ]


def encode_sentences(rows: Rows, labels: Sequence[str], tokenizer: Any, length: int) -> Dataset:
    """Tokenize sentences with a fast tokenizer, and sort them by word count to reduce padding.

    A tag's label id is its position in `labels`. Besides the model's inputs, the columns are word_tokens (the first
    token of each word, or -1) and tags. Warn if words are beyond `length` tokens.
    """
    sentences = sorted(zip(*rows.texts, rows.labels, strict=True), key=lambda sentence: len(sentence[0]))
    label_ids = {label: id for id, label in enumerate(labels)}
    # Running text, because byte-level tokenizers expect a space before a word.
    texts = [" ".join(words) for words, _ in sentences]
    encoding = tokenizer(texts, truncation=True, max_length=length)
    columns: dict[str, list[Any]] = {**encoding, "labels": [], "word_tokens": [], "tags": []}
    beyond = 0
    for index, (words, tags) in enumerate(sentences):
        ends = accumulate((len(word) + 1 for word in words), initial=0)
        characters = (range(start, end - 1) for start, end in pairwise(ends))
        # The first characters of a word may have no token, such as a zero-width space.
        found = ((encoding.char_to_token(index, character) for character in word) for word in characters)
        tokens = [next((token for token in word if token is not None), -1) for word in found]
        beyond += next((count for count, token in enumerate(reversed(tokens)) if token >= 0), len(tokens))
        labels_by_token = {token: label_ids[tag] for token, tag in zip(tokens, tags, strict=True)}
        size = len(encoding["input_ids"][index])
        columns["labels"].append([labels_by_token.get(token, _IGNORED_LABEL) for token in range(size)])
        columns["word_tokens"].append(tokens)
        columns["tags"].append(tags)
    if beyond:
        warnings.warn(f"{beyond:,} words are beyond {length:,} tokens and are predicted as O.", stacklevel=2)
    return Dataset.from_dict(columns)
