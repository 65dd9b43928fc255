"""What an iteration reads on average: documents, tokens and epochs, from windows packed as training packs them.

The rows of one iteration are too few to stand for a corpus: how many rows its documents fill is known of whole windows.
An epoch of a few windows is packed entirely; of a longer one the first windows stand for all, since documents are
shuffled. Packing reads lengths alone, no token, and takes milliseconds.
"""

from dataclasses import dataclass

import numpy as np

from megatron_neobert.config import Settings
from megatron_neobert.data.inputs import Inputs, batch_settings
from megatron_neobert.data.order import windows_of_epoch
from megatron_neobert.data.rows import WINDOW_DOCUMENTS, BatchSettings, Source, pack_window

_MOST_WINDOWS = 8  # of a component: 32,768 documents


@dataclass(frozen=True)
class IterationSample:
    """An iteration, on average."""

    documents: float  # one that is cut into several counts once
    tokens: float  # of documents, [CLS] and [SEP] included
    fill: float  # share of the slots that hold one
    tokens_of_a_tokens_document: float  # how many tokens the average token attends to
    epochs: tuple[float, ...]  # of each component


@dataclass(frozen=True)
class _PackedWindows:
    """Sums over windows of one component."""

    rows: int
    documents: int
    tokens: int
    squares: int  # of the tokens that attend to each other


def sample_iteration(settings: Settings, inputs: Inputs) -> IterationSample:
    """Packs the first windows of every component; each gives its share of an iteration's rows."""
    decisive = batch_settings(settings, inputs.tokenizer)
    weights = sum(source.weight for source in inputs.training)
    documents, tokens, squares, epochs = 0.0, 0.0, 0.0, []
    for component, source in enumerate(inputs.training):
        packed = _pack_windows(source, decisive, component=component)
        share = decisive.global_batch_size * source.weight / weights / packed.rows  # of these windows
        documents += share * packed.documents
        tokens += share * packed.tokens
        squares += share * packed.squares
        epochs.append(share * packed.documents / len(source.documents))
    return IterationSample(
        documents=documents,
        tokens=tokens,
        fill=tokens / settings.tokens_per_iteration,
        tokens_of_a_tokens_document=squares / tokens,
        epochs=tuple(epochs),
    )


def _pack_windows(source: Source, settings: BatchSettings, *, component: int) -> _PackedWindows:
    windows = windows_of_epoch(
        len(source.documents), window_documents=WINDOW_DOCUMENTS, block_size=settings.document_block_size
    )
    rows, documents, tokens, squares = 0, 0, 0, 0
    for window in range(min(windows, _MOST_WINDOWS)):
        packed = pack_window(source, settings, epoch=0, window=window, component=component)
        slots_n = packed.segments.slots_n
        rows += len(packed)
        documents += len(np.unique(packed.segments.documents_n))
        tokens += int(slots_n.sum())
        # A concatenated row is one document to attention.
        together = slots_n if settings.batch_layout == "packed" else np.add.reduceat(slots_n, packed.row_offsets[:-1])
        squares += int(together @ together)
    return _PackedWindows(rows, documents, tokens, squares)
