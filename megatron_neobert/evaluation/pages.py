"""Tables as CSV, and pages in two forms: Markdown, and the same as one HTML page that needs nothing beside it.

What comes from records (names of models, commands) is text and never markup, and cannot control a terminal.
"""

import base64
import csv
import html
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from megatron_neobert.text import visible

MEASURED = "measured"  # in the last column of a page about one run
REPORTED = "reported"  # in the last column: not measured here, but printed in the paper

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1a1a1a; }
h1, h2, h3 { line-height: 1.2; margin: 2rem 0 .6rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; display: block; overflow-x: auto; }
th, td { padding: .25rem .6rem; text-align: left; border-bottom: 1px solid #ddd; vertical-align: top; }
th { border-bottom: 2px solid #888; }
img { max-width: 100%; height: auto; }
pre { background: #f5f5f5; padding: .6rem; white-space: pre-wrap; overflow-wrap: anywhere; }
"""


def to_csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """A header and the rows; what has no column is left out, None is empty."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


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


class Figure(str):
    """Markdown of a PNG that was just drawn beside the page."""

    path: Path


def figure(path: Path, caption: str) -> Figure:
    """Return the Markdown of a figure that this process has drawn."""
    block = Figure(f"![{paragraph(caption)}]({path.name})")
    block.path = path
    return block


def table(header: Sequence[str], rows: Sequence[tuple[Sequence[str], str]]) -> str:
    """Rows of cells, each with the Markdown of a last column `run`: MEASURED, REPORTED or `run_link`."""
    # Numbers, and what stands for one that is not there, are set to the right.
    are_numbers = [
        all(re.match(r"\d|–|-$|missing$", cells[column]) for cells, _ in rows) for column in range(len(header))
    ]
    lines = [[*map(paragraph, header), "run"], ["---:" if right else "---" for right in are_numbers] + ["---"]]
    lines += [[*map(paragraph, cells), run] for cells, run in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def run_link(number: int) -> str:
    """To the heading `Run 3`, by the name that GitHub gives it too."""
    return rf"[\[{number}\]](#run-{number})"


def page_to_html(title: str, blocks: Sequence[str]) -> str:
    """Return blocks of Markdown as one HTML page that contains its figures; no other image is embedded."""
    figures = {block.path.name: block.path for block in blocks if isinstance(block, Figure)}
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse("\n\n".join(blocks))
    for opening, inline in pairwise(tokens):
        if opening.type == "heading_open" and (run := re.fullmatch(r"Run (\d+)", inline.content)):
            opening.attrSet("id", f"run-{run[1]}")
        for child in inline.children or []:
            if child.type == "image":
                content = figures[str(child.attrs["src"])].read_bytes()
                child.attrSet("src", f"data:image/png;base64,{base64.b64encode(content).decode()}")
    # Nothing is loaded and nothing runs, for any content of a record.
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style>"
    )
    body = parser.renderer.render(tokens, parser.options, {})
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'
