"""Named-entity recognition of one model: the points of a grid on every data set, and the best of them.

A data set is a folder with the splits train, validation and perhaps test, as CoNLL text, Parquet or a saved data set.
Tags are O, or B-, I-, E-, S- with the kind of the entity; seqeval finds out which of these schemes it is. The first
token of a word carries its tag, and nothing else is trained on. A word without a token, or beyond the longest input,
counts as outside of every entity. Scores are seqeval's over whole sentences: precision, recall and F1 of entities, of
which both bounds and the kind must be right.

The protocol is GLUE's, but with one evaluation an epoch. The validation set chooses step and point; each run looks at
the test set, if there is one, once, with its best weights. OUTPUT/NAME/ner/DATA_SET holds the ledger and the best
weights, OUTPUT/NAME/ner.json and .md the results.
"""

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import transformers
from datasets import Dataset
from numpy.typing import NDArray
from seqeval.metrics import f1_score, precision_score, recall_score

from megatron_neobert.errors import ConversionError, DataError, MissingInputError
from megatron_neobert.evaluation.data import columns_of, digest_of, read_split, spread
from megatron_neobert.evaluation.fine_tune import Rows, Task, resolve_device
from megatron_neobert.evaluation.models import LoadOptions, fingerprint, load_model, load_tokenizer
from megatron_neobert.evaluation.options import FineTuneOptions, NerOptions
from megatron_neobert.evaluation.sweep import GRIDS, Progress, Sweep, run_sweep, show_progress

METRICS = {"f1": f1_score, "precision": precision_score, "recall": recall_score}
OUTSIDE = "O"
# Names that files of a split have on the Hub, in CoNLL's tasks and elsewhere.
_NAMES = {
    "train": ("train", "eng.train"),
    "validation": ("validation", "valid", "dev", "testa", "eng.testa"),
    "test": ("test", "testb", "eng.testb"),
}
_TAG = re.compile(r"O|[BIES]-.+")
_WORDS, _TAGS = ("tokens", "words"), ("ner_tags", "tags", "labels")
_NOT_TRAINED_ON = -100  # torch's cross-entropy ignores it


class Sentence(NamedTuple):
    """Words, and the tag of each."""

    words: list[str]
    tags: list[str]


@dataclass(frozen=True)
class NerData:
    """Sentences and hash of every split of a data set; the test set only if there is one."""

    sentences: dict[str, list[Sentence]]
    digests: dict[str, str]

    @property
    def labels(self) -> tuple[str, ...]:
        """Every tag that occurs, O first."""
        tags = {tag for split in self.sentences.values() for sentence in split for tag in sentence.tags}
        return (OUTSIDE, *sorted(tags - {OUTSIDE}))


@dataclass(frozen=True)
class NerTask(Task):
    """One data set."""

    labels: tuple[str, ...]

    collator = transformers.DataCollatorForTokenClassification
    eval_strategy = "epoch"  # F1 is 0 until the first entity is found; the patience of small sets would end
    name_in_last_split = "test_{}"

    def load(self, folder: Path, options: LoadOptions) -> Any:
        """Return the model of a folder; layers that the folder lacks are drawn from torch's generator.

        Raises:
            ConversionError: transformers has no head for it.
            MissingInputError: There is no such folder.
        """
        return load_model(
            folder,
            "AutoModelForTokenClassification",
            options,
            num_labels=len(self.labels),
            id2label=dict(enumerate(self.labels)),
            label2id={label: number for number, label in enumerate(self.labels)},
        )

    def encode(self, split: str, options: FineTuneOptions, tokenizer: Any, length: int) -> Rows:
        """Return a split, truncated after `length` tokens."""
        sentences = read_data(options.data_dir, self.name, options.limit).sentences[split]
        tagged = to_rows(sentences, self.labels, tokenizer, length)
        return Rows(tagged.rows, lambda evaluated: tagged.score(evaluated.predictions.argmax(-1)))


def evaluate(options: NerOptions, on_progress: Progress = show_progress) -> Path:
    """Run what is not finished, and write the results after every data set, with those of earlier commands.

    Returns:
        The folder of the model's results.

    Raises:
        MissingInputError, DataError, ConversionError: Model or data cannot be used; nothing has been run.
        OutputError: Another command is writing the output.
    """
    options, folder = resolve_device(options), options.output / options.model.resolve().name
    tasks = list(dict.fromkeys(options.tasks or find_data_sets(options.data_dir)))
    if not tasks:
        raise MissingInputError(
            f"--data-dir {options.data_dir}: no folder in it has a training set; put each data set into a folder of "
            "its own, with train.txt, validation.txt and perhaps test.txt, or the Hub's parquet files."
        )
    data = {name: read_data(options.data_dir, name, options.limit) for name in tasks}
    found = [NerTask(name, tuple(data[name].sentences), ("f1",), data[name].labels) for name in tasks]
    found[0].load(options.model, LoadOptions(attention=options.attention))
    load_tokenizer(options.model)
    model, grid = fingerprint(options.model), GRIDS[options.grid].replace(options)
    for task in found:
        sweep = Sweep(
            kind="ner",
            task=task,
            grid=grid,
            model=model,
            start=options.model,
            data=data[task.name].digests,
            options=options,
        )
        run_sweep(sweep, on_progress)
    return folder


# --- data


def find_data_sets(data_dir: Path) -> list[str]:
    """Return every folder in data_dir, or in one of its folders, that has a training set; as NAME or NAME/PART."""
    folders = [path for pattern in ("*", "*/*") for path in sorted(data_dir.glob(pattern)) if path.is_dir()]
    names = [str(path.relative_to(data_dir)) for path in folders]
    return [name for name in names if read_split(data_dir / name, _NAMES["train"], tagged=True) is not None]


@lru_cache(maxsize=4)  # the runs of one process use the same few
def read_data(data_dir: Path, task: str, limit: int | None = None) -> NerData:
    """Return a data set, at most `limit` sentences of every split, evenly spread.

    Raises:
        MissingInputError: There is no such folder, or no training or validation set in it.
        DataError: The data has none of the known forms; names file and line, or file and row.
    """
    data, folder = NerData({}, {}), data_dir / task
    for split in _NAMES:
        found = read_sentences(folder, split)
        if found is not None:
            data.sentences[split], data.digests[split] = list(spread(found[0], limit)), found[1]
        elif split != "test":
            raise MissingInputError(
                f"{folder} has no {split}: expected {split}.parquet, {split}-00000-of-00001.parquet, {split}.txt or a "
                "saved data set; name another of --tasks, or put it there."
            )
    return data


def read_sentences(folder: Path, split: str) -> tuple[list[Sentence], str] | None:
    """Return the sentences of one split and the hash of its data, or None if there is no such split."""
    rows = read_split(folder, _NAMES[split], tagged=True)
    if rows is None:
        return None
    columns = [name for name in rows.column_names if name in (*_WORDS, *_TAGS)]
    return _to_sentences(rows, f"{folder}: {split}"), digest_of(rows, columns)


def _to_sentences(rows: Dataset, where: str) -> list[Sentence]:
    names = [next((name for name in known if name in rows.column_names), known[0]) for known in (_WORDS, _TAGS)]
    words, tags = columns_of(rows, names, where)
    known_tags = getattr(getattr(rows.features[names[1]], "feature", None), "names", None)
    sentences = []
    for number, (own_words, own_tags) in enumerate(zip(words, tags, strict=True)):
        if len(own_words) != len(own_tags):
            raise DataError(f"{where} row {number} has {len(own_words)} words, but {len(own_tags)} tags.")
        if own_words:
            sentences.append(
                Sentence(own_words, [_to_tag(tag, known_tags, f"{where} row {number}") for tag in own_tags])
            )
    return sentences


def _to_tag(tag: Any, names: Sequence[str] | None, where: str) -> str:
    if isinstance(tag, int):
        if names is None or not 0 <= tag < len(names):
            raise DataError(
                f"{where}: tag {tag} has no name, since the file names "
                f"{'none' if names is None else f'only {len(names)}'}; expected names of the tags, as the Hub's data "
                "sets have them, or the tags as words."
            )
        tag = names[tag]
    if not isinstance(tag, str) or not _TAG.fullmatch(tag):
        raise DataError(f"{where}: {tag!r} is no tag; tags are O, or B-, I-, E- or S- and the kind of the entity.")
    return tag


# --- tokens


@dataclass(frozen=True)
class TaggedRows:
    """Sentences as the model takes them, in an order that needs little padding."""

    rows: Dataset  # input_ids, attention_mask, labels, and the first token of each word, -1 if the word has none
    sentences: list[Sentence]  # by row
    labels: Sequence[str]

    def score(self, numbers: NDArray[np.integer]) -> dict[str, float]:
        """Return micro-averaged entity F1, precision and recall (seqeval) of the labels [rows, tokens] of a model."""
        expected = [sentence.tags for sentence in self.sentences]
        found = self.to_tags(numbers)
        return {name: float(metric(expected, found, zero_division=0)) for name, metric in METRICS.items()}

    def to_tags(self, numbers: NDArray[np.integer]) -> list[list[str]]:
        """Return the tag of every word, from labels [rows, tokens]; rows may be padded at their ends."""
        return [
            [OUTSIDE if token < 0 else self.labels[row[token]] for token in tokens]
            for row, tokens in zip(numbers, self.rows["word_tokens"], strict=True)
        ]


def to_rows(sentences: Sequence[Sentence], labels: Sequence[str], tokenizer: Any, length: int) -> TaggedRows:
    """Return the rows of sentences; warn if words are beyond `length` tokens.

    Raises:
        ConversionError: The tokenizer does not say which token belongs to which word.
    """
    if not tokenizer.is_fast:
        raise ConversionError(
            f"{tokenizer.name_or_path}: {type(tokenizer).__name__} does not tell which token belongs to which word; "
            "give the folder a tokenizer.json."
        )
    sentences = sorted(sentences, key=lambda sentence: len(sentence.words))
    number_of = {label: number for number, label in enumerate(labels)}
    texts = [" ".join(sentence.words) for sentence in sentences]  # as running text, which byte-level tokenizers expect
    encoded = tokenizer(texts, truncation=True, max_length=length)
    columns: dict[str, list[list[int]]] = {**encoded, "labels": [], "word_tokens": []}
    beyond = 0
    for number, (words, tags) in enumerate(sentences):
        starts = accumulate((len(word) + 1 for word in words[:-1]), initial=0)
        found = [encoded.char_to_token(number, start) for start in starts]
        tokens = [-1 if token is None else token for token in found]
        beyond += next((gap for gap, token in enumerate(reversed(tokens)) if token >= 0), len(tokens))
        of_token = {token: number_of[tag] for token, tag in zip(tokens, tags, strict=True)}
        size = len(encoded["input_ids"][number])
        columns["labels"].append([of_token.get(token, _NOT_TRAINED_ON) for token in range(size)])
        columns["word_tokens"].append(tokens)
    if beyond:
        warnings.warn(f"{beyond:,} words are beyond {length:,} tokens and count as outside of entities.", stacklevel=2)
    return TaggedRows(Dataset.from_dict(columns), list(sentences), labels)
