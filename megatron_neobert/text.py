"""Numbers as text, and text from files and libraries made safe to print.

A terminal executes escape sequences, and format characters can reverse or hide a part of a name: `visible`
escapes both. It keeps the two joiners, which many scripts and emoji need, and letters that merely look alike.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Iterable
from typing import Any

_JOINERS = ("\u200c", "\u200d")
# In an Azure URL the container name, which is not a secret, comes before `@`.
_USER = re.compile(r"(?<=://)(?<!abfs://)(?<!abfss://)(?<!az://)[^/\s'\"]*@")
# `?` can be part of a glob in the URL of an object store; there only `?name=` starts a query. urllib3 prints "url: /".
_QUERY = re.compile(
    r"((?:https?://|url: /)[^?'\"\n]*|(?:s3a?|gs|gcs|abfss?|az|adl)://[^?'\"\n]*(?=\?[\w.~%-]+=))"
    r"\?[^\s'\"]+?(?=[;:,.)\]]*(?:[\s'\"]|$))"
)
# Unicode categories: control, format, surrogate, line separator, paragraph separator.
_ESCAPED = ("Cc", "Cf", "Cs", "Zl", "Zp")


def visible(text: str, *, keep: str = "") -> str:
    """Escape control, format, surrogate and line-separator characters (as `\\x1b`), except joiners and `keep`."""
    return "".join(
        ascii(character)[1:-1]
        if unicodedata.category(character) in _ESCAPED and character not in (*_JOINERS, *keep)
        else character
        for character in text
    )


def without_credentials(text: str) -> str:
    """Remove user, password and query from the URLs in a text. A query can contain a signature."""
    return _QUERY.sub(r"\1", _USER.sub("", text)) if "/" in text else text


def parse_json(text: str | bytes, *, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Parse a JSON text. Raise ValueError for any other text, for deep nesting, and for numbers over 4,300 digits.

    Args:
        pairs: Builds each object from its (key, value) pairs. None builds a dict with the last value of each key.
    """
    try:
        return json.loads(text, object_pairs_hook=pairs)  # noqa: TID251
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def counted(number: int, singular: str, plural: str | None = None) -> str:
    """Format a number with its noun, such as `1 file` or `2 files`."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def listed(names: Iterable[str]) -> str:
    """Format up to four names and the number of any others: `a, b, c, d and 12 more`."""
    every = list(names)
    return ", ".join(every[:4]) + (f" and {len(every) - 4:,} more" if len(every) > 4 else "")


def percent(share: float, *, digits: int = 1) -> str:
    """Format a share as a percentage, such as `12.3 %` for 0.1234."""
    return f"{100 * share:.{digits}f} %"


def approximate(number: float) -> str:
    """Return a number with three significant digits, such as `1.68`, `27.0`, `3,790` or `37.9 million`."""
    for factor, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= 0.9995 * factor:
            return f"{approximate(number / factor)} {word}"
    rounded = float(f"{number:.3g}")
    return f"{rounded:,.{2 if rounded < 10 else 1 if rounded < 100 else 0}f}"


def with_prefix(rate: float, unit: str) -> str:
    """Format a rate with three digits and an SI prefix: `151 k tokens/s` for 151_234 and the unit ` tokens/s`."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if rate >= 0.9995 * factor:
            return f"{approximate(rate / factor)} {prefix}{unit}"
    return f"{rate:.0f} {unit.strip()}"


def in_bytes(size: int) -> str:
    """Return a size in GiB, or in MiB below 1 GiB."""
    return f"{size / (1 << 30):,.2f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):,.1f} MiB"


def duration(seconds: float) -> str:
    """Format a duration in its two largest units, such as `9 d 2 h` or `3 min 5 s`; from 10 days on, as `10.5 d`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days + hours / 24:,.1f} d" if days >= 10 else f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
