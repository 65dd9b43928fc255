"""What pseudo-perplexity is measured on: documents out of files, as rows of a model's tokens with positions to mask.

A document is known by a hash of its text: by the same name in every file, order and run, and beside every tokenizer.
One that occurs twice counts once. A document is truncated at the longest input: the rest is neither read nor scored.
"""

import hashlib
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.data.inputs.find import find_inputs
from megatron_neobert.data.inputs.recognise import read_chunk, split_into_chunks
from megatron_neobert.data.inputs.records import ReadSettings
from megatron_neobert.errors import DataError

_ID_DIGITS = 16  # 64 bits: two of a million documents share one with a probability of 3e-8


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which documents are measured, and where they are masked."""

    max_length: int | None = None  # tokens of a row, those that the tokenizer adds included; None: the model's longest
    min_length: int = 1
    limit: int | None = None  # documents: the first ones that are long enough
    documents_per_bin: int | None = None  # likewise, of each length
    length_bins: tuple[int, ...] = ()  # upper ends, increasing
    positions_per_document: int | None = None  # None: all
    seed: int = 0


@dataclass(frozen=True)
class Document:
    """One row: its tokens, and the positions that will be masked one at a time."""

    id: str
    ids_s: NDArray[np.int32]
    positions: tuple[int, ...]  # increasing
    scorable: int  # tokens that could be masked: all but those that the tokenizer adds
    truncated: bool  # as long as the longest input: cut there, or by chance exactly as long


@dataclass
class Selection:
    """The documents, and how many records are not among them, by reason."""

    documents: list[Document] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


def select_documents(inputs: Sequence[str], tokenizer: Any, read: ReadSettings, choice: Choice) -> Selection:
    """Reads, tokenises and chooses, in the order of the files; `choice` has a longest row.

    Raises:
        MissingInputError: An input does not exist.
        DataError: A file is damaged or has no such text, or no document is long enough.
    """
    assert choice.max_length is not None, choice
    selection, seen, per_bin, enough = Selection(), set[str](), Counter[int](), choice.documents_per_bin
    # Of the lengths that a document can have once it is truncated.
    reachable = {bin_of(tokens, choice.length_bins) for tokens in range(choice.min_length, choice.max_length + 1)}
    for texts in _read(inputs, read, selection.left_out):
        encoded = tokenizer(
            texts,
            truncation=True,
            max_length=choice.max_length,
            return_special_tokens_mask=True,
            return_attention_mask=False,
            split_special_tokens=True,  # "[SEP]" written in a text is five characters
        )
        for text, ids, added in zip(texts, encoded["input_ids"], encoded["special_tokens_mask"], strict=True):
            id, number = document_id(text), bin_of(len(ids), choice.length_bins)
            scorable = [place for place, special in enumerate(added) if not special]
            if id in seen:
                selection.left_out["met before"] += 1
            elif len(ids) < choice.min_length or not scorable:
                selection.left_out["shorter than --min-length"] += 1
            elif enough is not None and per_bin[number] >= enough:
                selection.left_out["beyond --documents-per-bin"] += 1
            else:
                per_bin[number] += 1
                document = Document(
                    id=id,
                    ids_s=np.array(ids, dtype=np.int32),
                    positions=draw_positions(id, scorable, choice.positions_per_document, seed=choice.seed),
                    scorable=len(scorable),
                    truncated=len(ids) == choice.max_length,
                )
                selection.documents.append(document)
                is_full = enough is not None and all(per_bin[other] >= enough for other in reachable)
                if len(selection.documents) == choice.limit or is_full:
                    return selection
            seen.add(id)
    if not selection.documents:
        raise DataError(
            f"--data {' '.join(inputs)} has no document to measure ({_listed(selection.left_out)}); "
            f"check --text-key {read.text_key} and --min-length {choice.min_length}."
        )
    return selection


def refuse_no_text(inputs: Sequence[str], read: ReadSettings) -> None:
    """Read up to the first record with a text, so that a wrong key is found before a model is loaded.

    Raises:
        MissingInputError: An input does not exist.
        DataError: A file is damaged, or no record has a text.
    """
    left_out = Counter[str]()
    if next(_read(inputs, read, left_out), None) is None:
        raise DataError(
            f"--data {' '.join(inputs)} has no text ({_listed(left_out)}); check --text-key {read.text_key}."
        )


def document_id(text: str) -> str:
    """The same for the same text, wherever it is."""
    return hashlib.sha256(text.encode()).hexdigest()[:_ID_DIGITS]


def draw_positions(id: str, scorable: Sequence[int], count: int | None, *, seed: int) -> tuple[int, ...]:
    """`count` of the positions without replacement, increasing; they depend on document and seed, on no order."""
    if count is None or count >= len(scorable):
        return tuple(scorable)
    return tuple(sorted(random.Random(f"{seed} {id}").sample(scorable, count)))


def bin_of(length: int, length_bins: Sequence[int]) -> int:
    """Number of the bin: the first whose upper end is not below the length; past the last one, their number."""
    return bisect_left(length_bins, length)


def _listed(left_out: Counter[str]) -> str:
    return ", ".join(f"{count:,} x {reason}" for reason, count in left_out.items()) or "no record"


def _read(inputs: Sequence[str], read: ReadSettings, left_out: Counter[str]) -> Iterator[list[str]]:
    for path in find_inputs(inputs):
        for part in split_into_chunks(path, read):
            for batch in read_chunk(part, read):
                left_out.update(rejected.reason for rejected in batch.rejected)
                left_out.update(batch.dropped)
                if batch.texts:
                    yield batch.texts
