"""Rebuild the global batch of an iteration of a run, with the code that builds it in training.

The settings of a batch are those of the process that trained on it, and are in the first checkpoint after the batch.
Tensors of checkpoints are not read.

Without a checkpoint before the batch, all earlier packed sequences are packed again. This reads only lengths, about 2 M
documents per second.
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
from megatron_neobert.data.batches.packing import PackedSequences
from megatron_neobert.data.batches.phases import build_training_stream
from megatron_neobert.data.batches.stream import PackedBatch
from megatron_neobert.data.batches.windows import Cursor, Source
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer
from megatron_neobert.errors import CheckpointError, ConfigError, MissingInputError


class MicroBatch(NamedTuple):
    """Input of one forward pass, and the packed sequences that it was built from."""

    packed: PackedSequences
    batch: PackedBatch


@dataclass(frozen=True)
class GlobalBatch:
    """Micro-batches of all ranks in one iteration."""

    settings: Settings  # in force in this iteration, with phases resolved
    tokenizer: Tokenizer
    sources: tuple[Source, ...]
    cursor: Cursor  # start of the batch
    micro_batches: list[MicroBatch]


def rebuild_batch(settings: Settings, iteration: int, *, checkpoint: Path | None) -> GlobalBatch:
    """Build the global batch of an iteration, without a model. Iterations count from 1.

    Args:
        checkpoint: Checkpoint of the run before the iteration. None starts at the first iteration of the run, which
            follows the newest checkpoint of --continue-from, if there is one.

    Raises:
        MissingInputError: A corpus, the tokenizer or the checkpoint of --continue-from does not exist.
        DataError, StorageError: A corpus or the tokenizer is damaged or cannot be read.
        ConfigError: The settings do not fit the inputs, or the run has no such iteration.
        CheckpointError: The checkpoint is damaged, or was trained on another corpus.
    """
    # A run with --continue-from begins after the newest checkpoint of that folder.
    continue_from = settings.checkpoint.continue_from
    origin = latest_checkpoint(Path(continue_from)) if checkpoint is None and continue_from is not None else checkpoint
    refuse_later_iteration(settings, iteration)
    if checkpoint is None and origin is not None and iteration < (first := iteration_of(origin) + 1):
        raise ConfigError(
            f"--iteration {iteration} is before this run, whose first is {first}, after the newest checkpoint of "
            f"--continue-from {continue_from}. Name iteration {first} or a later one."
        )
    inputs = open_phases(settings)
    batches = build_training_stream(settings, inputs)
    if origin is not None:
        saved = read_train_state(origin).state
        cursor, identity = saved.cursor, saved.corpus_sha256
        if checkpoint is None:
            previous = phase_at(read_record(origin / "settings.yaml"), saved.iteration).settings
            cursor = batches.cursor_in(phase_at(settings, saved.iteration), cursor, previous, identity=identity)
        elif identity not in (identities := batches.identities_at(saved.iteration)):
            raise CheckpointError(
                f"{checkpoint} was trained on the corpus with sha256 {identity[:12]}, --data-path names a corpus with "
                f"{identities[0][:12]}. Name the corpus that the checkpoint was trained on."
            )
        batches = replace(batches, iteration=saved.iteration, cursor=cursor)
    stream, packed, _ = next(batches.from_iteration(iteration).global_batches())
    size = stream.settings.micro_batch_size
    return GlobalBatch(
        settings=phase_at(settings, iteration).settings,
        tokenizer=inputs[0].tokenizer,
        sources=stream.sources,
        cursor=stream.cursor,
        micro_batches=[
            MicroBatch(packed.take(number * size, (number + 1) * size), batch)
            for number, batch in enumerate(stream.build(packed))
        ],
    )


def checkpoint_before(load: Path, iteration: int) -> Path | None:
    """Return the newest checkpoint before an iteration, or None if the run can be rebuilt from iteration 1.

    Raises:
        MissingInputError: The folder has no checkpoint, or only later ones and the run began with --continue-from.
        CheckpointError: The settings in the newest checkpoint are damaged.
    """
    earlier = [folder for folder in list_checkpoints(load) if iteration_of(folder) < iteration]
    if earlier:
        return earlier[0]
    if read_record(latest_checkpoint(load) / "settings.yaml").checkpoint.continue_from is not None:
        raise MissingInputError(
            f"{load} has no checkpoint before iteration {iteration}, and its data did not begin at iteration 1 "
            "(--continue-from). Name an iteration after the first checkpoint of this run."
        )
    return None


def refuse_later_iteration(settings: Settings, iteration: int) -> None:
    """Raise ConfigError if `iteration` is after the last iteration of the run, --train-iters."""
    if iteration > (last := settings.training.train_iters):
        raise ConfigError(
            f"--iteration {iteration} is after the last iteration of this run, {last} (--train-iters). Name an earlier "
            "iteration, or raise --train-iters."
        )


def settings_of_iteration(load: Path, iteration: int) -> Settings:
    """Return the settings in the first checkpoint at or after an iteration, or else in the newest checkpoint.

    Raises:
        MissingInputError: There is no checkpoint.
        CheckpointError: The settings.yaml of that checkpoint is missing or damaged.
    """
    later = [folder for folder in list_checkpoints(load) if iteration_of(folder) >= iteration]
    return read_record((later[-1] if later else latest_checkpoint(load)) / "settings.yaml")


def without_outputs(settings: Settings) -> Settings:
    """Return the settings without saving, logging and early exits."""
    training = replace(settings.training, exit_interval=None, exit_duration_in_mins=None)
    return replace(settings, training=training, checkpoint=CheckpointConfig(), logging=LoggingConfig())


def override_settings(settings: Settings, flags: list[str]) -> Settings:
    """Return the settings with values replaced by flags of `neobert train`, checked for a run of one rank.

    Raise ConfigError if a flag is unknown, or if the result breaks a rule of the settings.
    """
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "settings.yaml"
        write_record(settings, record)
        return parse_command_line(["--config", str(record), *flags], world_size=1).settings
