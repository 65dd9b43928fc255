"""The batches of a run over all its phases, and what becomes of its place in the data where settings change.

The order of the documents continues as long as corpora, shares, seed and block size stay. Rows of another kind then
begin with the next window, since a window is packed as a whole: the rest of it, fewer than 4,096 documents, is not
read. Of other documents the order has its own beginning.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from megatron_neobert.config.schema import Settings
from megatron_neobert.config.stretches import Stretch, stretches
from megatron_neobert.data.batches.inputs import Inputs, batch_settings
from megatron_neobert.data.batches.packing import PackedRows
from megatron_neobert.data.batches.rows import Cursor, next_window
from megatron_neobert.data.batches.stream import BatchStream, StepBatches, build_steps

_ORDER = (("data", "share_of_data_path"), ("data", "document_block_size"), ("training", "seed"))
_ROWS = (("data", "seq_length"), ("data", "long_documents"), ("data", "batch_layout"))


@dataclass(frozen=True)
class Leg:
    """The batches of a stretch of iterations, from the beginning of their data."""

    stretch: Stretch
    identities: tuple[str, str]  # hashes of --data-path; see Inputs
    stream: BatchStream

    def continue_at(self, cursor: Cursor, before: Settings, *, identity: str) -> Cursor:
        """Where these batches begin after others.

        Args:
            cursor: Where the others ended.
            before: Their settings, of one stretch.
            identity: Of what they read.
        """
        if identity not in self.identities or _differ(before, self.stretch.settings, _ORDER):
            return Cursor()
        if _differ(before, self.stretch.settings, _ROWS):
            return next_window(self.stream.sources, self.stream.settings, cursor)
        return cursor


@dataclass(frozen=True)
class TrainingStream:
    """The batches of one rank over all phases, from an iteration and its cursor on, without an end.

    Batch k is a function of settings, iteration and cursor alone.
    """

    legs: tuple[Leg, ...]
    iteration: int = 0  # that many are done
    cursor: Cursor = Cursor()  # noqa: RUF009  frozen; behind the last row of that iteration

    def leg_of(self, iteration: int) -> Leg:
        """The one that an iteration lies in; before the first iteration, the first."""
        return [leg for leg in self.legs if leg.stretch.first <= max(iteration, 1)][-1]

    def global_batches(self) -> Iterator[tuple[BatchStream, PackedRows, Cursor]]:
        """The rows of each iteration for all ranks, the stream that they are of, and the cursor behind them."""
        done, cursor, before = self.iteration, self.cursor, self.leg_of(self.iteration)
        for leg in self.legs[self.legs.index(before) :]:
            if leg is not before:
                cursor = leg.continue_at(cursor, before.stretch.settings, identity=before.identities[0])
            stream, last = replace(leg.stream, cursor=cursor), leg.stretch.last
            for rows, cursor in islice(stream.global_batches(), None if last is None else last - done):
                yield stream, rows, cursor
            before, done = leg, last or done

    def on_rank(self, **place: int) -> "TrainingStream":
        """The same batches as another rank has them; `place` as in BatchStream."""
        return replace(
            self,
            legs=tuple(replace(leg, stream=replace(leg.stream, **place)) for leg in self.legs),  # type: ignore[arg-type]
        )

    def from_iteration(self, iteration: int) -> "TrainingStream":
        """The same batches from that of a later iteration on. Those between are packed, which reads lengths only."""
        between = iteration - 1 - self.iteration
        if between == 0:
            return self
        _, _, cursor = next(islice(self.global_batches(), between - 1, None))
        return replace(self, iteration=iteration - 1, cursor=cursor)

    def steps(self, *, first: int = 0, every: int = 1) -> Iterator[StepBatches]:
        """Steps first, first + every, ... counted from the iteration; those between are packed but not read."""
        ahead = max(leg.stream.steps_ahead for leg in self.legs)
        return build_steps(islice(self.global_batches(), first, None, every), ahead=ahead)


def build_training_stream(settings: Settings, inputs: list[Inputs], *, fixed_shapes: bool = False) -> TrainingStream:
    """All batches of a run on one rank; `inputs` as `open_phases` gives them."""
    return TrainingStream(
        tuple(
            Leg(
                stretch,
                own.identities,
                BatchStream(own.training, batch_settings(stretch.settings, own.tokenizer, fixed_shapes=fixed_shapes)),
            )
            for stretch, own in zip(stretches(settings), inputs, strict=True)
        )
    )


def _differ(before: Settings, after: Settings, names: tuple[tuple[str, str], ...]) -> bool:
    return any(
        getattr(getattr(before, section), name) != getattr(getattr(after, section), name) for section, name in names
    )
