"""One token as both forms show it: its text, what the model sees, and what it has to say."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

from megatron_neobert.data.tokenizer.tokenizer import Tokenizer
from megatron_neobert.inspection.batch_rows import Piece
from megatron_neobert.inspection.found_batch import NO_LABEL
from megatron_neobert.text import visible

Fate = Literal["plain", "special", "masked", "replaced", "kept"]
# In the order of a legend.
MEANINGS: dict[Fate, str] = {
    "masked": "predicted, and hidden: the model sees the mask token",
    "replaced": "predicted, and replaced: the model sees the first, and has to say the second",
    "kept": "predicted, although the model sees it",
    "special": "special token, never predicted",
}

_REPLACEMENT = "\ufffd"
_BEFORE = "a"  # decoders treat the first piece apart: what a piece adds is seen behind another one


class TokenTexts:
    """The text of each token of a tokenizer, apart from the space before it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._backend = tokenizer.backend
        self._special = set(tokenizer.special_ids)
        self.of = cache(self._find)
        """(space, text) of an id: the space before it or nothing, and what it says, which is never empty."""

    def _find(self, token: int) -> tuple[str, str]:
        piece = self._backend.id_to_token(token)
        assert piece is not None, f"{token=} of {self._backend.get_vocab_size()}"
        decoder = self._backend.decoder
        if token in self._special or decoder is None:
            return " ", visible(piece)
        alone, behind = decoder.decode([_BEFORE]), decoder.decode([_BEFORE, piece])
        text = behind[len(alone) :]
        if not behind.startswith(alone) or not text.strip(" ") or _REPLACEMENT in text:
            return "", visible(piece)  # a part of a character has no text; the piece says which part it is
        return " " if text.startswith(" ") else "", visible(text.removeprefix(" "))


@dataclass(frozen=True)
class TokenView:
    """A slot of a row."""

    fate: Fate
    space: str  # before it: a space or nothing
    text: str  # of the document, whatever stands in its place
    seen: str  # what the model sees
    id: int  # of the document
    seen_id: int
    slot: int  # of the row
    place: int | None  # in the document; None: it is not of the document


class TokenViews:
    """Tokens of pieces, one by one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._special, self._mask = frozenset(tokenizer.special_ids), tokenizer.mask_id
        self.texts = TokenTexts(tokenizer)

    def of(self, piece: Piece) -> Iterator[TokenView]:
        """In their order; the first has no space before it."""
        first = piece.first_token - int(piece.has_cls)
        for number, (seen, label) in enumerate(zip(piece.seen_s.tolist(), piece.labels_s.tolist(), strict=True)):
            id_ = seen if label == NO_LABEL else label
            space, text = self.texts.of(id_)
            place = first + number
            yield TokenView(
                fate=self._fate(seen, label),
                space=space if number else "",
                text=text,
                seen=self.texts.of(seen)[1],
                id=id_,
                seen_id=seen,
                slot=piece.first_slot + number,
                place=place if piece.first_token <= place < piece.first_token + piece.text_tokens else None,
            )

    def _fate(self, seen: int, label: int) -> Fate:
        if label == NO_LABEL:
            return "special" if seen in self._special else "plain"
        if seen == self._mask:
            return "masked"
        return "kept" if seen == label else "replaced"


def describe_piece(piece: Piece) -> str:
    """Which document, and which part of it."""
    last = piece.first_token + piece.text_tokens
    part = "whole" if piece.text_tokens == piece.document_tokens else f"tokens {piece.first_token:,} to {last - 1:,} of"
    if not piece.text_tokens:
        part = "none of the"
    epoch = f", epoch {piece.epoch}" if piece.epoch else ""
    return f"document {piece.document:,}: {part} {piece.document_tokens:,} tokens{epoch}, {piece.predicted:,} predicted"
