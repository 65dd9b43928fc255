"""Tokens as text that cannot act: pieces in readable form, control characters and changes of direction as escapes.

Corpora come from strangers. A terminal obeys escape sequences, and a character that turns the text around can make
one word look like another.
"""

import unicodedata
from functools import cache

from megatron_neobert.data.tokenizer import Tokenizer

_REORDERING = {0x200E, 0x200F, 0x061C, *range(0x202A, 0x202F), *range(0x2066, 0x206A)}
_REPLACEMENT = "\ufffd"
_BEFORE = "a"  # decoders treat the first piece apart: what a piece adds is seen behind another one


def visible(text: str, *, keep: str = "") -> str:
    """The text with escapes for what would make a terminal do something else than show a character.

    Args:
        keep: Control characters that stay, as line feeds where lines are printed.
    """
    return "".join(
        ascii(character)[1:-1] if _acts_on_terminal(character) and character not in keep else character
        for character in text
    )


def _acts_on_terminal(character: str) -> bool:
    return ord(character) in _REORDERING or unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")


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
