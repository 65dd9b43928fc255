"""A batch in numbers: fill, documents and their lengths, and what became of the tokens that are predicted."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.config.data_path import parse_data_path
from megatron_neobert.data.batches.inputs import token_ids_of
from megatron_neobert.data.batches.order import COMPONENT_SHIFT
from megatron_neobert.inspection.found_batch import NO_LABEL, FoundBatch, FoundMicroBatch, Share
from megatron_neobert.text import percent, visible


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
    tokens: int  # slots that hold a document, its [CLS] and its [SEP]
    unknown: int  # [UNK] in the text
    ordinary: int  # tokens that may be predicted
    masked: int
    replaced: int  # by another token
    kept: int
    lengths_n: NDArray[np.int64]  # slots of each piece
    shortened: int  # pieces behind which tokens of the document are not in this row
    blend: dict[str, list[int]]  # pieces and slots of each component of --data-path

    @property
    def predicted(self) -> int:
        return self.masked + self.replaced + self.kept


def summarize(found: FoundBatch) -> Summary:
    """Over all rows of the batch, whichever of them are shown."""
    ids = token_ids_of(found.tokenizer)
    fates: Counter[str] = Counter()
    for part in found.parts:
        fates += _fates_of(part, found.tokenizer.mask_id, found.tokenizer.unk_id, ids.is_special_v)
    segments = [part.rows.segments for part in found.parts]
    components_n = np.concatenate([one.documents_n >> COMPONENT_SHIFT for one in segments])
    lengths_n = np.concatenate([one.slots_n for one in segments])
    names = [str(component) for component in parse_data_path(found.settings.data.data_path)]
    pieces_c = np.bincount(components_n, minlength=len(names)).tolist()
    slots_c = np.bincount(components_n, weights=lengths_n, minlength=len(names)).astype(np.int64).tolist()
    return Summary(
        rows=sum(len(part.rows) for part in found.parts),
        slots=sum(len(part.batch.tokens_t) for part in found.parts),
        tokens=sum(part.batch.real_tokens for part in found.parts),
        unknown=fates["unknown"],
        ordinary=fates["ordinary"],
        masked=fates["masked"],
        replaced=fates["replaced"],
        kept=fates["kept"],
        lengths_n=lengths_n,
        shortened=sum(_shortened(found, part) for part in found.parts),
        blend={name: counts for name, *counts in zip(names, pieces_c, slots_c, strict=True)},
    )


def _fates_of(part: FoundMicroBatch, mask: int, unknown: int, is_special_v: NDArray[np.bool_]) -> Counter[str]:
    seen_t = part.batch.tokens_t.numpy()[: part.batch.real_tokens]
    labels_t = part.labels_t[: part.batch.real_tokens]
    predicted_t = labels_t != NO_LABEL
    original_t = np.where(predicted_t, labels_t, seen_t)
    masked_t, kept_t = predicted_t & (seen_t == mask), predicted_t & (seen_t == labels_t)
    counts = {
        "unknown": original_t == unknown,
        "ordinary": ~is_special_v[original_t],
        "masked": masked_t,
        "kept": kept_t,
        "replaced": predicted_t & ~masked_t & ~kept_t,
    }
    return Counter({name: int(values.sum()) for name, values in counts.items()})


def _shortened(found: FoundBatch, part: FoundMicroBatch) -> int:
    segments = part.rows.segments
    tags_n, numbers_n = segments.documents_n >> COMPONENT_SHIFT, segments.documents_n & ((1 << COMPONENT_SHIFT) - 1)
    ends_n = segments.starts_n + segments.lengths_n
    return sum(
        int((ends_n[own] < found.sources[tag].corpus.lengths[numbers_n[own]]).sum())
        for tag in np.unique(tags_n).tolist()
        for own in [tags_n == tag]
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
    fates = {"hidden": one.masked, "replaced by another token": one.replaced, "left as they are": one.kept}
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
        + (", ".join(f"{count:,} {name}" for name, count in fates.items() if count) or "none"),
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
