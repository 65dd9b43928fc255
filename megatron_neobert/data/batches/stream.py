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

from megatron_neobert.config.phases import resolve_phases
from megatron_neobert.config.schema import Settings
from megatron_neobert.data.batches.batch import GlobalBatch, RankBatches, RankPosition
from megatron_neobert.data.batches.corpora import OpenedCorpora
from megatron_neobert.data.batches.packing import PackedSequences, join_sequences
from megatron_neobert.data.batches.windows import BatchPhase, Cursor, token_ids_of

_REMOTE_BATCHES_AHEAD = 4  # batches whose blocks are fetched from object storage while a batch is trained on


@dataclass(frozen=True)
class BatchStream:
    """Endless batches of a run, over all phases and epochs. The first batch starts at `cursor`, after `iteration`."""

    phases: tuple[BatchPhase, ...]
    iteration: int = 0  # iterations that are done
    cursor: Cursor = Cursor()  # noqa: RUF009  immutable; position after these iterations
    rank: RankPosition = RankPosition()  # noqa: RUF009  immutable
    pads_to_capacity: bool = False  # pad all micro-batches to few shapes, see windows.py

    @property
    def bytes_per_token(self) -> float | None:
        """UTF-8 bytes of text per token in the first phase's corpus. None for a blend, or if the number is unknown."""
        sources = self.phases[0].sources
        return sources[0].corpus.manifest.bytes_per_token if len(sources) == 1 else None

    def with_settings(self, settings: Settings) -> "BatchStream":
        """Return a copy with these settings in all phases."""
        return replace(self, phases=tuple(replace(phase, settings=settings) for phase in self.phases))

    def phase_at(self, iteration: int) -> BatchPhase:
        """Return the phase of an iteration, counted from 1; iteration 0 is in the first phase."""
        return next((phase for phase in reversed(self.phases) if phase.first <= iteration), self.phases[0])

    def rank_batches(self, *, first: int = 0, every: int = 1) -> Iterator[RankBatches]:
        """Yield this rank's batches for iterations first, first + every, ..., counted from 0 after `self.iteration`.

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
        """Yield the global batches after `self.iteration`, endlessly. Only document lengths are read, no tokens.

        A batch may extend over several windows and epochs.
        """
        iteration, cursor, window = self.iteration, self.cursor, None
        previous = self.phase_at(iteration)
        while True:
            iteration += 1
            phase = self.phase_at(iteration)
            if phase is not previous:
                cursor = phase.start_after(previous.settings, previous.corpus_sha256, cursor)
                window, previous = None, phase
            taken: list[PackedSequences] = []
            missing = phase.settings.training.global_batch_size
            while missing:
                window = window or phase.pack_window_at(cursor)
                stop = min(cursor.sequence + missing, len(window))
                taken.append(window.take(cursor.sequence, stop))
                missing -= stop - cursor.sequence
                cursor = replace(cursor, sequence=stop)
                if stop == len(window):
                    cursor, window = phase.next_window(cursor), None
            yield GlobalBatch(phase, join_sequences(taken), cursor, self.pads_to_capacity)

    def global_batch(self, iteration: int) -> GlobalBatch:
        """Return the batch of `iteration`, which must be above `self.iteration`. Earlier ones are packed, not read."""
        return next(islice(self.global_batches(), iteration - self.iteration - 1, None))


def build_stream(settings: Settings, opened: Sequence[OpenedCorpora], *, pads_to_capacity: bool = False) -> BatchStream:
    """Return the stream of a run's training batches from iteration 1, for a single rank.

    Args:
        opened: Result of `open_phases`.
        pads_to_capacity: Pad all micro-batches to few shapes, see windows.py.
    """
    phases = [
        BatchPhase(corpora.training, phase.settings, token_ids_of(corpora.tokenizer), phase.first, corpora.sha256)
        for phase, corpora in zip(resolve_phases(settings), opened, strict=True)
    ]
    return BatchStream(tuple(phases), pads_to_capacity=pads_to_capacity)
