"""Named-entity recognition of one model: a sweep on every dataset.

A dataset is a folder with the splits train, validation and optionally test, as CoNLL text, Parquet or a saved dataset.
Tags are O, or B-, I-, E- or S- followed by the entity type. The first token of a word has its tag as a label, and other
tokens have none. Words without a token, or beyond the longest input, are predicted as O. Scores are seqeval's
precision, recall and F1 over entities: both boundaries and the type must match. seqeval's default mode is used, which
reads tags of all schemes like the script conlleval: an I- tag after O or after another type begins an entity.

The protocol is GLUE's, with one evaluation per epoch. The validation set chooses the step and the point. Each run
evaluates its best weights once on the test set, if there is one. OUTPUT/NAME/ner/DATASET has the ledger and the best
weights; OUTPUT/NAME/ner.json and .md have the results.
"""

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import transformers
from datasets import Dataset
from numpy.typing import NDArray
from seqeval.metrics import f1_score, precision_score, recall_score

from megatron_neobert.errors import ConversionError, DataError, MissingInputError
from megatron_neobert.evaluation.data import SPLIT_NAMES, columns_of, digest_of, read_split, select_evenly
from megatron_neobert.evaluation.fine_tune import EncodedSplit, Task, resolve_device
from megatron_neobert.evaluation.models import LoadOptions, load_model, load_tokenizer
from megatron_neobert.evaluation.options import FineTuneOptions, NerOptions
from megatron_neobert.evaluation.sweep import GRIDS, Sweep, run_sweep
from megatron_neobert.huggingface.hub import model_name
from megatron_neobert.text import listed

METRICS = {"f1": f1_score, "precision": precision_score, "recall": recall_score}
OUTSIDE = "O"
_TAG = re.compile(r"O|[BIES]-.+")
_WORD_COLUMNS, _TAG_COLUMNS = ("tokens", "words"), ("ner_tags", "tags", "labels")
_COLUMNS = (*_WORD_COLUMNS, *_TAG_COLUMNS)
_IGNORED_LABEL = -100  # torch's cross-entropy skips it


class Sentence(NamedTuple):
    words: list[str]
    tags: list[str]


@dataclass(frozen=True)
class NerData:
    """Sentences and hash of every split of a dataset. A dataset may have no test set."""

    sentences: dict[str, list[Sentence]]
    digests: dict[str, str]

    @property
    def labels(self) -> tuple[str, ...]:
        """Tags that occur, O first."""
        tags = {tag for split in self.sentences.values() for sentence in split for tag in sentence.tags}
        return (OUTSIDE, *sorted(tags - {OUTSIDE}))


@dataclass(frozen=True)
class NerTask(Task):
    labels: tuple[str, ...]

    collator = transformers.DataCollatorForTokenClassification
    # F1 is 0 until the model finds its first entity, so with GLUE's interval a small dataset would stop too early.
    eval_strategy = "epoch"
    last_split_pattern = "test_{}"

    def load(self, folder: Path, options: LoadOptions) -> Any:
        return load_model(
            folder,
            "AutoModelForTokenClassification",
            options,
            num_labels=len(self.labels),
            id2label=dict(enumerate(self.labels)),
            label2id={label: id for id, label in enumerate(self.labels)},
        )

    def encode(self, split: str, options: FineTuneOptions, tokenizer: Any, length: int) -> EncodedSplit:
        sentences = read_data(options.data_dir, self.name, options.limit).sentences[split]
        encoded = encode_sentences(sentences, self.labels, tokenizer, length)
        return EncodedSplit(encoded.rows, lambda prediction: encoded.score(prediction.predictions.argmax(-1)))

    def count_rows(self, split: str, options: FineTuneOptions) -> int:
        return len(read_data(options.data_dir, self.name, options.limit).sentences[split])


def run_ner(options: NerOptions) -> Path:
    """Execute the unfinished runs. After each dataset, write ner.json and ner.md.

    Return OUTPUT/MODEL, the folder with these files. Raises MissingInputError without a dataset, and ConversionError if
    the tokenizer cannot map words to tokens.
    """
    options, folder = resolve_device(options), options.output / model_name(options.model)
    names = list(dict.fromkeys(options.tasks or find_datasets(options.data_dir)))
    if not names:
        raise MissingInputError(
            f"--data-dir {options.data_dir}: no folder in it has a training set. Create a folder per dataset, with "
            "train.txt, validation.txt and optionally test.txt, or with the Hub's Parquet files."
        )
    data = {name: read_data(options.data_dir, name, options.limit) for name in names}
    tasks = [NerTask(name, tuple(data[name].sentences), ("f1",), data[name].labels) for name in names]
    tokenizer = load_tokenizer(options.model)
    if not tokenizer.is_fast:
        raise ConversionError(
            f"{tokenizer.name_or_path}: {type(tokenizer).__name__} cannot map words to tokens; add a tokenizer.json to "
            "the folder."
        )
    grid = GRIDS[options.grid].replace(options)
    for task in tasks:
        found = data[task.name].digests
        run_sweep(Sweep(kind="ner", task=task, grid=grid, start=options.model, data=found, options=options))
    return folder


# --- data


def find_datasets(data_dir: Path) -> list[str]:
    """Return the folders in data_dir, one or two levels deep, that have a training set: NAME or NAME/PART."""
    folders = [path for pattern in ("*", "*/*") for path in sorted(data_dir.glob(pattern)) if path.is_dir()]
    names = [str(path.relative_to(data_dir)) for path in folders]
    return [
        name for name in names if read_split(data_dir / name, SPLIT_NAMES["train"], _COLUMNS, tagged=True) is not None
    ]


@lru_cache(maxsize=4)  # the runs of one process use the same datasets
def read_data(data_dir: Path, name: str, limit: int | None = None) -> NerData:
    """Return a dataset (cached): at most `limit` evenly spaced sentences of every split, and hashes of whole splits.

    Raises:
        MissingInputError: The folder, its training set or its validation set is missing.
        DataError: A split has no entity type of the training set.
    """
    data, folder, types = NerData({}, {}), data_dir / name, dict[str, set[str]]()
    for split, split_names in SPLIT_NAMES.items():
        rows = read_split(folder, split_names, _COLUMNS, tagged=True)
        if rows is not None:
            sentences = to_sentences(rows, f"{folder}: {split}")
            types[split] = {tag[2:] for sentence in sentences for tag in sentence.tags if tag != OUTSIDE}
            data.sentences[split] = list(select_evenly(sentences, limit))
            columns = [column for column in rows.column_names if column in _COLUMNS]
            data.digests[split] = digest_of(rows, columns)
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
    return data


def _entities(types: set[str]) -> str:
    return f"the entity types {listed(sorted(types))}" if types else "no entities"


def to_sentences(rows: Dataset, split: str) -> list[Sentence]:
    """Return the sentences of a split, with tags as text. Rows without words are skipped. `split` is for messages.

    The columns are `tokens` or `words`, and `ner_tags`, `tags` or `labels`. Raises DataError if a column is missing,
    there are no rows, a row has different numbers of words and tags, or a tag is invalid.
    """
    columns = [
        next((name for name in names if name in rows.column_names), names[0]) for names in (_WORD_COLUMNS, _TAG_COLUMNS)
    ]
    tag_names = getattr(getattr(rows.features.get(columns[1]), "feature", None), "names", None)
    sentences = []
    for number, (words, tags) in enumerate(zip(*columns_of(rows, columns, split), strict=True)):
        row = f"{split} row {number}"
        if len(words) != len(tags):
            raise DataError(f"{row} has {len(words)} words, but {len(tags)} tags; correct the row.")
        if words:
            sentences.append(Sentence(words, [_to_tag(tag, tag_names, row) for tag in tags]))
    return sentences


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


@dataclass(frozen=True)
class EncodedSentences:
    """Tokenized sentences, sorted by length to reduce padding."""

    rows: Dataset  # columns input_ids, attention_mask, labels and word_tokens: the first token of each word, or -1
    sentences: list[Sentence]  # by row
    labels: Sequence[str]

    def score(self, label_ids: NDArray[np.integer]) -> dict[str, float]:
        """Return micro-averaged entity F1, precision and recall (seqeval) of predicted label ids [rows, tokens]."""
        expected, predicted = [sentence.tags for sentence in self.sentences], self.to_tags(label_ids)
        return {name: float(metric(expected, predicted, zero_division=0)) for name, metric in METRICS.items()}

    def to_tags(self, label_ids: NDArray[np.integer]) -> list[list[str]]:
        """Return the predicted tag of every word. Rows of label ids [rows, tokens] may have padding at their ends."""
        return [
            [OUTSIDE if token < 0 else self.labels[row_ids[token]] for token in tokens]
            for row_ids, tokens in zip(label_ids, self.rows["word_tokens"], strict=True)
        ]


def encode_sentences(
    sentences: Sequence[Sentence], labels: Sequence[str], tokenizer: Any, length: int
) -> EncodedSentences:
    """Tokenize sentences, and return them sorted by number of words. Warn if words are beyond `length` tokens.

    The position of a tag in `labels` is its label id. The tokenizer must be a fast one.
    """
    sentences = sorted(sentences, key=lambda sentence: len(sentence.words))
    label_ids = {label: id for id, label in enumerate(labels)}
    # Running text, because byte-level tokenizers expect a space before a word.
    texts = [" ".join(sentence.words) for sentence in sentences]
    encoding = tokenizer(texts, truncation=True, max_length=length)
    columns: dict[str, list[list[int]]] = {**encoding, "labels": [], "word_tokens": []}
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
    if beyond:
        warnings.warn(f"{beyond:,} words are beyond {length:,} tokens and are predicted as O.", stacklevel=2)
    return EncodedSentences(Dataset.from_dict(columns), sentences, labels)
