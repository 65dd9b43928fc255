"""The rows of a batch, and the documents in them with what the model sees and what it has to say.

Letters: `t` tokens of a micro-batch, `s` slots of one piece of a document.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.data.batches.order import COMPONENT_SHIFT
from megatron_neobert.data.batches.rows import Source
from megatron_neobert.data.corpus.reader import Corpus
from megatron_neobert.inspection.found_batch import NO_LABEL, FoundBatch


@dataclass(frozen=True)
class Piece:
    """A document, or a part of one, in a row: with its [CLS] and [SEP]."""

    corpus: str
    document: int
    epoch: int
    first_token: int  # of the document, as the next two
    text_tokens: int
    document_tokens: int
    first_slot: int  # of the row
    has_cls: bool
    seen_s: NDArray[np.int64]
    labels_s: NDArray[np.int64]

    @property
    def predicted(self) -> int:
        return int((self.labels_s != NO_LABEL).sum())


@dataclass(frozen=True)
class Row:
    """One row of the global batch."""

    number: int
    micro_batch: int
    pieces: list[Piece]

    @property
    def used_slots(self) -> int:
        return sum(len(piece.seen_s) for piece in self.pieces)


def rows_of(found: FoundBatch) -> Iterator[Row]:
    """The rows of the batch one after another, each with its documents."""
    for part in found.parts:
        tokens_t, labels_t = part.batch.tokens_t.numpy(), part.labels_t
        segments, offsets = part.rows.segments, part.rows.row_offsets
        ends = np.cumsum(segments.slots_n)
        for place in range(len(part.rows)):
            members = range(offsets[place], offsets[place + 1])
            row_start = int(ends[members[0]] - segments.slots_n[members[0]])
            pieces = []
            for member in members:
                end = int(ends[member])
                start = end - int(segments.slots_n[member])
                corpus, number, length = _document_of(found.sources, int(segments.documents_n[member]))
                pieces.append(
                    Piece(
                        corpus=corpus,
                        document=number,
                        epoch=int(segments.epochs_n[member]),
                        first_token=int(segments.starts_n[member]),
                        text_tokens=int(segments.lengths_n[member]),
                        document_tokens=length,
                        first_slot=start - row_start,
                        has_cls=bool(segments.has_cls_n[member]),
                        seen_s=tokens_t[start:end],
                        labels_s=labels_t[start:end],
                    )
                )
            yield Row(number=part.number * len(part.rows) + place, micro_batch=part.number, pieces=pieces)


def corpus_name(source: Source) -> str:
    """The path that a corpus was named by."""
    assert isinstance(source.corpus, Corpus), "the inputs of a run are opened from files"
    return str(source.corpus.prefix)


def _document_of(sources: tuple[Source, ...], tagged: int) -> tuple[str, int, int]:
    """Corpus, number in it and tokens of a document that carries its component above its number."""
    source, number = sources[tagged >> COMPONENT_SHIFT], tagged & ((1 << COMPONENT_SHIFT) - 1)
    return corpus_name(source), number, int(source.corpus.lengths[np.array([number])][0])
