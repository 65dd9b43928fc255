"""What an iteration reads: documents, tokens and epochs, from rows that are packed as training packs them.

The first iteration's rows stand for all: rows of a window are shuffled, so they are like any others. Packing reads
lengths alone, no token, and takes milliseconds.
"""

from dataclasses import dataclass

import numpy as np

from megatron_neobert.config import Settings
from megatron_neobert.data.blend import open_rows
from megatron_neobert.data.inputs import Inputs, batch_settings
from megatron_neobert.data.order import COMPONENT_SHIFT
from megatron_neobert.data.rows import Cursor


@dataclass(frozen=True)
class IterationSample:
    """The first iteration."""

    documents: int  # that begin in it; a document cut into several counts once
    tokens: int  # of documents, [CLS] and [SEP] included
    fill: float  # share of the slots that hold one
    tokens_of_a_tokens_document: float  # how many tokens the average token attends to
    epochs: tuple[float, ...]  # of each component, per iteration


def sample_iteration(settings: Settings, inputs: Inputs) -> IterationSample:
    """Packs the rows of the first iteration."""
    decisive = batch_settings(settings, inputs.tokenizer)
    rows = open_rows(inputs.training, decisive, Cursor()).take(decisive.global_batch_size)
    slots_n = rows.segments.slots_n
    begins_n = rows.segments.starts_n == 0
    begun = np.bincount(rows.segments.documents_n[begins_n] >> COMPONENT_SHIFT, minlength=len(inputs.training))
    tokens = int(slots_n.sum())
    return IterationSample(
        documents=int(begins_n.sum()),
        tokens=tokens,
        fill=tokens / settings.tokens_per_iteration,
        tokens_of_a_tokens_document=float(slots_n @ slots_n) / tokens,
        epochs=tuple(int(count) / len(source.documents) for count, source in zip(begun, inputs.training, strict=True)),
    )
