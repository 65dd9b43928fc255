"""Windows of documents: which documents a window has, and the packed sequences that it becomes.

All ranks pack the same windows alike, which reads only lengths. The documents of a window follow from its number and
the settings. A `Cursor` points to the next unread packed sequence; resuming there costs the packing of one window.

With `BatchStream.pads_to_capacity`, kernels and memory can be planned once for all micro-batches: masked positions
are padded to a capacity that practically every micro-batch stays below, eight standard deviations above the mean. A
micro-batch that exceeds the capacity is padded to its next multiple. Documents are padded to one of a few numbers, the
same in all micro-batches of a global batch. With CUDA graphs, all ranks must capture a collective in the same step, so
no rank may have a shape of its own.
"""

import math
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from megatron_neobert.config.phases import order_settings
from megatron_neobert.config.schema import Settings
from megatron_neobert.data.batches.masking import TokenIds
from megatron_neobert.data.batches.order import COMPONENT_SHIFT, DocumentOrder, SplitPart
from megatron_neobert.data.batches.packing import (
    Documents,
    PackedSequences,
    concatenate_documents,
    cut_documents,
    pack_segments,
)
from megatron_neobert.data.corpus.attributes import ChosenDocuments
from megatron_neobert.data.corpus.reader import Corpus
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer
from megatron_neobert.errors import CheckpointError

# Documents that are packed together. Larger windows waste less capacity but make resuming slower: 4,096 web-like
# documents leave less than 0.1 % of packed sequences of 1,024 tokens unused and are packed in 2 ms. A cursor is only
# valid for the value that it was saved with.
WINDOW_DOCUMENTS = 4096

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]  # leaves room for additions in an int64

IGNORED_LABEL = -100  # default ignore_index of torch's cross-entropy
# A number of masked positions exceeds the mean by more than once in 10^13 micro-batches (exact, from 512
# tokens). With 6 it was once in 10^8, often enough to happen: a run of 1,024 GPUs has 10^9 micro-batches.
_DEVIATIONS = 8
_MASKED_MULTIPLE = 128  # FP8 and tensor-core tiles need multiples of 16 and 128
_DOCUMENTS_MULTIPLE = 512  # few different document counts, and therefore few attention plans

# Settings that the packing of a window depends on.
_packing_settings = attrgetter("data.seq_length", "data.long_documents", "data.batch_layout")


def token_ids_of(tokenizer: Tokenizer) -> TokenIds:
    """Return a tokenizer's vocabulary size and special token ids, which batches need besides the corpus's ids."""
    special = tokenizer.cls_id, tokenizer.sep_id, tokenizer.pad_id, tokenizer.mask_id
    return TokenIds(tokenizer.vocab_size, *special, tokenizer.special_ids)


@dataclass(frozen=True)
class Source:
    """Documents of one corpus, and their weight in a blend."""

    corpus: Corpus
    documents: SplitPart | ChosenDocuments
    weight: int = 1  # documents of this source among sum(weights) documents of the blend
    bits_sha256: str = ""  # of the documents that an expression chooses, before --split; empty without an expression


@dataclass(frozen=True)
class Cursor:
    """Position of the next unread packed sequence. All fields count from 0.

    The sources of a blend have different epochs, so a blend's `epoch` stays 0 and its windows are numbered without end.
    Checkpoints and metrics.jsonl store the fields under these names.
    """

    epoch: Count = 0
    window: Count = 0
    sequence: Count = 0  # index of the packed sequence in its window


@dataclass(frozen=True)
class BatchPhase:
    """Documents and settings of the batches from iteration `first` to the next phase."""

    sources: tuple[Source, ...]  # a single source, or the components of a blend
    settings: Settings  # of this phase
    token_ids: TokenIds
    first: int = 1  # iterations count from 1
    corpus_sha256: str = ""  # OpenedCorpora.sha256

    @property
    def windows(self) -> int:
        """Number of windows in an epoch of a single source.

        A blend has no epochs. For a blend, this is 2^48: the limit of the random draws, and more than any run reads.
        """
        return self._order_of(0, WINDOW_DOCUMENTS).windows if len(self.sources) == 1 else 1 << COMPONENT_SHIFT

    def next_window(self, cursor: Cursor) -> Cursor:
        """Return the start of the first window that is completely unread."""
        if cursor.sequence == 0:
            return cursor
        window = cursor.window + 1
        return Cursor(cursor.epoch, window) if window < self.windows else Cursor(cursor.epoch + 1)

    def start_after(self, settings: Settings, corpus_sha256: str, cursor: Cursor) -> Cursor:
        """Return the cursor at which this phase begins, after a phase that ended at `cursor`.

        `settings` and `corpus_sha256` belong to the earlier phase. If the documents or their order differ, return the
        start of the data; if only the packing differs, the start of the next unread window; otherwise `cursor`.
        """
        if corpus_sha256 != self.corpus_sha256 or order_settings(settings) != order_settings(self.settings):
            return Cursor()
        is_same = _packing_settings(settings) == _packing_settings(self.settings)
        return cursor if is_same else self.next_window(cursor)

    def pack_window_at(self, cursor: Cursor) -> PackedSequences:
        """Return all packed sequences of the cursor's window, shuffled.

        Raise CheckpointError if the window does not exist or is too short for the cursor.
        """
        if cursor.window < self.windows:
            packed = self.pack(self.documents(epoch=cursor.epoch, window=cursor.window))
            if cursor.sequence <= len(packed):
                return packed.shuffle(seed=self.settings.training.seed, epoch=cursor.epoch, window=cursor.window)
        raise CheckpointError(
            f"the checkpoint continues at packed sequence {cursor.sequence:,} of window {cursor.window:,}, which these "
            "documents do not have. Resume with the corpus, --split, --seq-length, --long-documents and --seed that it "
            "was saved with, or start a new run."
        )

    def pack(self, documents: Documents) -> PackedSequences:
        """Pack a window's documents into sequences. The result is not shuffled."""
        data = self.settings.data
        seq_length, long_documents = data.seq_length, data.long_documents
        if data.batch_layout == "concatenated":
            return concatenate_documents(documents, seq_length=seq_length, long_documents=long_documents)
        segments = cut_documents(documents, seq_length=seq_length, long_documents=long_documents)
        return pack_segments(segments, seq_length=seq_length)

    def documents(self, *, epoch: int, window: int) -> Documents:
        """Return the documents of a window, in an order drawn from the seed. Raise DataError if an index is damaged.

        The document numbers contain the component's index, so that the masks of a document differ between components.

        For a single source, return its window in `epoch`. In a blend, each source has an endless order, one epoch after
        another, and `epoch` is not used. From a source with the share s, window k of n documents takes documents
        floor(k n s) to floor((k + 1) n s) of this order, spread evenly over the window:

        - Any m consecutive windows contain floor or ceil of m n s documents of the source, regardless of other sources.
        - n is a multiple of the sum of the weights if the sum is at most 4,096. Then every window has exact shares.
        """
        period = sum(source.weight for source in self.sources)
        size = WINDOW_DOCUMENTS // period * period or WINDOW_DOCUMENTS
        columns = []
        for component, source in enumerate(self.sources):
            if len(self.sources) == 1:
                indices = self._order_of(0, WINDOW_DOCUMENTS).window(window, epoch=epoch)
                epochs_n = np.full(len(indices), epoch)
            else:
                first, stop = (number * size * source.weight // period for number in (window, window + 1))
                order = self._order_of(component, max(1, size * source.weight // period))
                indices, epochs_n = order.between(first, stop)
            numbers = source.documents.numbers(indices)
            relative_positions_n = (np.arange(len(numbers)) + 0.5) / max(1, len(numbers))
            tagged_n = numbers + (component << COMPONENT_SHIFT)
            columns.append((relative_positions_n, tagged_n, source.corpus.lengths_of(numbers), epochs_n))
        relative_positions_n, *documents = map(np.concatenate, zip(*columns, strict=True))
        order_n = np.argsort(relative_positions_n, kind="stable")
        return Documents(*(column[order_n] for column in documents))

    def _order_of(self, component: int, window_documents: int) -> DocumentOrder:
        return DocumentOrder(
            documents=len(self.sources[component].documents),
            window_documents=window_documents,
            block_size=self.settings.data.document_block_size,
            seed=self.settings.training.seed,
            component=component,
        )


def masked_capacity(tokens: int, *, probability: float) -> int:
    """Return the capacity for masked positions in `tokens` tokens, each predicted with `probability`."""
    deviation = math.sqrt(tokens * probability * (1 - probability))
    return _round_up(tokens * probability + _DEVIATIONS * deviation, _MASKED_MULTIPLE)


def document_capacity(documents: int) -> int:
    """Return the padded document count of a micro-batch with `documents` documents, including dummies.

    The result is a power of two from 32 to 512, or a multiple of 512.
    """
    # Attention kernels start blocks for empty documents, too, and cuDNN is planned anew for each number. Up to 512,
    # Transformer Engine itself rounds in this way. 64 packed sequences of 1,024 tokens contain 139 web pages on
    # average, and at most 201 in 1,000 micro-batches; of single sentences, 3,804 and 4,231.
    if documents > _DOCUMENTS_MULTIPLE:
        return _round_up(documents, _DOCUMENTS_MULTIPLE)
    return max(32, 1 << (documents - 1).bit_length())


def pad_to_capacity(values: NDArray[np.generic], capacity: int, filler: int) -> NDArray[np.generic]:
    """Return `values`, padded with `filler` to `capacity`, or to the next multiple of `capacity` if there are more."""
    missing = capacity * max(1, -(-len(values) // capacity)) - len(values)
    return np.concatenate([values, np.full(missing, filler, dtype=values.dtype)])


def _round_up(number: float, multiple: int) -> int:
    return max(1, math.ceil(number / multiple)) * multiple
