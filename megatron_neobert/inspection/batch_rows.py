"""The rows of a batch, the documents in them, and each token as text: what the model sees and what it has to predict.

Letters: `t` tokens of a micro-batch, `s` slots of one piece of a document.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.config.data_path import parse_data_path
from megatron_neobert.data.corpus.reader import Corpus
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer
from megatron_neobert.inspection.found_batch import FoundBatch
from megatron_neobert.text import percent, visible

NO_LABEL = -1
PREDICTED = {"masked": "hidden", "replaced": "replaced by another token", "kept": "left as they are"}
_REPLACEMENT = "\ufffd"
_BEFORE = "a"  # decoders treat the first piece apart: what a piece adds is seen behind another one


@dataclass(frozen=True)
class Piece:
    """A document, or a part of one, in a row, with its [CLS] and [SEP]."""

    component: int  # of --data-path
    corpus: str
    document: int
    epoch: int
    first_token: int  # of the document, as the next two
    text_tokens: int
    document_tokens: int
    seen_s: NDArray[np.int64]
    labels_s: NDArray[np.int64]

    @property
    def title(self) -> str:
        """Number of the document, and the part of it that is here."""
        part = f"{self.text_tokens:,} of {self.document_tokens:,} tokens from {self.first_token:,} on"
        if self.text_tokens == self.document_tokens:
            part = f"whole, {self.document_tokens:,} tokens"
        predicted = int((self.labels_s != NO_LABEL).sum())
        return f"document {self.document:,}, epoch {self.epoch}: {part}, {predicted:,} predicted"


@dataclass(frozen=True)
class BatchRow:
    """One row of the global batch."""

    number: int
    micro_batch: int
    pieces: list[Piece]

    @property
    def used_slots(self) -> int:
        return sum(len(piece.seen_s) for piece in self.pieces)


def rows_of(found: FoundBatch) -> Iterator[BatchRow]:
    """Yield the rows of the batch, each with its documents."""
    for part in found.parts:
        tokens_t = part.batch.tokens_t.numpy()
        labels_t = np.full(len(tokens_t), NO_LABEL)
        labels_t[part.batch.masked_positions_m.numpy()] = part.batch.labels_m.numpy()
        segments, offsets = part.rows.segments, part.rows.row_offsets
        ends = np.cumsum(segments.slots_n)
        for place in range(len(part.rows)):
            members = range(offsets[place], offsets[place + 1])
            pieces = []
            for member in members:
                end = int(ends[member])
                start = end - int(segments.slots_n[member])
                component, number = int(segments.components_n[member]), int(segments.numbers_n[member])
                corpus = found.sources[component].corpus
                assert isinstance(corpus, Corpus), "the inputs of a run are opened from files"
                pieces.append(
                    Piece(
                        component=component,
                        corpus=str(corpus.prefix),
                        document=number,
                        epoch=int(segments.epochs_n[member]),
                        first_token=int(segments.starts_n[member]),
                        text_tokens=int(segments.lengths_n[member]),
                        document_tokens=int(corpus.lengths_of(np.array([number]))[0]),
                        seen_s=tokens_t[start:end],
                        labels_s=labels_t[start:end],
                    )
                )
            yield BatchRow(number=part.number * len(part.rows) + place, micro_batch=part.number, pieces=pieces)


def kinds_of(tokenizer: Tokenizer, seen_s: NDArray[np.int64], labels_s: NDArray[np.int64]) -> list[str]:
    """Return a key of PREDICTED for each predicted slot, and "special" or "plain" for the others."""
    is_predicted_s = labels_s != NO_LABEL
    cases: dict[str, NDArray[np.bool_]] = {  # the first that is true counts
        "special": ~is_predicted_s & np.isin(seen_s, tokenizer.special_ids),
        "plain": ~is_predicted_s,
        "masked": seen_s == tokenizer.mask_id,
        "kept": seen_s == labels_s,
    }
    return np.select(list(cases.values()), list(cases), "replaced").tolist()


def describe(found: FoundBatch) -> dict[str, str]:
    """Return the numbers of all rows of the batch in words, a name before each line."""
    data, place, rows = found.settings.data, found.cursor, list(rows_of(found))
    pieces = [piece for row in rows for piece in row.pieces]
    seen_t, labels_t = (np.concatenate([getattr(piece, name) for piece in pieces]) for name in ("seen_s", "labels_s"))
    lengths_n, slots = np.array([len(piece.seen_s) for piece in pieces]), len(rows) * data.seq_length
    used, short = len(seen_t), sum(piece.first_token + piece.text_tokens < piece.document_tokens for piece in pieces)
    kinds = Counter(kinds_of(found.tokenizer, seen_t, labels_t))
    predicted = sum(kinds[kind] for kind in PREDICTED)
    ordinary = predicted + kinds["plain"]  # tokens that may be predicted
    unknown = int((np.where(labels_t == NO_LABEL, seen_t, labels_t) == found.tokenizer.unk_id).sum())
    alone = "each document sees itself alone" if data.batch_layout == "packed" else "documents see all of their row"
    lines = {
        "starts at": f"epoch {place.epoch}, window {place.window:,}, row {place.row:,}",
        "rows": f"{len(rows):,} of {data.seq_length:,} slots, in {len(found.parts):,} micro-batches; {alone}",
        "fill": f"{percent(used / slots, digits=2)}: {used:,} tokens, {slots - used:,} slots unused",
        "documents": f"{len(pieces):,} pieces, {len(pieces) / len(rows):.1f} per row; {short:,} of them do not reach "
        "the end of their document",
        "lengths": f"{lengths_n.min():,} to {lengths_n.max():,} slots, median {int(np.median(lengths_n)):,}, mean "
        f"{lengths_n.mean():,.0f}",
        "predicted": f"{predicted:,} tokens, {percent(predicted / max(ordinary, 1), digits=2)} of the {ordinary:,} "
        f"that may be (--mask-prob {data.mask_prob:g}): "
        + (", ".join(f"{kinds[kind]:,} {word}" for kind, word in PREDICTED.items() if kinds[kind]) or "none"),
        "unknown": f"{unknown:,} tokens, {percent(unknown / used, digits=2)} of all",
    }
    names = [visible(str(component)) for component in parse_data_path(data.data_path)]
    if len(names) > 1:
        sizes = [[len(piece.seen_s) for piece in pieces if piece.component == number] for number in range(len(names))]
        lines["blend"] = ", ".join(
            f"{name} {len(size):,} pieces with {percent(sum(size) / used)} of the tokens"
            for name, size in zip(names, sizes, strict=True)
        )
    return lines


def to_text(piece: Piece, tokenizer: Tokenizer) -> str:
    """Return the tokens of a piece as text, each predicted one in brackets: what the model sees, and its label."""
    words = []
    kinds = kinds_of(tokenizer, piece.seen_s, piece.labels_s)
    for kind, seen, label in zip(kinds, piece.seen_s.tolist(), piece.labels_s.tolist(), strict=True):
        space, text = token_text(tokenizer, seen if label == NO_LABEL else label)
        if kind in PREDICTED:
            text = f"[={text}]" if kind == "kept" else f"[{token_text(tokenizer, seen)[1].strip('[]')}->{text}]"
        words.append(space + text)
    return "".join(words).lstrip(" ")


def token_text(tokenizer: Tokenizer, token: int) -> tuple[str, str]:
    """Return the space before an id, or nothing, and its letters, which are never empty."""
    backend = tokenizer.backend
    piece, decoder = backend.id_to_token(token), backend.decoder
    assert piece is not None, f"{token=} of {backend.get_vocab_size()}"
    if token in tokenizer.special_ids or decoder is None:
        return " ", visible(piece)
    alone, behind = decoder.decode([_BEFORE]), decoder.decode([_BEFORE, piece])
    text = behind[len(alone) :]
    if not behind.startswith(alone) or not text.strip(" ") or _REPLACEMENT in text:
        return "", visible(piece)  # a part of a character has no text; the piece shows which part it is
    return " " if text.startswith(" ") else "", visible(text.removeprefix(" "))
