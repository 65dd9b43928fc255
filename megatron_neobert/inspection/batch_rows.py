"""The rows of a batch, the documents in them, and each token as text: what the model sees and what it has to predict.

Letters: `t` tokens of a micro-batch, `s` slots of one piece of a document.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.config.data_path import parse_data_path
from megatron_neobert.data.corpus.reader import Corpus
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer
from megatron_neobert.inspection.found_batch import NO_LABEL, FoundBatch
from megatron_neobert.text import percent, visible


@dataclass(frozen=True)
class Piece:
    """A document, or a part of one, in a row: with its [CLS] and [SEP]."""

    component: int  # of --data-path
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

    @property
    def title(self) -> str:
        """Number of the document, and the part of it that is here."""
        end = self.first_token + self.text_tokens
        part = "whole" if self.text_tokens == self.document_tokens else f"tokens {self.first_token:,} to {end - 1:,} of"
        if not self.text_tokens:
            part = "none of the"
        epoch = f", epoch {self.epoch}" if self.epoch else ""
        tokens = f"{self.document_tokens:,} tokens"
        return f"document {self.document:,}: {part} {tokens}{epoch}, {self.predicted:,} predicted"


@dataclass(frozen=True)
class BatchRow:
    """One row of the global batch."""

    number: int
    micro_batch: int
    pieces: list[Piece]

    @property
    def used_slots(self) -> int:
        return sum(len(piece.seen_s) for piece in self.pieces)


def rows_of(found: FoundBatch) -> Iterator[BatchRow]:
    """Yield the rows of the batch, each with its documents."""
    for part in found.parts:
        tokens_t = part.batch.tokens_t.numpy()
        labels_t = np.full(len(tokens_t), NO_LABEL)
        labels_t[part.batch.masked_positions_m.numpy()] = part.batch.labels_m.numpy()
        segments, offsets = part.rows.segments, part.rows.row_offsets
        ends = np.cumsum(segments.slots_n)
        for place in range(len(part.rows)):
            members = range(offsets[place], offsets[place + 1])
            row_start = int(ends[members[0]] - segments.slots_n[members[0]])
            pieces = []
            for member in members:
                end = int(ends[member])
                start = end - int(segments.slots_n[member])
                component, number = int(segments.components_n[member]), int(segments.numbers_n[member])
                corpus = found.sources[component].corpus
                assert isinstance(corpus, Corpus), "the inputs of a run are opened from files"
                pieces.append(
                    Piece(
                        component=component,
                        corpus=str(corpus.prefix),
                        document=number,
                        epoch=int(segments.epochs_n[member]),
                        first_token=int(segments.starts_n[member]),
                        text_tokens=int(segments.lengths_n[member]),
                        document_tokens=int(corpus.lengths[np.array([number])][0]),
                        first_slot=start - row_start,
                        has_cls=bool(segments.has_cls_n[member]),
                        seen_s=tokens_t[start:end],
                        labels_s=labels_t[start:end],
                    )
                )
            yield BatchRow(number=part.number * len(part.rows) + place, micro_batch=part.number, pieces=pieces)


Kind = Literal["plain", "special", "masked", "replaced", "kept"]
# Kinds of tokens in the order of a legend.
MEANINGS: dict[Kind, str] = {
    "masked": "predicted, and hidden: the model sees the mask token",
    "replaced": "predicted, and replaced: the model sees the first, and has to predict the second",
    "kept": "predicted, although the model sees it",
    "special": "special token, never predicted",
}


def kinds_of(tokenizer: Tokenizer, seen_s: NDArray[np.int64], labels_s: NDArray[np.int64]) -> list[Kind]:
    """Return for each slot whether its token is predicted, and what the model sees of it."""
    is_predicted_s = labels_s != NO_LABEL
    cases: dict[Kind, NDArray[np.bool_]] = {  # the first that is true counts
        "special": ~is_predicted_s & np.isin(seen_s, tokenizer.special_ids),
        "plain": ~is_predicted_s,
        "masked": seen_s == tokenizer.mask_id,
        "kept": seen_s == labels_s,
    }
    return np.select(list(cases.values()), list(cases), "replaced").tolist()


def describe(found: FoundBatch) -> dict[str, str]:
    """Return the numbers of all rows of the batch in words, a name before each line."""
    data, place, rows = found.settings.data, found.cursor, list(rows_of(found))
    pieces = [piece for row in rows for piece in row.pieces]
    seen_t, labels_t = (np.concatenate([getattr(piece, name) for piece in pieces]) for name in ("seen_s", "labels_s"))
    lengths_n, slots = np.array([len(piece.seen_s) for piece in pieces]), len(rows) * data.seq_length
    used, short = len(seen_t), sum(piece.first_token + piece.text_tokens < piece.document_tokens for piece in pieces)
    kinds = Counter(kinds_of(found.tokenizer, seen_t, labels_t))
    words: dict[Kind, str] = {"masked": "hidden", "replaced": "replaced by another token", "kept": "left as they are"}
    predicted = sum(kinds[kind] for kind in words)
    ordinary = predicted + kinds["plain"]  # tokens that may be predicted
    unknown = int((np.where(labels_t == NO_LABEL, seen_t, labels_t) == found.tokenizer.unk_id).sum())
    alone = "each document sees itself alone" if data.batch_layout == "packed" else "documents see all of their row"
    lines = {
        "starts at": f"epoch {place.epoch}, window {place.window:,}, row {place.row:,}",
        "rows": f"{len(rows):,} of {data.seq_length:,} slots, in {len(found.parts):,} micro-batches; {alone}",
        "fill": f"{percent(used / slots, digits=2)}: {used:,} tokens, {slots - used:,} slots unused",
        "documents": f"{len(pieces):,} pieces, {len(pieces) / len(rows):.1f} per row; {short:,} of them do not reach "
        "the end of their document",
        "lengths": f"{lengths_n.min():,} to {lengths_n.max():,} slots, median {int(np.median(lengths_n)):,}, mean "
        f"{lengths_n.mean():,.0f}",
        "predicted": f"{predicted:,} tokens, {percent(predicted / max(ordinary, 1), digits=2)} of the {ordinary:,} "
        f"that may be (--mask-prob {data.mask_prob:g}): "
        + (", ".join(f"{kinds[kind]:,} {word}" for kind, word in words.items() if kinds[kind]) or "none"),
        "unknown": f"{unknown:,} tokens, {percent(unknown / used, digits=2)} of all",
    }
    names = [visible(str(component)) for component in parse_data_path(data.data_path)]
    if len(names) > 1:
        sizes = [[len(piece.seen_s) for piece in pieces if piece.component == number] for number in range(len(names))]
        lines["blend"] = ", ".join(
            f"{name} {len(size):,} pieces with {percent(sum(size) / used)} of the tokens"
            for name, size in zip(names, sizes, strict=True)
        )
    return lines


@dataclass(frozen=True)
class TokenView:
    """A slot of a row."""

    kind: Kind
    space: str  # before it: a space or nothing
    text: str  # of the document, also where something else stands in its place
    seen: str  # what the model sees
    id: int  # of the document
    seen_id: int
    slot: int  # of the row
    place: int | None  # in the document; None: it is not of the document


# For a legend.
EXAMPLES: dict[Kind, TokenView] = {
    "masked": TokenView("masked", "", "word", "[MASK]", 0, 0, 0, None),
    "replaced": TokenView("replaced", "", "word", "other", 0, 0, 0, None),
    "kept": TokenView("kept", "", "word", "word", 0, 0, 0, None),
    "special": TokenView("special", "", "[CLS]", "[CLS]", 0, 0, 0, None),
}

_REPLACEMENT = "\ufffd"
_BEFORE = "a"  # decoders treat the first piece apart: what a piece adds is seen behind another one


class TokenViews:
    """The tokens of pieces, one by one, with the text of each apart from the space before it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.text_of = cache(self._find_text)
        """(space, text) of an id: the space before it or nothing, and its letters, which are never empty."""

    def _find_text(self, token: int) -> tuple[str, str]:
        backend = self._tokenizer.backend
        piece, decoder = backend.id_to_token(token), backend.decoder
        assert piece is not None, f"{token=} of {backend.get_vocab_size()}"
        if token in self._tokenizer.special_ids or decoder is None:
            return " ", visible(piece)
        alone, behind = decoder.decode([_BEFORE]), decoder.decode([_BEFORE, piece])
        text = behind[len(alone) :]
        if not behind.startswith(alone) or not text.strip(" ") or _REPLACEMENT in text:
            return "", visible(piece)  # a part of a character has no text; the piece shows which part it is
        return " " if text.startswith(" ") else "", visible(text.removeprefix(" "))

    def of(self, piece: Piece) -> Iterator[TokenView]:
        """Yield them in their order; the first has no space before it."""
        first = piece.first_token - int(piece.has_cls)
        kinds = kinds_of(self._tokenizer, piece.seen_s, piece.labels_s)
        for number, (kind, seen, label) in enumerate(
            zip(kinds, piece.seen_s.tolist(), piece.labels_s.tolist(), strict=True)
        ):
            id_ = seen if label == NO_LABEL else label
            space, text = self.text_of(id_)
            place = first + number
            yield TokenView(
                kind=kind,
                space=space if number else "",
                text=text,
                seen=self.text_of(seen)[1],
                id=id_,
                seen_id=seen,
                slot=piece.first_slot + number,
                place=place if piece.first_token <= place < piece.first_token + piece.text_tokens else None,
            )
