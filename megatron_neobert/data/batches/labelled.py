"""Texts with a label each, in tokens and in memory, for the probe of validations. To batches they are a corpus."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.data.shards.find import find_shards
from megatron_neobert.data.shards.parts import read_part, split_into_parts
from megatron_neobert.data.shards.reading import ReadSettings
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer
from megatron_neobert.errors import ConfigError, DataError, MissingInputError
from megatron_neobert.text import counted, percent

_FLAG = "--probe-data-path"
_READ = ReadSettings(text_key="text", record_keys=("label",))
_RULE = "every record has a text under 'text' and its label, a text or a whole number, under 'label'"


@dataclass(frozen=True)
class LabelledTexts:
    """n texts, each once and with a token at least."""

    ids: NDArray[np.integer[Any]]  # of all texts end to end, without special tokens
    ends_n: NDArray[np.int64]  # where each text ends in them
    lengths: NDArray[np.int32]
    labels_n: NDArray[np.int64]  # numbers of the labels
    description: str

    is_remote = False

    def gather(
        self, documents: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> NDArray[np.integer[Any]]:
        """The ids of lengths[i] tokens from token starts[i] of documents[i], for all i end to end."""
        firsts = self.ends_n[documents] - self.lengths[documents] + starts
        return np.concatenate([self.ids[first : first + count] for first, count in zip(firsts, lengths, strict=True)])

    def will_need(self, documents: NDArray[np.int64], *, with_neighbours: bool = False) -> None:
        """Nothing: they are in memory."""


def read_labelled_texts(path: str, tokenizer: Tokenizer) -> LabelledTexts:
    """The records of a file or folder in any form that preprocessing reads.

    A text that stands there again would be the nearest neighbour of itself: the first one counts. That and texts
    without a token are left out, and counted in the description.

    Raises:
        MissingInputError: There is no such file.
        DataError: A record without a text or a label, or fewer than two different labels.
    """
    texts: dict[str, str | int] = {}
    records = 0
    for text, label in _read(path):
        records += 1
        texts.setdefault(text, label)
    encoded = tokenizer.encode_batch(list(texts))
    kept_n = encoded.lengths > 0
    labels = [label for label, is_kept in zip(texts.values(), kept_n.tolist(), strict=True) if is_kept]
    classes = list(dict.fromkeys(labels))
    if len(classes) < 2:
        found = f"only the label {classes[0]!r:.80}" if classes else "no text with a label"
        raise DataError(
            f"{_FLAG} {path} has {found} in {counted(records, 'record')}; a probe needs texts of two labels at least."
        )
    lengths = encoded.lengths[kept_n]
    labels_n = np.array([classes.index(label) for label in labels])
    left_out = records - len(labels)
    return LabelledTexts(
        ids=encoded.ids,  # texts that are left out have none
        ends_n=np.cumsum(lengths, dtype=np.int64),
        lengths=lengths,
        labels_n=labels_n,
        description=(
            f"probe: {counted(len(labels), 'text')} with {len(classes):,} labels from {path}, the commonest on "
            f"{percent(np.bincount(labels_n).max() / len(labels))}"
            + (f"; left out, empty or there before: {left_out:,}" if left_out else "")
        ),
    )


def _read(path: str) -> Iterator[tuple[str, str | int]]:
    try:
        for shard in find_shards([path]):
            for part in split_into_parts(shard, _READ):
                for batch in read_part(part, _READ):
                    if batch.rejected:
                        raise DataError(batch.rejected[0].describe(part, shard))
                    for text, origin in zip(batch.texts, batch.origins, strict=True):
                        label = origin.fields["label"]
                        if type(label) not in (str, int):  # True is an int to Python
                            found = "no label" if label is None else f"the label {label!r:.80}"
                            raise DataError(f"{shard}, {part.unit} {origin.number} has {found}")
                        yield text, label
    except MissingInputError as error:
        raise MissingInputError(f"{_FLAG} {error}") from error
    except (ConfigError, DataError) as error:
        reason = str(error).partition("; choose ")[0]  # between columns, by flags of preprocessing
        raise DataError(f"{_FLAG} {reason}; {_RULE}.") from error
