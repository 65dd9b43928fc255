"""What an iteration reads on average: documents, tokens and epochs, from windows packed as training packs them.

The rows of one iteration are too few to stand for a corpus: how many rows its documents fill is known of whole windows.
An epoch of a few windows is packed entirely; of a longer one, and of a blend, the first windows stand for all, since
documents are shuffled. Packing reads lengths alone, no token, and takes milliseconds.
"""

from dataclasses import dataclass

import numpy as np

from megatron_neobert.config.schema import Settings
from megatron_neobert.data.batches.inputs import Inputs, batch_settings
from megatron_neobert.data.batches.order import COMPONENT_SHIFT
from megatron_neobert.data.batches.rows import count_windows, pack_window

_MOST_WINDOWS = 8  # 32,768 documents


@dataclass(frozen=True)
class IterationSample:
    """An iteration, on average."""

    documents: float  # one that is cut into several counts once
    tokens: float  # of documents, [CLS] and [SEP] included
    packing_efficiency: float  # share of the token capacity that holds one
    tokens_of_a_tokens_document: float  # how many tokens the average token attends to
    document_shares: tuple[float, ...]  # of each component
    token_shares: tuple[float, ...]
    epochs: tuple[float, ...]


def sample_iteration(settings: Settings, inputs: Inputs) -> IterationSample:
    """Packs the first windows, of which an iteration has its rows."""
    decisive, sources = batch_settings(settings, inputs.tokenizer), inputs.training
    rows, squares = 0, 0
    documents_c, tokens_c = np.zeros(len(sources)), np.zeros(len(sources))
    for window in range(min(count_windows(sources, decisive), _MOST_WINDOWS)):
        packed = pack_window(sources, decisive, epoch=0, window=window)
        segments, slots_n = packed.segments, packed.segments.slots_n
        components_n = segments.documents_n >> COMPONENT_SHIFT
        begins_n = segments.has_cls_n & (segments.starts_n == 0)  # once a document, however it is cut
        rows += len(packed)
        documents_c += np.bincount(components_n[begins_n], minlength=len(sources))
        tokens_c += np.bincount(components_n, weights=slots_n, minlength=len(sources))
        # A concatenated row is one document to attention.
        together = slots_n if decisive.batch_layout == "packed" else np.add.reduceat(slots_n, packed.row_offsets[:-1])
        squares += int(together @ together)
    share = decisive.global_batch_size / rows  # of these windows
    documents, tokens = float(documents_c.sum()), float(tokens_c.sum())
    return IterationSample(
        documents=share * documents,
        tokens=share * tokens,
        packing_efficiency=share * tokens / settings.tokens_per_iteration,
        tokens_of_a_tokens_document=squares / tokens,
        document_shares=tuple((documents_c / documents).tolist()),
        token_shares=tuple((tokens_c / tokens).tolist()),
        epochs=tuple(
            share * own / len(source.documents) for own, source in zip(documents_c.tolist(), sources, strict=True)
        ),
    )
