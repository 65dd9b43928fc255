"""Pages as Markdown.

Texts of records (names of models, commands) never become markup, and cannot control a terminal.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from megatron_neobert.text import visible


def paragraph(text: str) -> str:
    """Return Markdown that shows the text as it is, on one line, control characters as escapes."""
    # Between letters, an underscore is one; at the beginning, a sign or a number with a point would begin a list.
    return re.sub(
        r"([\\`*\[\]<>|#$&~]|(?<![^\W_])_|_(?![^\W_])|^[-+=]|(?<=\d)[.)](?= ))",
        r"\\\1",
        visible(" ".join(text.split())),
    )


def heading(text: str, level: int = 2) -> str:
    return f"{'#' * level} {paragraph(text)}"


def code(text: str) -> str:
    """Return Markdown that shows lines as they are; indented, because a line could close a fence."""
    return "\n".join(f"    {visible(line)}" for line in text.splitlines())


def figure(path: Path, caption: str) -> str:
    """Return the Markdown of a figure beside the page."""
    return f"![{paragraph(caption)}]({path.name})"


def table(header: Sequence[str], measured: Sequence[Sequence[str]], reported: Sequence[Sequence[str]] = ()) -> str:
    """Return a table; with rows of the paper, a last column tells them from measured ones."""
    # Numbers, and signs for missing ones, are aligned to the right.
    rows = [*measured, *reported]
    are_numbers = [all(re.match(r"\d|–|-$|missing$", cells[column]) for cells in rows) for column in range(len(header))]
    lines = [list(map(paragraph, header)), ["---:" if right else "---" for right in are_numbers]]
    lines += [list(map(paragraph, cells)) for cells in rows]
    if reported:
        sources = ["source", "---", *["measured"] * len(measured), *["reported"] * len(reported)]
        lines = [[*line, source] for line, source in zip(lines, sources, strict=True)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
