"""A batch as one page that needs nothing beside it and runs nothing: what documents say is text, never markup.

The pointer over a token shows its id, its place and what is predicted. A switch, made of style alone, shows the rows
as the model sees them. A row of 1,024 tokens takes some 100 KB.
"""

import html
from collections.abc import Sequence

from megatron_neobert.inspection.batch_rows import Piece, Row
from megatron_neobert.inspection.batch_summary import Bin, Summary, describe, histogram
from megatron_neobert.inspection.found_batch import FoundBatch
from megatron_neobert.inspection.token_view import MEANINGS, Fate, TokenView, TokenViews, describe_piece
from megatron_neobert.text import visible

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # nothing is loaded and nothing runs
_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --soft: #595959; --page: #fff; --line: #d5d5d5; --a: #f3f5f7;
  --b: #e6ebf0; --bar: #4d7ea8; --masked: #0b5394; --masked-ink: #fff; --replaced: #f2c14e; --replaced-ink: #1a1a1a;
  --kept: #007a5e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --soft: #a8a8a8; --page: #16181b; --line: #3a3f45;
  --a: #1f2328; --b: #2a3038; --bar: #6ea3cf; --masked: #7db8e8; --masked-ink: #101214; --replaced: #e0ac2b;
  --replaced-ink: #101214; --kept: #5fd0ad; } }
body { font: 15px/1.6 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: var(--ink);
  background: var(--page); }
h1, h2, h3 { line-height: 1.2; }
h3 { margin: 2rem 0 .4rem; }
h3 small, .doc header, .soft { color: var(--soft); font-weight: normal; font-size: .85rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 1rem 0; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.lengths { display: grid; grid-template-columns: max-content 1fr max-content; gap: .1rem .6rem; max-width: 40rem;
  font-variant-numeric: tabular-nums; align-items: center; }
.lengths span:nth-child(3n+1) { text-align: right; }
.lengths i { background: var(--bar); height: .8rem; display: block; }
.fill { display: flex; height: .6rem; margin: 0 0 .5rem; border: 1px solid var(--line); }
.fill i { display: block; background: var(--bar); }
.fill i:nth-child(2n) { opacity: .55; }
.fill i.unused { opacity: 1; background: repeating-linear-gradient(135deg, var(--line) 0 3px, transparent 3px 7px); }
.doc { padding: .4rem .7rem; background: var(--a); }
.doc:nth-of-type(2n) { background: var(--b); }
.doc p { margin: .1rem 0 .2rem; overflow-wrap: anywhere; }
.doc i, .legend i { font-style: normal; }
bdi.s { color: var(--soft); font-size: .8em; }
b { border-radius: .2em; padding: 0 .15em; font-weight: 600; }
b.m { background: var(--masked); color: var(--masked-ink); }
b.r { background: var(--replaced); color: var(--replaced-ink); }
b.k { box-shadow: inset 0 0 0 2px var(--kept); }
b s { text-decoration: none; }
b.m s, #seen:checked ~ main b u { display: none; }
b u { text-decoration: none; }
#seen:checked ~ main b.m s { display: inline; }
.legend { list-style: none; padding: 0; }
.legend li { margin: .2rem 0; }
.switch { cursor: pointer; position: sticky; top: 0; background: var(--page); display: inline-block; padding: .3rem; }
"""
_CLASSES: dict[Fate, str] = {"masked": "m", "replaced": "r", "kept": "k", "special": "s"}
_EXAMPLES: dict[Fate, tuple[str, str]] = {
    "masked": ("word", "[MASK]"),
    "replaced": ("word", "other"),
    "kept": ("word", "word"),
    "special": ("[CLS]", "[CLS]"),
}


def to_html(found: FoundBatch, summary: Summary, rows: Sequence[Row]) -> str:
    """The numbers of the batch, a legend, and these rows."""
    views = TokenViews(found.tokenizer)
    title = html.escape(f"batch {found.iteration:,}")
    lines = "".join(f"<dt>{_text(name)}</dt><dd>{_text(line)}</dd>" for name, line in describe(found, summary).items())
    several = len(found.sources) > 1
    sections = [_row(row, views, slots=found.settings.data.seq_length, names_corpus=several) for row in rows]
    shown = f"{len(rows):,} of {summary.rows:,} rows" if rows else "no rows were asked for"
    body = f"""<h1>{title}</h1>
<dl>{lines}</dl>
<h2>Slots that documents take</h2>
{_lengths(histogram(summary, seq_length=found.settings.data.seq_length))}
<h2>Rows <small class="soft">{shown}</small></h2>
<ul class="legend">{"".join(_legend(fate, meaning) for fate, meaning in MEANINGS.items())}</ul>
<input type="checkbox" id="seen"> <label class="switch" for="seen">as the model sees it, without the answers</label>
<main>
{"".join(sections)}</main>"""
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>'
        f"<style>{_STYLE}</style>"
    )
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _lengths(bins: Sequence[Bin]) -> str:
    most = max(1, *(one.pieces for one in bins))
    cells = (
        f"<span>{one.first:,} to {one.last:,}</span>"
        f'<span><i style="width:{100 * one.pieces / most:.1f}%"></i></span><span>{one.pieces:,}</span>'
        for one in bins
    )
    return f'<div class="lengths">{"".join(cells)}</div>'


def _row(row: Row, views: TokenViews, *, slots: int, names_corpus: bool) -> str:
    predicted = sum(piece.predicted for piece in row.pieces)
    unused = slots - row.used_slots
    bar = "".join(_share(len(piece.seen_s), slots, describe_piece(piece)) for piece in row.pieces)
    if unused:
        bar += _share(unused, slots, f"{unused:,} unused slots", 'class="unused" ')
    return (
        f"<section><h3>row {row.number:,} <small>micro-batch {row.micro_batch:,} &middot; {row.used_slots:,} of "
        f"{slots:,} slots &middot; {_documents(len(row.pieces))} &middot; {predicted:,} predicted</small></h3>"
        f'<div class="fill">{bar}</div>\n'
        + "".join(_piece(piece, views, names_corpus=names_corpus) for piece in row.pieces)
        + "</section>\n"
    )


def _share(count: int, slots: int, title: str, attributes: str = "") -> str:
    return f'<i {attributes}style="width:{100 * count / slots:.3f}%" title="{_text(title)}"></i>'


def _piece(piece: Piece, views: TokenViews, *, names_corpus: bool) -> str:
    corpus = f" of {_text(piece.corpus)}" if names_corpus else ""
    tokens = "".join(_token(token) for token in views.of(piece))
    last = piece.first_slot + len(piece.seen_s) - 1
    return (
        f'<article class="doc"><header>{_text(describe_piece(piece))}{corpus} &middot; slots {piece.first_slot:,} to '
        f'{last:,}</header><p dir="auto">{tokens}</p></article>\n'
    )


def _token(token: TokenView) -> str:
    text, title = _text(token.text), _text(_title(token))
    if token.fate == "special":  # apart, because the first letters of the text decide about its direction
        return f'{token.space}<bdi class="s" title="{title}">{text}</bdi>'
    if token.fate == "plain":
        return f'{token.space}<i title="{title}">{text}</i>'
    return f'{token.space}<b class="{_CLASSES[token.fate]}" title="{title}">{_predicted(token)}</b>'


def _predicted(token: TokenView) -> str:
    """What the model sees, then what it has to say."""
    if token.fate == "kept":
        return _text(token.text)
    arrow = "&rarr;" if token.fate == "replaced" else ""
    return f"<s>{_text(token.seen)}</s><u>{arrow}{_text(token.text)}</u>"


def _title(token: TokenView) -> str:
    place = "" if token.place is None else f", token {token.place:,} of the document"
    where = f"slot {token.slot:,}{place}"
    if token.fate in ("plain", "special"):
        return f"id {token.id}, {where}"
    return f"label {token.text} (id {token.id}), the model sees {token.seen} (id {token.seen_id}), {where}"


def _legend(fate: Fate, meaning: str) -> str:
    text, seen = _EXAMPLES[fate]
    token = TokenView(fate, "", text, seen, 0, 0, 0, None)
    shown = (
        f'<bdi class="s">{text}</bdi>' if fate == "special" else f'<b class="{_CLASSES[fate]}">{_predicted(token)}</b>'
    )
    return f"<li>{shown} {_text(meaning)}</li>"


def _text(text: str) -> str:
    return html.escape(visible(text))


def _documents(count: int) -> str:
    return "1 document" if count == 1 else f"{count:,} documents"
