"""What the folder of a run holds about one of its iterations: settings, and the checkpoint to start from.

Reads names and records, no tensors. A batch belongs to the settings of the process that trained on it, and those are
in the first checkpoint that came after it.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

from megatron_neobert.checkpoint.folder import iteration_of, latest_checkpoint, list_checkpoints
from megatron_neobert.config.cli import parse_command_line, read_record, write_record
from megatron_neobert.config.schema import CheckpointConfig, LoggingConfig, Settings
from megatron_neobert.errors import ConfigError, MissingInputError


def checkpoint_before(load: Path, iteration: int) -> Path | None:
    """The newest checkpoint before an iteration; None: there is none, and the data began at iteration 1.

    Raises:
        ConfigError: No iteration has that number.
        MissingInputError: There is none, and the data of the run began later.
    """
    check_iteration(iteration)
    before = [folder for folder in list_checkpoints(load) if iteration_of(folder) < iteration]
    if before:
        return before[0]
    if read_record(latest_checkpoint(load) / "settings.yaml").checkpoint.continue_from is not None:
        raise MissingInputError(
            f"{load} holds no checkpoint before iteration {iteration}, and its data did not begin at iteration 1: the "
            "run has continued another one. Name an iteration behind its first checkpoint."
        )
    return None


def check_iteration(iteration: int) -> None:
    """Raises ConfigError where no iteration has that number."""
    if iteration < 1:
        raise ConfigError(f"--iteration {iteration} is none; the first iteration of a run is 1.")


def settings_of_iteration(load: Path, iteration: int) -> Settings:
    """Those that an iteration was trained with, as far as the checkpoints record it.

    Raises:
        MissingInputError: There is no checkpoint.
        CheckpointError: The record is damaged.
    """
    latest_checkpoint(load)  # raises where there is none
    newest, *older = list_checkpoints(load)
    behind = [folder for folder in (newest, *older) if iteration_of(folder) >= iteration]
    return read_record((behind[-1] if behind else newest) / "settings.yaml")


def without_outputs(settings: Settings) -> Settings:
    """The same run as one that saves nothing, and that nothing ends early."""
    training = replace(settings.training, exit_interval=None, exit_duration_in_mins=None)
    return replace(settings, training=training, checkpoint=CheckpointConfig(), logging=LoggingConfig())


def replace_by_flags(settings: Settings, flags: list[str], *, world_size: int) -> Settings:
    """Settings in which flags, as a run takes them, replace what they name.

    Raises:
        ConfigError: Flags that a run would not take either.
    """
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "settings.yaml"
        write_record(settings, record)
        return parse_command_line(["--config", str(record), *flags], world_size=world_size).settings
