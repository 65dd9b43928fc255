"""A global batch of a run as its ranks get it: built by the code that builds it in training, from its place on.

A batch belongs to the settings of the process that trained on it, and those are in the first checkpoint that came after
it. Of checkpoints, names and records are read, and no tensors.

Without a checkpoint to start from, all rows before it are packed, which reads lengths only: some 2 M documents per
second. Letters: `t` tokens of a micro-batch, `s` slots of one piece of a document.
"""

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from megatron_neobert.checkpoint.contents import read_train_state
from megatron_neobert.checkpoint.folder import iteration_of, latest_checkpoint, list_checkpoints
from megatron_neobert.config.cli import parse_command_line, read_record, write_record
from megatron_neobert.config.phases import phase_at
from megatron_neobert.config.schema import CheckpointConfig, LoggingConfig, Settings
from megatron_neobert.data.batches.inputs import open_phases
from megatron_neobert.data.batches.packing import PackedRows
from megatron_neobert.data.batches.phases import build_training_stream
from megatron_neobert.data.batches.rows import Cursor, Source
from megatron_neobert.data.batches.stream import PackedBatch
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer
from megatron_neobert.errors import CheckpointError, ConfigError, MissingInputError


@dataclass(frozen=True)
class FoundBatch:
    """The micro-batches of one iteration, of all ranks."""

    iteration: int
    settings: Settings
    tokenizer: Tokenizer
    sources: tuple[Source, ...]
    cursor: Cursor  # where the batch starts
    parts: list["FoundMicroBatch"]


class FoundMicroBatch(NamedTuple):
    """Input of one forward pass, and the rows that it was made of."""

    number: int  # in the global batch
    rows: PackedRows
    batch: PackedBatch


def find_batch(settings: Settings, iteration: int, *, place: Path | None) -> FoundBatch:
    """Build the batch of an iteration.

    Args:
        place: A checkpoint of the run before it; None starts where the first iteration of the run does.

    Raises:
        MissingInputError, DataError, ConfigError: Of what the settings name; the run has no such iteration.
        CheckpointError: The checkpoint is of other data.
    """
    continued = settings.checkpoint.continue_from  # such a run counts on from the other one
    origin = latest_checkpoint(Path(continued)) if place is None and continued is not None else place
    refuse_later_iteration(settings, iteration)
    if place is None and origin is not None and iteration < (first := iteration_of(origin) + 1):
        raise ConfigError(
            f"--iteration {iteration} is before this run, whose first is {first}: it counts on from the newest "
            f"checkpoint of --continue-from {continued}. Name {first} or a later one."
        )
    inputs = open_phases(settings)
    batches = build_training_stream(settings, inputs)
    if origin is not None:
        saved = read_train_state(origin).state
        cursor, identity = saved.cursor, saved.corpus_sha256
        if place is None:
            before = phase_at(read_record(origin / "settings.yaml"), saved.iteration).settings
            cursor = batches.cursor_in(phase_at(settings, saved.iteration), cursor, before, identity=identity)
        elif identity not in (identities := batches.identities_at(saved.iteration)):
            raise CheckpointError(
                f"{place} was trained on the corpus with sha256 {identity[:12]}, --data-path names one with "
                f"{identities[0][:12]}; its place in the data means nothing there. Name the corpus it was trained on."
            )
        batches = replace(batches, iteration=saved.iteration, cursor=cursor)
    stream, rows, _ = next(batches.from_iteration(iteration).global_batches())
    size = stream.settings.micro_batch_size
    return FoundBatch(
        iteration=iteration,
        settings=phase_at(settings, iteration).settings,
        tokenizer=inputs[0].tokenizer,
        sources=stream.sources,
        cursor=stream.cursor,
        parts=[
            FoundMicroBatch(number, rows.take(number * size, (number + 1) * size), batch)
            for number, batch in enumerate(stream.build(rows))
        ],
    )


def checkpoint_before(load: Path, iteration: int) -> Path | None:
    """Return the newest checkpoint before an iteration; None if the data began at iteration 1 and there is none.

    Raises:
        MissingInputError: There is none, and the data of the run began later.
    """
    before = [folder for folder in list_checkpoints(load) if iteration_of(folder) < iteration]
    if before:
        return before[0]
    if read_record(latest_checkpoint(load) / "settings.yaml").checkpoint.continue_from is not None:
        raise MissingInputError(
            f"{load} holds no checkpoint before iteration {iteration}, and its data did not begin at iteration 1: the "
            "run has continued another one. Name an iteration behind its first checkpoint."
        )
    return None


def refuse_later_iteration(settings: Settings, iteration: int) -> None:
    """Raise ConfigError if the run ends before this iteration."""
    if iteration > (last := settings.training.train_iters):
        raise ConfigError(
            f"--iteration {iteration} is none of this run, which has {last} (--train-iters); name one of them, or give "
            "a larger --train-iters."
        )


def settings_of_iteration(load: Path, iteration: int) -> Settings:
    """Return the settings that an iteration was trained with, as far as the checkpoints record them.

    Raises:
        MissingInputError: There is no checkpoint.
        CheckpointError: The record is damaged.
    """
    latest_checkpoint(load)  # raises where there is none
    newest, *older = list_checkpoints(load)
    behind = [folder for folder in (newest, *older) if iteration_of(folder) >= iteration]
    return read_record((behind[-1] if behind else newest) / "settings.yaml")


def without_outputs(settings: Settings) -> Settings:
    """Return the settings of the same run as one that saves nothing and that nothing ends early."""
    training = replace(settings.training, exit_interval=None, exit_duration_in_mins=None)
    return replace(settings, training=training, checkpoint=CheckpointConfig(), logging=LoggingConfig())


def replace_by_flags(settings: Settings, flags: list[str], *, world_size: int) -> Settings:
    """Return settings in which flags, as a run takes them, replace what they name.

    Raises:
        ConfigError: Flags that a run would not take either.
    """
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "settings.yaml"
        write_record(settings, record)
        return parse_command_line(["--config", str(record), *flags], world_size=world_size).settings
