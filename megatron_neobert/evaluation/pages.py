"""Build Markdown pages from text that is shown as it is.

Text from records (names of models, commands) never becomes markup, and its control characters are escaped.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from megatron_neobert.text import visible

# Characters that start markup. An underscore between letters does not; at the start of a text, "-", "+" and "=" would
# start a list or a heading.
_MARKUP = re.compile(r"([\\`*\[\]<>|#$&~]|(?<![^\W_])_|_(?![^\W_])|^[-+=])")
_NUMBERED = re.compile(r"^(\d+)([.)] )")  # would start a list


def paragraph(text: str) -> str:
    """Return Markdown that shows the text as it is, on one line."""
    return _NUMBERED.sub(r"\1\\\2", _MARKUP.sub(r"\\\1", visible(" ".join(text.split()))))


def heading(text: str, level: int = 2) -> str:
    return f"{'#' * level} {paragraph(text)}"


def code(text: str) -> str:
    """Return an indented code block. A fenced block is not safe, because a line of the text could close the fence."""
    return "\n".join(f"    {visible(line)}" for line in text.splitlines())


def figure(path: Path, caption: str) -> str:
    """Return the Markdown for a figure whose file is in the page's folder."""
    return f"![{paragraph(caption)}]({path.name})"


def table(header: Sequence[str], measured: Sequence[Sequence[str]], reported: Sequence[Sequence[str]] = ()) -> str:
    """Return a Markdown table: measured rows, then reported rows of the paper. Reported rows add a column "source"."""
    rows = [*measured, *reported]
    # Columns of numbers, dashes and "missing" are aligned to the right.
    are_numbers = [all(re.match(r"\d|–|-$|missing$", cells[column]) for cells in rows) for column in range(len(header))]
    lines = [list(map(paragraph, header)), ["---:" if right else "---" for right in are_numbers]]
    lines += [list(map(paragraph, cells)) for cells in rows]
    if reported:
        sources = ["source", "---", *["measured"] * len(measured), *["reported"] * len(reported)]
        lines = [[*line, source] for line, source in zip(lines, sources, strict=True)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
