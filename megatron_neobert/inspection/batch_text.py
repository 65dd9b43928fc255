"""A global batch as text: its packed sequences, their documents, and each token as the model sees it.

Letters: `t` tokens of a micro-batch, `s` tokens of one segment.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.config.data_path import parse_data_path
from megatron_neobert.data.batches.windows import IGNORED_LABEL
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer
from megatron_neobert.inspection.global_batch import GlobalBatch
from megatron_neobert.text import percent, visible

# Kinds of predicted tokens, and their descriptions.
PREDICTED = {"masked": "hidden", "replaced": "replaced by another token", "unchanged": "left as they are"}
_REPLACEMENT = "\ufffd"
# Decoders treat the first token of a text differently, so a token is decoded after this one.
_CONTEXT = "a"


@dataclass(frozen=True)
class Segment:
    """A document or a range of its tokens in a packed sequence, with its [CLS] and [SEP]."""

    component: int  # index in --data-path
    corpus: str
    document: int
    epoch: int
    first_token: int  # index in the document
    text_tokens: int  # without [CLS] and [SEP]
    document_tokens: int
    input_ids_s: NDArray[np.int64]
    labels_s: NDArray[np.int64]  # IGNORED_LABEL where nothing is predicted

    @property
    def title(self) -> str:
        """One line such as `document 7, epoch 0: 100 of 310 tokens from token 50 on, 20 predicted`, numbered from 0."""
        extent = f"{self.text_tokens:,} of {self.document_tokens:,} tokens from token {self.first_token:,} on"
        if self.text_tokens == self.document_tokens:
            extent = f"whole, {self.document_tokens:,} tokens"
        predicted = int((self.labels_s != IGNORED_LABEL).sum())
        suffix = f", {predicted:,} predicted" if predicted else ""
        return f"document {self.document:,}, epoch {self.epoch}: {extent}{suffix}"


@dataclass(frozen=True)
class PackedSequence:
    """One packed sequence of a global batch."""

    number: int  # in the global batch, from 0
    micro_batch: int
    segments: list[Segment]

    @property
    def tokens(self) -> int:
        """Number of tokens without padding."""
        return sum(len(segment.input_ids_s) for segment in self.segments)


def read_sequences(global_batch: GlobalBatch) -> Iterator[PackedSequence]:
    """Yield the packed sequences of a global batch in order, each with its documents, tokens and labels."""
    for micro_batch, (packed, batch) in enumerate(global_batch.micro_batches):
        tokens_t = batch.tokens_t.numpy()
        labels_t = np.full(len(tokens_t), IGNORED_LABEL)
        if not batch.is_causal:  # otherwise all tokens are inputs as they are
            labels_t[batch.masked_positions_m.numpy()] = batch.labels_m.numpy()
        columns, bounds = packed.segments, np.append(0, np.cumsum(packed.segments.packed_lengths_n))
        segments = []
        for index, (start, end) in enumerate(pairwise(bounds.tolist())):
            component, document = int(columns.components_n[index]), int(columns.numbers_n[index])
            corpus = global_batch.sources[component].corpus
            segments.append(
                Segment(
                    component=component,
                    corpus=str(corpus.prefix),
                    document=document,
                    epoch=int(columns.epochs_n[index]),
                    first_token=int(columns.starts_n[index]),
                    text_tokens=int(columns.lengths_n[index]),
                    document_tokens=int(corpus.lengths_of(np.array([document]))[0]),
                    input_ids_s=tokens_t[start:end],
                    labels_s=labels_t[start:end],
                )
            )
        for number, (first, stop) in enumerate(pairwise(packed.offsets.tolist()), start=micro_batch * len(packed)):
            yield PackedSequence(number, micro_batch, segments[first:stop])


def token_kinds(tokenizer: Tokenizer, input_ids_s: NDArray[np.int64], labels_s: NDArray[np.int64]) -> list[str]:
    """Return the kind of each token: "masked", "replaced" or "unchanged" if predicted, else "special" or "plain"."""
    is_predicted_s = labels_s != IGNORED_LABEL
    # The first condition that holds decides.
    conditions: dict[str, NDArray[np.bool_]] = {
        "special": ~is_predicted_s & np.isin(input_ids_s, tokenizer.special_ids),
        "plain": ~is_predicted_s,
        "masked": input_ids_s == tokenizer.mask_id,
        "unchanged": input_ids_s == labels_s,
    }
    return np.select(list(conditions.values()), list(conditions), "replaced").tolist()


def describe(global_batch: GlobalBatch) -> dict[str, str]:
    """Return the statistics of a global batch as name -> line of text, such as "packing", "lengths" and "predicted"."""
    data, cursor = global_batch.settings.data, global_batch.cursor
    sequences = list(read_sequences(global_batch))
    segments = [segment for sequence in sequences for segment in sequence.segments]
    inputs_t = np.concatenate([segment.input_ids_s for segment in segments])
    labels_t = np.concatenate([segment.labels_s for segment in segments])
    lengths_n, capacity = np.array([len(segment.input_ids_s) for segment in segments]), len(sequences) * data.seq_length
    tokens = len(inputs_t)
    incomplete = sum(segment.first_token + segment.text_tokens < segment.document_tokens for segment in segments)
    kinds = Counter(token_kinds(global_batch.tokenizer, inputs_t, labels_t))
    predicted = sum(kinds[kind] for kind in PREDICTED)
    predictable = predicted + kinds["plain"]
    unknown = int((np.where(labels_t == IGNORED_LABEL, inputs_t, labels_t) == global_batch.tokenizer.unk_id).sum())
    attended = "its document" if data.batch_layout == "packed" else "its packed sequence"
    attended = f"the tokens before it in {attended}" if data.objective == "clm" else attended
    lines = {
        "starts at": f"epoch {cursor.epoch}, window {cursor.window:,}, packed sequence {cursor.row:,}",
        "sequences": f"{len(sequences):,} of {data.seq_length:,} tokens, in {len(global_batch.micro_batches):,} "
        f"micro-batches; each token attends to {attended}",
        "packing": f"{percent(tokens / capacity, digits=2)} efficiency: {tokens:,} tokens, "
        f"{capacity - tokens:,} unused",
        "segments": f"{len(segments):,}, {len(segments) / len(sequences):.1f} per packed sequence; {incomplete:,} of "
        "them do not reach the end of their document",
        "lengths": f"{lengths_n.min():,} to {lengths_n.max():,} tokens, median {int(np.median(lengths_n)):,}, mean "
        f"{lengths_n.mean():,.0f}",
        "predicted": "every next token (--objective clm)"
        if data.objective == "clm"
        else f"{predicted:,} tokens, {percent(predicted / max(predictable, 1), digits=2)} of the "
        f"{predictable:,} tokens that are not special (--mask-prob {data.mask_prob:g}): "
        + (", ".join(f"{kinds[kind]:,} {text}" for kind, text in PREDICTED.items() if kinds[kind]) or "none"),
        "unknown": f"{unknown:,} tokens, {percent(unknown / tokens, digits=2)} of all",
    }
    names = [visible(str(component)) for component in parse_data_path(data.data_path)]
    if len(names) > 1:
        sizes = [[len(seg.input_ids_s) for seg in segments if seg.component == number] for number in range(len(names))]
        lines["blend"] = ", ".join(
            f"{name} {len(size):,} segments with {percent(sum(size) / tokens)} of the tokens"
            for name, size in zip(names, sizes, strict=True)
        )
    return lines


def to_text(segment: Segment, tokenizer: Tokenizer) -> str:
    """Return the tokens of a segment as text. Predicted tokens are `[input->label]`, or `[=label]` if unchanged."""
    texts = []
    kinds = token_kinds(tokenizer, segment.input_ids_s, segment.labels_s)
    for kind, input_id, label in zip(kinds, segment.input_ids_s.tolist(), segment.labels_s.tolist(), strict=True):
        space, text = token_text(tokenizer, input_id if label == IGNORED_LABEL else label)
        if kind in PREDICTED:
            text = (
                f"[={text}]" if kind == "unchanged" else f"[{token_text(tokenizer, input_id)[1].strip('[]')}->{text}]"
            )
        texts.append(space + text)
    return "".join(texts).lstrip(" ")


def token_text(tokenizer: Tokenizer, token_id: int) -> tuple[str, str]:
    """Return the space before a token (" " or "") and the token's text.

    A special token, and a token that cannot be decoded alone, is shown as its entry in the vocabulary.
    """
    backend = tokenizer.backend
    token, decoder = backend.id_to_token(token_id), backend.decoder
    assert token is not None, f"{token_id=} of {backend.get_vocab_size()}"
    if token_id in tokenizer.special_ids or decoder is None:
        return " ", visible(token)
    context, decoded = decoder.decode([_CONTEXT]), decoder.decode([_CONTEXT, token])
    text = decoded[len(context) :]
    if not decoded.startswith(context) or not text.strip(" ") or _REPLACEMENT in text:
        # An incomplete character cannot be decoded; the entry of the vocabulary is shown instead.
        return "", visible(token)
    return " " if text.startswith(" ") else "", visible(text.removeprefix(" "))
