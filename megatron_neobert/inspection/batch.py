"""The command `neobert inspect batch`: what the model sees in one iteration, and which tokens it has to predict.

neobert inspect batch --load SAVE --iteration 812
neobert inspect batch --config FILE --data-path P --tokenizer-model PATH --iteration 1

Prints statistics of the batch, then some packed sequences as text, with brackets around each predicted token.
"""

import io
import shutil
import sys
import textwrap
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from megatron_neobert.cli import option
from megatron_neobert.config.schema import Settings
from megatron_neobert.text import visible

# The global batch does not depend on the layout, and this command runs in a single process.
_ONE_RANK = ["--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1", "--context-parallel-size", "1"]
_LEGEND = {
    "[MASK->word]": "predicted; the model sees [MASK]",
    "[other->word]": "predicted; the model sees another token",
    "[=word]": "predicted; the model sees the token itself",
}


@dataclass(frozen=True, kw_only=True)
class InspectBatchOptions:
    """Options of `neobert inspect batch`, besides the flags of `neobert train`."""

    iteration: int = option(help="iteration of the batch; the first is 1", metavar="K", minimum=1)
    load: Path | None = option(None, "folder of a run (its --save)", metavar="SAVE")
    config: str | None = option(None, "YAML file with settings, instead of the settings in --load", metavar="FILE")
    rows: int = option(4, "packed sequences to show as text; 0 shows only the statistics", minimum=0)


def inspect_batch(options: InspectBatchOptions, flags: list[str]) -> None:
    """Print statistics and text of one iteration's batch.

    The code of training builds the batch of all ranks. No model is built and no file is written. --load starts from the
    run's newest checkpoint before the iteration, and takes the run's settings unless --config is given.

    Args:
        flags: Flags of `neobert train`, which override settings of the run.

    Raises:
        ConfigError: A flag is unknown, the settings break a rule, or the run has no such iteration.
        MissingInputError: An input, or a checkpoint that this command needs, does not exist.
        DataError, StorageError: An input is damaged or cannot be read.
        CheckpointError: A checkpoint is damaged, or was trained on another corpus.
    """
    checkpoint, settings = choose_origin(options, [*flags, *_ONE_RANK])

    from megatron_neobert.inspection.batch_text import describe, read_sequences, to_text
    from megatron_neobert.inspection.global_batch import rebuild_batch

    global_batch = rebuild_batch(settings, options.iteration, checkpoint=checkpoint)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal without UTF-8 shows escapes.
        sys.stdout.reconfigure(errors="backslashreplace")
    print(f"batch {options.iteration:,}")
    for name, line in describe(global_batch).items():
        print(f"  {name:<12}{line}")
    if global_batch.settings.data.objective == "mlm":
        print("", *(f"  {mark:15}{meaning}" for mark, meaning in _LEGEND.items()), sep="\n")
    columns = shutil.get_terminal_size((120, 24)).columns
    for sequence in islice(read_sequences(global_batch), options.rows):
        print(
            f"\npacked sequence {sequence.number:,} of micro-batch {sequence.micro_batch:,}: {sequence.tokens:,} of "
            f"{global_batch.settings.data.seq_length:,} tokens"
        )
        for segment in sequence.segments:
            print(f"  {segment.title}{f' of {visible(segment.corpus)}' if len(global_batch.sources) > 1 else ''}")
            text = to_text(segment, global_batch.tokenizer)
            print(textwrap.fill(text, columns, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False))


def choose_origin(options: InspectBatchOptions, flags: list[str]) -> tuple[Path | None, Settings]:
    """Return the checkpoint to start from, or None to start at the first iteration, and the settings of the run.

    Raises:
        ConfigError: A flag is unknown, or the settings break a rule.
        MissingInputError: --load has no checkpoint that this command needs, or the `--config` file does not exist.
        CheckpointError: The settings in a checkpoint are damaged.
    """
    from megatron_neobert.checkpoint.folder import list_checkpoints
    from megatron_neobert.config.cli import parse_command_line
    from megatron_neobert.inspection import global_batch

    load, checkpoint = options.load, None
    if load is not None and (list_checkpoints(load) or options.config is None):
        checkpoint = global_batch.checkpoint_before(load, options.iteration)
    if options.config is not None or load is None:
        config = ["--config", options.config] if options.config is not None else []
        return checkpoint, parse_command_line([*config, *flags], world_size=1).settings
    saved = global_batch.without_outputs(global_batch.settings_of_iteration(load, options.iteration))
    return checkpoint, global_batch.override_settings(saved, flags)
