"""Tokens as text that cannot act: pieces in readable form, control and format characters as escapes.

Corpora come from strangers. A terminal obeys escape sequences, and a format character that turns the text around or
cannot be seen makes one word look like another. The two joiners stay: whole scripts and many emoji are written with
them. Letters that merely resemble each other stay too.
"""

import unicodedata
from functools import cache

from megatron_neobert.data.tokenizer import Tokenizer

_JOINERS = ("\u200c", "\u200d")
_ESCAPED = ("Cc", "Cf", "Cs", "Zl", "Zp")  # control, format, half a surrogate pair, separators of lines, of paragraphs
_REPLACEMENT = "\ufffd"
_BEFORE = "a"  # decoders treat the first piece apart: what a piece adds is seen behind another one


def visible(text: str, *, keep: str = "") -> str:
    """The text with escapes for what would do something else than show a character.

    Args:
        keep: Control characters that stay, as line feeds where lines are printed.
    """
    return "".join(
        ascii(character)[1:-1] if _acts(character) and character not in keep else character for character in text
    )


def _acts(character: str) -> bool:
    return unicodedata.category(character) in _ESCAPED and character not in _JOINERS


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
