"""Numbers as text, and text that cannot act on a terminal: strangers' files, names of files and errors of libraries.

A terminal obeys escape sequences, and a format character that turns the text around or cannot be seen makes one word
look like another. The two joiners stay: whole scripts and many emoji are written with them. Letters that merely
resemble each other stay too.
"""

from __future__ import annotations  # `neobert check environment` runs on older Pythons too

import json
import re
import unicodedata
from collections.abc import Callable, Iterable
from typing import Any

_JOINERS = ("\u200c", "\u200d")
# The `@` of an Azure address follows the name of the container, which is no secret.
_USER = re.compile(r"(?<=://)(?<!abfs://)(?<!abfss://)(?<!az://)[^/\s'\"]*@")
# In an object store's address, `?` may belong to a glob: there only `?name=` begins a query. "url: /" is urllib3's.
_QUERY = re.compile(
    r"((?:https?://|url: /)[^?'\"\n]*|(?:s3a?|gs|gcs|abfss?|az|adl)://[^?'\"\n]*(?=\?[\w.~%-]+=))"
    r"\?[^\s'\"]+?(?=[;:,.)\]]*(?:[\s'\"]|$))"
)
_ESCAPED = ("Cc", "Cf", "Cs", "Zl", "Zp")  # control, format, half a surrogate pair, separators of lines, of paragraphs


def visible(text: str, *, keep: str = "") -> str:
    """Escape what would do something else than show a character, except the control characters in `keep`."""
    return "".join(
        ascii(character)[1:-1]
        if unicodedata.category(character) in _ESCAPED and character not in (*_JOINERS, *keep)
        else character
        for character in text
    )


def without_credentials(text: str) -> str:
    """Return the text without the user, password and query of its URLs. A query may hold a signature."""
    return _QUERY.sub(r"\1", _USER.sub("", text)) if "/" in text else text


def parse_json(text: str | bytes, *, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Return the value of a JSON text, or raise ValueError, also for deep nesting or numbers of thousands of digits.

    Args:
        pairs: Makes an object of its keys and values; without it, an object is a dict with the last value of each key.
    """
    try:
        return json.loads(text, object_pairs_hook=pairs)  # noqa: TID251
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def counted(number: int, one: str, several: str | None = None) -> str:
    """1 file, 2 files."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def listed(names: Iterable[str], *, most: int = 4) -> str:
    """The first names, and the number of the others: a, b, c, d and 12 more."""
    every = list(names)
    return ", ".join(every[:most]) + (f" and {len(every) - most:,} more" if len(every) > most else "")


def percent(share: float, *, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def with_prefix(rate: float, unit: str) -> str:
    """Three digits, and the unit behind its prefix: `151 k tokens/s` with the unit ` tokens/s`."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if rate >= 0.9995 * factor:
            scaled = rate / factor
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f} {prefix}{unit}"
    return f"{rate:.0f} {unit.strip()}"


def in_bytes(size: int) -> str:
    """Format a size in GiB, or in MiB below one GiB."""
    return f"{size / (1 << 30):,.2f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):,.1f} MiB"


def duration(seconds: float) -> str:
    """The two largest units; of ten days and more the days."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days:,} d" if days >= 10 else f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
