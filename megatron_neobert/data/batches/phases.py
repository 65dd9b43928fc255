"""The batches of a run over all its phases, and its place in the data where settings change.

The order of the documents continues as long as corpora, shares, seed and block size stay. Rows of another kind then
begin with the next window, since a window is packed as a whole: the rest of it, fewer than 4,096 documents, is not
read. Of other documents the order has its own beginning.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from megatron_neobert.config.phases import Phase, phase_at, resolve_phases
from megatron_neobert.config.schema import Settings
from megatron_neobert.data.batches.inputs import Inputs, batch_settings
from megatron_neobert.data.batches.packing import PackedRows
from megatron_neobert.data.batches.rows import Cursor, next_window
from megatron_neobert.data.batches.stream import BatchStream, StepBatches, build_steps

_ORDER = (("data", "share_of_data_path"), ("data", "document_block_size"), ("training", "seed"))
_ROWS = (("data", "seq_length"), ("data", "long_documents"), ("data", "batch_layout"))


@dataclass(frozen=True)
class TrainingStream:
    """The batches of one rank over all phases of a run, from an iteration and its cursor on, without an end.

    Batch k is a function of settings, iteration and cursor alone.
    """

    settings: Settings
    identities: tuple[tuple[str, str], ...]  # hashes of the --data-path of each phase, see Inputs
    streams: tuple[BatchStream, ...]  # of each phase, from the beginning of its data
    iteration: int = 0  # that many are done
    cursor: Cursor = Cursor()  # noqa: RUF009  frozen; behind the last row of that iteration

    def identities_at(self, iteration: int) -> tuple[str, str]:
        """Return the hashes of the --data-path of an iteration, see Inputs."""
        return self.identities[phase_at(self.settings, iteration).number]

    def cursor_in(self, phase: Phase, cursor: Cursor, before: Settings, *, identity: str) -> Cursor:
        """Return where the batches of a phase begin after batches of other settings.

        Args:
            cursor: Where the other batches ended.
            before: Settings of the other batches, without phases.
            identity: Hash of the data of the other batches.
        """
        if identity not in self.identities[phase.number] or _differ(before, phase.settings, _ORDER):
            return Cursor()
        if _differ(before, phase.settings, _ROWS):
            stream = self.streams[phase.number]
            return next_window(stream.sources, stream.settings, cursor)
        return cursor

    def global_batches(self) -> Iterator[tuple[BatchStream, PackedRows, Cursor]]:
        """Yield the rows of each iteration for all ranks, the stream that they are of, and the cursor behind them."""
        done, cursor, before = self.iteration, self.cursor, phase_at(self.settings, self.iteration)
        for phase in resolve_phases(self.settings)[before.number :]:
            if phase != before:
                identity = self.identities[before.number][0]
                cursor = self.cursor_in(phase, cursor, before.settings, identity=identity)
            stream = replace(self.streams[phase.number], cursor=cursor)
            for rows, cursor in islice(stream.global_batches(), None if phase.last is None else phase.last - done):
                yield stream, rows, cursor
            before, done = phase, phase.last or done

    def on_rank(self, **place: int) -> "TrainingStream":
        """Return the same batches as another rank has them; `place` as in BatchStream."""
        return replace(self, streams=tuple(replace(stream, **place) for stream in self.streams))  # type: ignore[arg-type]

    def from_iteration(self, iteration: int) -> "TrainingStream":
        """Return the same batches from a later iteration on. Those between are packed, which reads lengths only."""
        between = iteration - 1 - self.iteration
        if between == 0:
            return self
        _, _, cursor = next(islice(self.global_batches(), between - 1, None))
        return replace(self, iteration=iteration - 1, cursor=cursor)

    def steps(self, *, first: int = 0, every: int = 1) -> Iterator[StepBatches]:
        """Yield steps first, first + every, ... from the iteration on; those between are packed but not read."""
        ahead = max(stream.steps_ahead for stream in self.streams)
        return build_steps(islice(self.global_batches(), first, None, every), ahead=ahead)


def build_training_stream(settings: Settings, inputs: list[Inputs], *, fixed_shapes: bool = False) -> TrainingStream:
    """Return all batches of a run on one rank; `inputs` as `open_phases` gives them."""
    streams = [
        BatchStream(own.training, batch_settings(phase.settings, own.tokenizer, fixed_shapes=fixed_shapes))
        for phase, own in zip(resolve_phases(settings), inputs, strict=True)
    ]
    return TrainingStream(settings, tuple(own.identities for own in inputs), tuple(streams))


def _differ(before: Settings, after: Settings, names: tuple[tuple[str, str], ...]) -> bool:
    return any(
        getattr(getattr(before, section), name) != getattr(getattr(after, section), name) for section, name in names
    )
