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
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
import transformers
from datasets import Dataset
from numpy.typing import NDArray
from seqeval.metrics import f1_score, precision_score, recall_score

from megatron_neobert.errors import ConversionError, DataError, MissingInputError
from megatron_neobert.evaluation.data import columns_of, digest_of, read_split, spread
from megatron_neobert.evaluation.fine_tune import PaperTrainer, Run, resolve_device
from megatron_neobert.evaluation.ledger import open_ledger
from megatron_neobert.evaluation.models import LoadOptions, fingerprint, load_model, load_tokenizer, longest_input
from megatron_neobert.evaluation.options import NerOptions
from megatron_neobert.evaluation.sweep import (
    GRIDS,
    Progress,
    Sweep,
    run_sweep,
    show_progress,
    write_results,
)

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
    def labels(self) -> list[str]:
        """Every tag that occurs, O first."""
        tags = {tag for split in self.sentences.values() for sentence in split for tag in sentence.tags}
        return [OUTSIDE, *sorted(tags - {OUTSIDE})]


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
    data = {task: read_data(options.data_dir, task, options.limit) for task in tasks}
    load_tagger(options.model, [OUTSIDE], LoadOptions(attention=options.attention))
    load_tokenizer(options.model)
    model = fingerprint(options.model)
    for task in tasks:
        with open_ledger(folder / "ner" / quote(task, safe=""), options.device) as ledger:
            splits = ("", "test_")[: len(data[task].sentences) - 1]
            sweep = Sweep(
                run=NerRun,
                task=task,
                grid=GRIDS[options.grid].replace(options),
                model=model,
                start=options.model,
                data=data[task].digests,
                metrics=[f"{split}{name}" for split in splits for name in METRICS],
                options=options,
            )
            run_sweep(ledger, sweep, on_progress)
        write_results("ner", folder, options.model)
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


# --- one run


@dataclass(frozen=True, kw_only=True)
class NerRun(Run):
    """One point on one data set."""

    def build_trainer(self) -> PaperTrainer:
        """Build the trainer; the head of its model is drawn from the point's seed."""
        transformers.set_seed(self.point.seed)  # of the head
        model, tokenizer = load_tagger(self.start, self.data.labels, self.loading), load_tokenizer(self.start)
        validation = self.tokenize("validation", model, tokenizer)
        return PaperTrainer(
            self,
            model,
            tokenizer,
            train=self.tokenize("train", model, tokenizer).rows,
            validation=validation.rows,
            collator=transformers.DataCollatorForTokenClassification(tokenizer),
            metric="f1",
            eval_strategy="epoch",  # F1 is 0 until the first entity is found; the patience of small sets would end
            compute=lambda evaluated: validation.score(evaluated.predictions),
            preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        )

    def collect_scores(self, trainer: PaperTrainer, best: dict[str, float]) -> dict[str, float]:
        """Return the scores of the validation set by name, and those of a test set as test_NAME."""
        scores = {name: best[name] for name in METRICS}
        if "test" in self.data.sentences:
            test = self.tokenize("test", trainer.model, trainer.processing_class)
            trainer.compute_metrics = None  # which knows the validation set alone
            found: Any = trainer.predict(test.rows)
            scores |= {f"test_{name}": value for name, value in test.score(found.predictions).items()}
        return scores

    def average(self, scores: dict[str, float]) -> float:
        """Return F1 on the validation set."""
        return scores["f1"]

    @property
    def data(self) -> NerData:
        return read_data(self.options.data_dir, self.task, self.options.limit)

    def tokenize(self, split: str, model: Any, tokenizer: Any) -> "TaggedRows":
        """Return one split of the data set, as the model takes it."""
        length = longest_input(model, tokenizer, at_most=self.options.max_length)
        return to_rows(self.data.sentences[split], self.data.labels, tokenizer, length)


def load_tagger(folder: Path, labels: Sequence[str], options: LoadOptions) -> Any:
    """Return the model, its new layers drawn from torch's generator.

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
        """Return the metrics of the labels [rows, tokens] that a model gives; rows may be padded at their ends."""
        return score([sentence.tags for sentence in self.sentences], self.to_tags(numbers))

    def to_tags(self, numbers: Iterable[NDArray[np.integer]]) -> list[list[str]]:
        """Return the tag of every word."""
        tags = [[OUTSIDE] * len(sentence.words) for sentence in self.sentences]
        for own, row, places in zip(tags, numbers, self.rows["word_places"], strict=True):
            for token, word in enumerate(places):
                if word >= 0:
                    own[word] = self.labels[row[token]]
        return tags


def to_rows(sentences: Sequence[Sentence], labels: list[str], tokenizer: Any, length: int) -> TaggedRows:
    """Return the rows of sentences; warn if words are beyond `length` tokens.

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
        warnings.warn(f"{beyond:,} words are beyond {length:,} tokens and count as outside of entities.", stacklevel=2)
    order = sorted(range(len(sentences)), key=lambda row: len(places[row]))
    columns = {**encoded, "labels": tags, "word_places": places}
    sorted_columns = {name: [column[row] for row in order] for name, column in columns.items()}
    return TaggedRows(Dataset.from_dict(sorted_columns), [sentences[row] for row in order], labels)


def _first_tokens(words: Sequence[str], offsets: Sequence[tuple[int, int]]) -> list[int]:
    """Return for each token the word that it begins, or -1; `offsets` are those of the tokens in the words' text."""
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
    """Return micro-averaged entity F1, precision and recall (seqeval)."""
    return {name: float(metric(expected, found, zero_division=0)) for name, metric in METRICS.items()}
