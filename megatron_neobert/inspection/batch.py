"""The command `neobert inspect batch`: what the model sees in one iteration, and which tokens it has to predict.

neobert inspect batch --load SAVE --iteration 812
neobert inspect batch --config FILE --data-path P --tokenizer-model PATH --iteration 1

The numbers are printed, then some rows with their documents as text, brackets around each predicted token.
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

# The batch of all ranks does not depend on the layout, and this process is one rank.
_ONE_RANK = ["--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1", "--context-parallel-size", "1"]
_LEGEND = {
    "[MASK->word]": "predicted, and hidden: the model sees the mask token",
    "[other->word]": "predicted, and replaced: the model sees the first, and has to predict the second",
    "[=word]": "predicted, although the model sees it",
}


@dataclass(frozen=True, kw_only=True)
class InspectBatchOptions:
    """The command line of `neobert inspect batch`, beside the flags of `neobert train`."""

    iteration: int = option(help="whose batch; the first iteration is 1", metavar="K", minimum=1)
    load: Path | None = option(None, "folder of a run, its --save", metavar="SAVE")
    config: str | None = option(None, "settings as a run takes them, in place of those of --load", metavar="FILE")
    rows: int = option(4, "how many rows to show as text; 0 shows the numbers alone", minimum=0)


def inspect_batch(options: InspectBatchOptions, flags: list[str]) -> None:
    """Show the rows, documents and predicted tokens of one iteration's batch; all other flags are those of a run.

    The code that builds it in training builds it here; no model is needed and nothing is changed. With --load it starts
    from the run's checkpoint before that iteration, and takes its settings unless --config names a file. The batch is
    that of all ranks, which does not depend on how many there are.

    Raises:
        ConfigError: Settings that a run would not take.
    """
    place, settings = choose_origin(options, [*flags, *_ONE_RANK])

    from megatron_neobert.inspection.batch_rows import describe, rows_of, to_text
    from megatron_neobert.inspection.found_batch import find_batch

    found = find_batch(settings, options.iteration, place=place)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without UTF-8 shows escapes
    print(f"batch {found.iteration:,}")
    for name, line in describe(found).items():
        print(f"  {name:<12}{line}")
    print("", *(f"  {mark:15}{meaning}" for mark, meaning in _LEGEND.items()), sep="\n")
    columns = shutil.get_terminal_size((120, 24)).columns
    for row in islice(rows_of(found), options.rows):
        slots = found.settings.data.seq_length
        print(f"\nrow {row.number:,} of micro-batch {row.micro_batch:,}: {row.used_slots:,} of {slots:,} slots")
        for piece in row.pieces:
            print(f"  {piece.title}{f' of {visible(piece.corpus)}' if len(found.sources) > 1 else ''}")
            text = to_text(piece, found.tokenizer)
            print(textwrap.fill(text, columns, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False))


def choose_origin(options: InspectBatchOptions, flags: list[str]) -> tuple[Path | None, Settings]:
    """Return the checkpoint to start from, and the settings of the run, checked."""
    from megatron_neobert.checkpoint.folder import list_checkpoints
    from megatron_neobert.config.cli import parse_command_line
    from megatron_neobert.inspection import found_batch

    load, place = options.load, None
    if load is not None and (list_checkpoints(load) or options.config is None):
        place = found_batch.checkpoint_before(load, options.iteration)
    if options.config is not None or load is None:
        config = ["--config", options.config] if options.config is not None else []
        return place, parse_command_line([*config, *flags], world_size=1).settings
    saved = found_batch.without_outputs(found_batch.settings_of_iteration(load, options.iteration))
    return place, found_batch.replace_by_flags(saved, flags, world_size=1)
