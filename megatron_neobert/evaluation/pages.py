"""Tables as CSV and Markdown, and a report in its two forms: Markdown, and one HTML page that needs nothing beside it.

What comes from records (names of models, commands) is text and never markup.
"""

import base64
import csv
import html
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPORTED = "reported"  # in the last column: not measured here, but printed in the paper

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1a1a1a; }
h1, h2, h3 { line-height: 1.2; margin: 2rem 0 .6rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .6rem 0; }
th, td { padding: .25rem .6rem; text-align: left; border-bottom: 1px solid #ddd; vertical-align: top; }
th { border-bottom: 2px solid #888; }
.number { text-align: right; }
tr.reported { color: #666; font-style: italic; }
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


def to_markdown(lines: Sequence[Sequence[Any]], *, numeric: Sequence[bool] = ()) -> str:
    """A table whose first line is its header; numeric columns are set to the right."""
    alignment = ["---:" if right else "---" for right in numeric] or ["---"] * len(lines[0])
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in (lines[0], alignment, *lines[1:]))


@dataclass(frozen=True)
class Row:
    """Cells, and the number of the run they come from; None where the paper reports them."""

    cells: Sequence[str]
    run: int | None


@dataclass(frozen=True)
class Table:
    """Rows under a header, to which a column with each row's run is added."""

    header: Sequence[str]
    rows: Sequence[Row]

    @property
    def numeric(self) -> list[bool]:
        """Which columns hold numbers, or what stands for one that is not there."""
        columns = zip(*(row.cells for row in self.rows), strict=True)
        return [all(re.match(r"\d|–|-$|missing$", cell) for cell in column) for column in columns]


@dataclass(frozen=True)
class Figure:
    """A PNG that lies beside the report."""

    path: Path
    caption: str


@dataclass(frozen=True)
class Code:
    """Lines to be shown as they are."""

    text: str


Block = str | Table | Figure | Code  # a string is a paragraph


@dataclass(frozen=True)
class Section:
    """A heading and what stands below it."""

    title: str
    blocks: Sequence[Block]
    level: int = 2
    run: int | None = None  # which run it describes


def page_to_markdown(title: str, sections: Sequence[Section]) -> str:
    """The report for a repository or an issue; figures are links to the files beside it."""
    parts = [f"# {_escape(title)}"]
    for section in sections:
        parts.append(f"{'#' * section.level} {_escape(section.title)}")
        parts += [_block_to_markdown(block) for block in section.blocks]
    return "\n\n".join(parts) + "\n"


def page_to_html(title: str, sections: Sequence[Section]) -> str:
    """The report as one page, figures inside; runs are links to their descriptions."""
    parts = [f"<h1>{html.escape(title)}</h1>"]
    for section in sections:
        anchor = "" if section.run is None else f' id="run{section.run}"'
        parts.append(f"<h{section.level}{anchor}>{html.escape(section.title)}</h{section.level}>")
        parts += [_block_to_html(block) for block in section.blocks]
    # Nothing is loaded and nothing runs, for any content of a record.
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style>"
    )
    body = "\n".join(parts)
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _block_to_markdown(block: Block) -> str:
    if isinstance(block, str):
        return _escape(block)
    if isinstance(block, Code):  # indented, because a fence could be closed by what stands in it
        return "\n".join(f"    {line}" for line in block.text.splitlines())
    if isinstance(block, Figure):
        return f"![{_escape(block.caption)}]({block.path.name})"
    lines = [[*block.header, "run"]]
    lines += [[*row.cells, REPORTED if row.run is None else f"[{row.run}]"] for row in block.rows]
    return to_markdown([[_escape(cell) for cell in line] for line in lines], numeric=[*block.numeric, False])


def _escape(text: str) -> str:
    # Between letters, an underscore is one.
    return re.sub(r"([\\`*\[\]<>|#$&]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", " ".join(text.split()))


def _block_to_html(block: Block) -> str:
    if isinstance(block, str):
        return f"<p>{html.escape(block)}</p>"
    if isinstance(block, Code):
        return f"<pre>{html.escape(block.text)}</pre>"
    if isinstance(block, Figure):
        content = base64.b64encode(block.path.read_bytes()).decode()
        return f'<img alt="{html.escape(block.caption)}" src="data:image/png;base64,{content}">'
    lines = [_line_to_html("th", block.header, block.numeric, "run")]
    for row in block.rows:
        run = REPORTED if row.run is None else f'<a href="#run{row.run}">[{row.run}]</a>'
        line = _line_to_html("td", row.cells, block.numeric, run)
        lines.append(line.replace("<tr>", '<tr class="reported">', 1) if row.run is None else line)
    return f'<div class="wide"><table>\n{"".join(lines)}</table></div>'


def _line_to_html(tag: str, cells: Sequence[str], numeric: Sequence[bool], run: str) -> str:
    """A line of a table; `run` is markup."""
    inner = ""
    for cell, is_number in zip(cells, numeric, strict=True):
        text = html.escape(cell).replace(" ± ", "&nbsp;±&nbsp;")
        inner += f'<{tag} class="number">{text}</{tag}>' if is_number else f"<{tag}>{text}</{tag}>"
    return f"<tr>{inner}<{tag}>{run}</{tag}></tr>\n"
