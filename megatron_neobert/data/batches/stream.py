"""The batches of a run, in order: one stream over all phases and epochs.

Batch k depends on (sources, settings, k) only, so iteration and cursor suffice to resume.

The order of the documents continues from phase to phase as long as corpora, weights, seed and block size stay the same.
If `seq_length` changes, the new phase begins with the next window, because a window is packed as a whole; the unread
rest of the window, fewer than 4,096 documents, is skipped. If the documents change, their order begins at its start.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from operator import attrgetter
from typing import Any, NamedTuple

from megatron_neobert.config.phases import order_settings, resolve_phases
from megatron_neobert.config.schema import Settings
from megatron_neobert.data.batches.batch import GlobalBatch, RankBatches, RankPosition
from megatron_neobert.data.batches.corpora import OpenedCorpora, to_batch_settings
from megatron_neobert.data.batches.packing import PackedSequences, join_sequences
from megatron_neobert.data.batches.windows import BatchSettings, Cursor, Source, count_windows, next_window, pack_window
from megatron_neobert.errors import CheckpointError

_REMOTE_BATCHES_AHEAD = 4  # batches whose blocks are fetched from object storage while a batch is trained on

# Settings that the packing of a window depends on.
_packing_settings = attrgetter("data.seq_length", "data.long_documents", "data.batch_layout")


class OrderKey(NamedTuple):
    """Settings and data that decide the order of packed sequences. A phase with an equal key keeps the cursor."""

    documents: tuple[Any, ...] = ()  # documents, weights, --split, seed and block size
    packing: tuple[Any, ...] = ()


def order_key(settings: Settings, *, corpus_sha256: str) -> OrderKey:
    """Return the key of a phase with these resolved settings, and with data of this hash (OpenedCorpora.sha256)."""
    return OrderKey((corpus_sha256, *order_settings(settings)), _packing_settings(settings))


@dataclass(frozen=True)
class BatchPhase:
    """Batches of the iterations from `first`, counted from 1, to the next phase."""

    sources: tuple[Source, ...]  # a single source, or the components of a blend
    batch_settings: BatchSettings
    first: int = 1
    order: OrderKey = OrderKey()  # noqa: RUF009  immutable

    def start_after(self, order: OrderKey, cursor: Cursor) -> Cursor:
        """Return the cursor at which this phase begins, after batches with the key `order` that ended at `cursor`.

        This is the start of the data if the documents or their order differ, the start of the next unread window if
        only their packing differs, and otherwise `cursor`.
        """
        if order.documents != self.order.documents:
            return Cursor()
        return cursor if order == self.order else next_window(self.sources, self.batch_settings, cursor)

    def pack_window_at(self, cursor: Cursor) -> PackedSequences:
        """Return the packed sequences of the window of a cursor. Raise CheckpointError if it has none at the cursor."""
        if cursor.window < count_windows(self.sources, self.batch_settings):
            packed = pack_window(self.sources, self.batch_settings, epoch=cursor.epoch, window=cursor.window)
            if cursor.sequence <= len(packed):
                return packed
        raise CheckpointError(
            f"the checkpoint continues at packed sequence {cursor.sequence:,} of window {cursor.window:,}, which these "
            "documents do not have. Resume with the corpus, --split, --seq-length, --long-documents and --seed that it "
            "was saved with, or start a new run."
        )


@dataclass(frozen=True)
class BatchStream:
    """Endless batches of a run, from an iteration and its cursor on, over all phases, epoch after epoch."""

    phases: tuple[BatchPhase, ...]
    iteration: int = 0  # iterations that are done
    cursor: Cursor = Cursor()  # noqa: RUF009  immutable; position after these iterations
    rank: RankPosition = RankPosition()  # noqa: RUF009  immutable

    @property
    def bytes_per_token(self) -> float | None:
        """UTF-8 bytes of text per token of the first phase's corpus; None if it is not known, and for a blend."""
        sources = self.phases[0].sources
        return sources[0].corpus.manifest.bytes_per_token if len(sources) == 1 else None

    def with_batch_settings(self, **changes: Any) -> "BatchStream":
        """Return a copy in which these fields of BatchSettings are changed in all phases."""
        settings = [replace(phase.batch_settings, **changes) for phase in self.phases]
        pairs = zip(self.phases, settings, strict=True)
        return replace(self, phases=tuple(replace(phase, batch_settings=changed) for phase, changed in pairs))

    def phase_at(self, iteration: int) -> BatchPhase:
        """Return the phase of an iteration, counted from 1; iteration 0 is in the first phase."""
        return next((phase for phase in reversed(self.phases) if phase.first <= iteration), self.phases[0])

    def rank_batches(self, *, first: int = 0, every: int = 1) -> Iterator[RankBatches]:
        """Yield the batches of `self.rank` for the iterations first, first + every, ... after `self.iteration`.

        Skipped iterations are packed, but their tokens are not read.
        """
        sources = [source for phase in self.phases for source in phase.sources]
        ahead = _REMOTE_BATCHES_AHEAD if any(source.corpus.is_remote for source in sources) else 0
        waiting = deque[GlobalBatch]()
        for batch in islice(self.global_batches(), first, None, every):
            waiting.append(batch)
            if ahead:
                batch.prefetch(self.rank)
            if len(waiting) > ahead:
                yield waiting.popleft().for_rank(self.rank)

    def global_batches(self) -> Iterator[GlobalBatch]:
        """Yield the global batches after `self.iteration`, without end. No token is read.

        A batch may extend over several windows and epochs.
        """
        iteration, cursor, window = self.iteration, self.cursor, None
        previous = self.phase_at(iteration)
        while True:
            iteration += 1
            phase = self.phase_at(iteration)
            if phase is not previous:
                cursor, window, previous = phase.start_after(previous.order, cursor), None, phase
            taken: list[PackedSequences] = []
            missing = phase.batch_settings.global_batch_size
            while missing:
                window = window or phase.pack_window_at(cursor)
                stop = min(cursor.sequence + missing, len(window))
                taken.append(window.take(cursor.sequence, stop))
                missing -= stop - cursor.sequence
                cursor = replace(cursor, sequence=stop)
                if stop == len(window):
                    cursor, window = next_window(phase.sources, phase.batch_settings, cursor), None
            yield GlobalBatch(phase.sources, phase.batch_settings, join_sequences(taken), cursor)

    def global_batch(self, iteration: int) -> GlobalBatch:
        """Return the batch of an iteration above `self.iteration`. The batches before it are packed, but not read."""
        return next(islice(self.global_batches(), iteration - self.iteration - 1, None))


def build_stream(settings: Settings, opened: Sequence[OpenedCorpora], *, pads_to_capacity: bool = False) -> BatchStream:
    """Return the training batches, from iteration 1 on, of a run with a single rank.

    Args:
        opened: Result of `open_phases`.
        pads_to_capacity: Pad all micro-batches to few shapes, see windows.py.
    """
    phases = [
        BatchPhase(
            corpora.training,
            to_batch_settings(phase.settings, corpora.tokenizer, pads_to_capacity=pads_to_capacity),
            first=phase.first,
            order=order_key(phase.settings, corpus_sha256=corpora.sha256),
        )
        for phase, corpora in zip(resolve_phases(settings), opened, strict=True)
    ]
    return BatchStream(tuple(phases))
