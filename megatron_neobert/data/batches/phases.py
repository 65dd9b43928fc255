"""The training batches of a run over all its phases.

The order of the documents continues from phase to phase as long as corpora, weights, seed and block size stay the same.
If `seq_length` changes, the new phase begins with the next window, because a window is packed as a whole; the unread
rest of the window, fewer than 4,096 documents, is skipped. If the documents change, their order begins at its start.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from operator import attrgetter

from megatron_neobert.config.phases import Phase, order_settings, phase_at, resolve_phases
from megatron_neobert.config.schema import Settings
from megatron_neobert.data.batches.inputs import Inputs, batch_settings
from megatron_neobert.data.batches.packing import PackedSequences
from megatron_neobert.data.batches.stream import BatchStream, StepBatches, build_steps
from megatron_neobert.data.batches.windows import Cursor, next_window

# Settings that the packing of a window depends on.
_packing_settings = attrgetter("data.seq_length", "data.long_documents", "data.batch_layout")


@dataclass(frozen=True)
class TrainingStream:
    """Endless batches of one rank over all phases of a run, from an iteration and its cursor on.

    Batch k depends on settings, iteration and cursor only.
    """

    settings: Settings
    hashes: tuple[str, ...]  # Inputs.sha256 of each phase
    corpora: tuple[dict[str, str], ...]  # Inputs.corpora of each phase
    streams: tuple[BatchStream, ...]  # batches of each phase, from the start of its documents
    iteration: int = 0  # iterations that are done
    cursor: Cursor = Cursor()  # noqa: RUF009  frozen; position after these iterations

    def hash_at(self, iteration: int) -> str:
        """Return the hash of the --data-path of an iteration, see Inputs.sha256."""
        return self.hashes[phase_at(self.settings, iteration).number]

    def cursor_in(self, phase: Phase, cursor: Cursor, previous: Settings, *, corpus_sha256: str) -> Cursor:
        """Return the cursor at which `phase` begins, after batches of another phase or run that ended at `cursor`.

        If documents or weights (compared by `corpus_sha256`), split, seed or block size differ, return the start of
        the data, `Cursor()`. If only `seq_length`, `long_documents` or `batch_layout` differ, return the start of the
        next unread window. Otherwise return `cursor`.

        Args:
            cursor: Position after the previous batches.
            previous: Settings of the previous batches, with phases resolved.
            corpus_sha256: Hash of the data of the previous batches.
        """
        if corpus_sha256 != self.hashes[phase.number] or order_settings(previous) != order_settings(phase.settings):
            return Cursor()
        if _packing_settings(previous) != _packing_settings(phase.settings):
            stream = self.streams[phase.number]
            return next_window(stream.sources, stream.settings, cursor)
        return cursor

    def global_batches(self) -> Iterator[tuple[BatchStream, PackedSequences, Cursor]]:
        """Yield for each iteration the stream of its phase, its packed sequences, and the cursor after it, without end.

        The first iteration is `self.iteration` + 1. While iterating, raise CheckpointError if the documents have no
        packed sequence at the cursor, and DataError if an index is damaged.
        """
        done, cursor, previous = self.iteration, self.cursor, phase_at(self.settings, self.iteration)
        for phase in resolve_phases(self.settings)[previous.number :]:
            if phase != previous:
                previous_sha256 = self.hashes[previous.number]
                cursor = self.cursor_in(phase, cursor, previous.settings, corpus_sha256=previous_sha256)
            stream = replace(self.streams[phase.number], cursor=cursor)
            for packed, cursor in islice(stream.global_batches(), None if phase.last is None else phase.last - done):
                yield stream, packed, cursor
            previous, done = phase, phase.last or done

    def on_rank(self, **ranks: int) -> "TrainingStream":
        """Return one rank's share of the batches. `ranks` are fields of BatchStream, such as data_parallel_rank=1."""
        return replace(self, streams=tuple(replace(stream, **ranks) for stream in self.streams))  # type: ignore[arg-type]

    def from_iteration(self, iteration: int) -> "TrainingStream":
        """Return a stream whose first batch is that of `iteration`, which is 1-based and above `self.iteration`.

        The batches before it are packed to find its cursor, which reads document lengths but no tokens.
        """
        skipped = iteration - 1 - self.iteration
        if skipped == 0:
            return self
        _, _, cursor = next(islice(self.global_batches(), skipped - 1, None))
        return replace(self, iteration=iteration - 1, cursor=cursor)

    def steps(self, *, first: int = 0, every: int = 1) -> Iterator[StepBatches]:
        """Yield steps first, first + every, ...; step 0 is the next iteration. Tokens of skipped steps are not read."""
        ahead = max(stream.steps_ahead for stream in self.streams)
        return build_steps(islice(self.global_batches(), first, None, every), ahead=ahead)


def build_training_stream(settings: Settings, inputs: list[Inputs], *, fixed_shapes: bool = False) -> TrainingStream:
    """Return the training batches, from iteration 1 on, of a run with a single rank.

    `TrainingStream.on_rank` selects the share of one of several ranks. `inputs` is the result of `open_phases`. With
    `fixed_shapes`, all micro-batches are padded to the same shapes, see windows.py.
    """
    streams = [
        BatchStream(
            phase_inputs.training, batch_settings(phase.settings, phase_inputs.tokenizer, fixed_shapes=fixed_shapes)
        )
        for phase, phase_inputs in zip(resolve_phases(settings), inputs, strict=True)
    ]
    hashes = tuple(phase_inputs.sha256 for phase_inputs in inputs)
    return TrainingStream(settings, hashes, tuple(phase_inputs.corpora for phase_inputs in inputs), tuple(streams))
