"""A batch on a terminal, and as one page that needs nothing beside it and runs nothing (batch_page.html).

Numbers come first, then rows with their documents as text. On a terminal colours show which tokens are predicted; where
there are none (NO_COLOR, a file, a dumb terminal), brackets do. On the page the pointer over a token shows its id, its
place and what is predicted; a row of 1,024 tokens takes some 100 KB.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from megatron_neobert.config.data_path import parse_data_path
from megatron_neobert.inspection.batch_rows import (
    EXAMPLES,
    MEANINGS,
    BatchRow,
    Fate,
    TokenView,
    TokenViews,
    fates_of,
    rows_of,
)
from megatron_neobert.inspection.found_batch import NO_LABEL, FoundBatch, Share
from megatron_neobert.text import percent, visible

_STYLES = {
    "masked": "bold white on blue",
    "replaced": "bold black on yellow",
    "kept": "bold black on cyan",
    "special": "dim",
    "plain": "",
}
_NAME_WIDTH, _BAR_WIDTH = 12, 40


@dataclass(frozen=True)
class LengthBin:
    """Pieces of documents that take `first` to `last` slots."""

    first: int
    last: int
    pieces: int


@dataclass(frozen=True)
class Summary:
    """Counts over all rows that were looked at."""

    rows: int
    slots: int
    unknown: int  # [UNK] in the text
    fates: Counter[Fate]  # of all tokens
    lengths_n: NDArray[np.int64]  # slots of each piece
    shortened: int  # pieces behind which tokens of the document are not in this row
    blend: dict[str, list[int]]  # pieces and slots of each component of --data-path

    @property
    def tokens(self) -> int:
        """Slots that hold a document, its [CLS] and its [SEP]."""
        return int(self.lengths_n.sum())

    @property
    def predicted(self) -> int:
        return self.fates["masked"] + self.fates["replaced"] + self.fates["kept"]

    @property
    def ordinary(self) -> int:
        """Tokens that may be predicted."""
        return self.predicted + self.fates["plain"]


def summarize(found: FoundBatch) -> Summary:
    """Count over all rows of the batch, whichever of them are shown."""
    pieces = [piece for row in rows_of(found) for piece in row.pieces]
    seen_t = np.concatenate([piece.seen_s for piece in pieces])
    labels_t = np.concatenate([piece.labels_s for piece in pieces])
    original_t = np.where(labels_t == NO_LABEL, seen_t, labels_t)
    counts = [[0, 0] for _ in found.sources]
    for piece in pieces:
        counts[piece.component][0] += 1
        counts[piece.component][1] += len(piece.seen_s)
    names = map(str, parse_data_path(found.settings.data.data_path))
    return Summary(
        rows=sum(len(part.rows) for part in found.parts),
        slots=sum(len(part.batch.tokens_t) for part in found.parts),
        unknown=int((original_t == found.tokenizer.unk_id).sum()),
        fates=Counter(fates_of(found.tokenizer, seen_t, labels_t)),
        lengths_n=np.array([len(piece.seen_s) for piece in pieces]),
        shortened=sum(piece.first_token + piece.text_tokens < piece.document_tokens for piece in pieces),
        blend=dict(zip(names, counts, strict=True)),
    )


def histogram(summary: Summary, *, seq_length: int) -> list[LengthBin]:
    """Lengths by powers of two, up to a whole row."""
    bins, first, last = [], 1, 8
    while first <= seq_length:
        last = min(last, seq_length)
        inside = (summary.lengths_n >= first) & (summary.lengths_n <= last)
        bins.append(LengthBin(first, last, int(inside.sum())))
        first, last = last + 1, 2 * last
    return bins


def describe(found: FoundBatch, summary: Summary) -> dict[str, str]:
    """The summary in words, a name before each line."""
    data, place, one, lengths_n = found.settings.data, found.cursor, summary, summary.lengths_n
    alone = "each document sees itself alone" if data.batch_layout == "packed" else "documents see all of their row"
    words: dict[Fate, str] = {"masked": "hidden", "replaced": "replaced by another token", "kept": "left as they are"}
    lines = {
        "of": _whose(found.share),
        "starts at": f"epoch {place.epoch}, window {place.window:,}, row {place.row:,}",
        "rows": f"{one.rows:,} of {data.seq_length:,} slots, in {len(found.parts):,} micro-batches; {alone}",
        "fill": f"{percent(one.tokens / one.slots, digits=2)}: {one.tokens:,} tokens, "
        f"{one.slots - one.tokens:,} slots unused",
        "documents": f"{len(lengths_n):,} pieces, {len(lengths_n) / one.rows:.1f} per row; {one.shortened:,} of them "
        "do not reach the end of their document",
        "lengths": f"{lengths_n.min():,} to {lengths_n.max():,} slots, median {int(np.median(lengths_n)):,}, mean "
        f"{lengths_n.mean():,.0f}",
        "predicted": f"{one.predicted:,} tokens, {percent(one.predicted / max(one.ordinary, 1), digits=2)} of the "
        f"{one.ordinary:,} that may be (--mask-prob {data.mask_prob:g}): "
        + (", ".join(f"{one.fates[fate]:,} {name}" for fate, name in words.items() if one.fates[fate]) or "none"),
        "unknown": f"{one.unknown:,} tokens, {percent(one.unknown / one.tokens, digits=2)} of all",
    }
    if len(found.sources) > 1:
        lines["blend"] = ", ".join(
            f"{visible(name)} {pieces:,} pieces with {percent(slots / one.tokens)} of the tokens"
            for name, (pieces, slots) in one.blend.items()
        )
    return lines


def _whose(share: Share | None) -> str:
    if share is None:
        return "all ranks"
    text = f"rank {share.rank}, which is data-parallel rank {share.data_parallel_rank} of {share.data_parallel_size}"
    if share.context_parallel_size == 1:
        return text
    part = f"part {share.context_parallel_rank + 1} of {share.context_parallel_size}"
    return f"{text}; of each micro-batch it holds {part} by slots, shown is the whole"


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
        for piece in row.pieces:
            corpus = f" of {visible(piece.corpus)}" if len(found.sources) > 1 else ""
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
