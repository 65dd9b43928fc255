"""A batch on a terminal, and as one page that needs nothing beside it and runs nothing (batch_page.html).

Numbers come first, then rows with their documents as text. On a terminal colours show which tokens are predicted; where
there are none (NO_COLOR, a file, a dumb terminal), brackets do. On the page the pointer over a token shows its id, its
place and what is predicted; a row of 1,024 tokens takes some 100 KB.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment
from rich.console import Console
from rich.text import Text

from megatron_neobert.inspection.batch_rows import EXAMPLES, MEANINGS, BatchRow, TokenView, TokenViews
from megatron_neobert.inspection.batch_summary import Summary, describe, histogram
from megatron_neobert.inspection.found_batch import FoundBatch
from megatron_neobert.text import visible

_STYLES = {
    "masked": "bold white on blue",
    "replaced": "bold black on yellow",
    "kept": "bold black on cyan",
    "special": "dim",
    "plain": "",
}
_NAME_WIDTH, _BAR_WIDTH = 12, 40


def print_summary(console: Console, found: FoundBatch, summary: Summary) -> None:
    """What is in the batch, in numbers."""
    console.print(Text(f"batch {found.iteration:,}", style="bold"))
    for name, line in describe(found, summary).items():
        _print_indented(console, name, line)
    bins = histogram(summary, seq_length=found.settings.data.seq_length)
    most = max(1, *(one.pieces for one in bins))
    for number, one in enumerate(bins):
        bar = "#" * -(-_BAR_WIDTH * one.pieces // most)
        _print_indented(console, "" if number else "slots", f"{one.first:>6,} to {one.last:>6,}  {bar} {one.pieces:,}")


def print_rows(console: Console, found: FoundBatch, rows: Iterator[BatchRow]) -> None:
    """The legend, and these rows."""
    views, marks = TokenViews(found.tokenizer), Marks(console)
    console.print()
    for fate, meaning in MEANINGS.items():
        shown = marks.show(EXAMPLES[fate])
        console.print(Text("  ").append_text(shown).append(f"{' ' * (13 - len(shown))}  {meaning}"))
    slots = found.settings.data.seq_length
    for row in rows:
        console.print()
        title = f"row {row.number:,} of micro-batch {row.micro_batch:,}: {row.used_slots:,} of {slots:,} slots"
        console.print(Text(title, style="bold"))
        several = len({piece.corpus for piece in row.pieces}) > 1 or len(found.sources) > 1
        for piece in row.pieces:
            corpus = f" of {visible(piece.corpus)}" if several else ""
            console.print(Text(f"  {piece.title}{corpus}", style="italic"))
            line = Text("    ")
            for token in views.of(piece):
                line.append(token.space)
                line.append_text(marks.show(token))
            console.print(line, soft_wrap=False)


class Marks:
    """How a terminal shows a token: with colours, or with brackets where it has none."""

    def __init__(self, console: Console) -> None:
        self.colours = console.color_system is not None and not console.no_color
        try:
            "→".encode(console.encoding)
            self._arrow = "→"
        except UnicodeEncodeError:
            self._arrow = "->"

    def show(self, token: TokenView) -> Text:
        """Its text, marked."""
        if token.fate in ("plain", "special"):
            return Text(token.text, style=_STYLES[token.fate] if self.colours else "")
        if token.fate == "replaced" or (token.fate == "masked" and not self.colours):
            seen = token.seen.strip("[]") if token.fate == "masked" else token.seen
            text = f"{seen}{self._arrow}{token.text}"
        else:
            text = token.text if self.colours else f"={token.text}"
        return Text(text, style=_STYLES[token.fate]) if self.colours else Text(f"[{text}]")


def _print_indented(console: Console, name: str, line: str) -> None:
    console.print(Text(f"  {name:<{_NAME_WIDTH}}{line}"), soft_wrap=True)


def to_html(found: FoundBatch, summary: Summary, rows: Sequence[BatchRow]) -> str:
    """The numbers of the batch, a legend, and these rows."""
    environment = Environment(autoescape=True, finalize=_without_control_characters, keep_trailing_newline=True)
    environment.filters["n"] = "{:,}".format
    slots = found.settings.data.seq_length
    bins = histogram(summary, seq_length=slots)
    template = environment.from_string(Path(__file__).with_name("batch_page.html").read_text(encoding="utf-8"))
    return template.render(
        iteration=found.iteration,
        lines=describe(found, summary),
        bins=bins,
        most=max(1, *(one.pieces for one in bins)),
        all_rows=summary.rows,
        legend=[(EXAMPLES[fate], meaning) for fate, meaning in MEANINGS.items()],
        rows=rows,
        slots=slots,
        several=len(found.sources) > 1,
        views=TokenViews(found.tokenizer),
    )


def _without_control_characters(value: Any) -> Any:
    """What documents and names of files hold, so that it cannot turn a page around; the result is escaped after it."""
    is_markup = hasattr(value, "__html__")  # what a macro of the template has made, its values escaped already
    return visible(value) if isinstance(value, str) and not is_markup else value
