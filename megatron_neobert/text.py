"""Text that cannot act on a terminal: what is printed of strangers' files, names of files and errors of libraries.

A terminal obeys escape sequences, and a format character that turns the text around or cannot be seen makes one word
look like another. The two joiners stay: whole scripts and many emoji are written with them. Letters that merely
resemble each other stay too.
"""

import unicodedata

_JOINERS = ("\u200c", "\u200d")
_ESCAPED = ("Cc", "Cf", "Cs", "Zl", "Zp")  # control, format, half a surrogate pair, separators of lines, of paragraphs


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
