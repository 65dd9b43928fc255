"""The command `neobert inspect batch`: what the model sees in one iteration, and which tokens it has to predict.

neobert inspect batch --load SAVE --iteration 812
neobert inspect batch --config FILE --data-path P --tokenizer-model PATH --iteration 1 --html batch.html
neobert inspect batch --load SAVE --iteration 812 --rank 5 --world-size 8
"""

import io
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_neobert.cli import option
from megatron_neobert.config.schema import Settings
from megatron_neobert.errors import ConfigError, OutputError

if TYPE_CHECKING:
    from megatron_neobert.inspection.found_batch import FoundBatch

_ONE_RANK = ["--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1", "--context-parallel-size", "1"]


@dataclass(frozen=True, kw_only=True)
class InspectBatchOptions:
    """The command line of `neobert inspect batch`, beside the flags of `neobert train`."""

    iteration: int = option(help="whose batch; the first iteration is 1", metavar="K", minimum=1)
    load: Path | None = option(None, "folder of a run, its --save", metavar="SAVE")
    config: str | None = option(None, "settings as a run takes them, in place of those of --load", metavar="FILE")
    rank: int | None = option(None, "only what this rank trains on", metavar="R")
    world_size: int | None = option(None, "ranks of the run; with --rank", minimum=1)
    rows: int = option(4, "how many rows to show as text; 0 shows the numbers alone", minimum=0)
    html: Path | None = option(None, "write the rows as a page, and print the numbers alone", metavar="FILE")


def inspect_batch(options: InspectBatchOptions, flags: list[str]) -> None:
    """Show the rows, documents and predicted tokens of one iteration's batch; all other flags are those of a run.

    The code that builds it in training builds it here; no model is needed and nothing is changed. With --load it starts
    from the run's checkpoint before that iteration, and takes its settings unless --config names a file. Without --rank
    it shows the batch of all ranks, which does not depend on how many there are.

    Raises:
        ConfigError: Flags that belong together, or settings that a run would not take.
        OutputError: The page cannot be written.
    """
    if (options.rank is None) != (options.world_size is None):
        raise ConfigError("--rank and --world-size belong together: which rank of how many; give both or neither.")
    if options.html is not None and not options.html.parent.is_dir():
        raise OutputError(f"--html {options.html}: there is no folder {options.html.parent}; create it first.")
    if options.html is not None and options.html.is_dir():
        raise OutputError(f"--html {options.html} is a folder; name a file in it.")
    place, settings = choose_origin(options, flags)

    from megatron_neobert.inspection.found_batch import find_batch, share_of_rank

    share = None
    if options.rank is not None and options.world_size is not None:
        share = share_of_rank(settings, rank=options.rank, world_size=options.world_size)
    show(find_batch(settings, options.iteration, place=place, share=share), options)


def choose_origin(options: InspectBatchOptions, flags: list[str]) -> tuple[Path | None, Settings]:
    """Return the checkpoint to start from, and the settings of the run, checked."""
    from megatron_neobert.checkpoint.folder import list_checkpoints
    from megatron_neobert.config.cli import parse_command_line
    from megatron_neobert.inspection import found_batch

    ranks = options.world_size or 1
    if options.rank is None:
        flags = [*flags, *_ONE_RANK]  # behind the user's flags: they replace a layout that one rank cannot have
    load, place = options.load, None
    if load is not None and (list_checkpoints(load) or options.config is None):
        place = found_batch.checkpoint_before(load, options.iteration)
    if options.config is not None or load is None:
        config = ["--config", options.config] if options.config is not None else []
        return place, parse_command_line([*config, *flags], world_size=ranks).settings
    saved = found_batch.without_outputs(found_batch.settings_of_iteration(load, options.iteration))
    return place, found_batch.replace_by_flags(saved, flags, world_size=ranks)


def show(found: "FoundBatch", options: InspectBatchOptions) -> None:
    """Print the numbers of a batch and some rows, or write these as a page."""
    from megatron_neobert.inspection.batch_rows import rows_of
    from megatron_neobert.inspection.batch_views import print_rows, print_summary, summarize, to_html
    from megatron_neobert.runtime.atomic_files import replace_file
    from megatron_neobert.runtime.terminal import Terminal

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without UTF-8 shows escapes
    console = Terminal(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console = Terminal(highlight=False, markup=False, emoji=False, width=120)
    summary = summarize(found)
    print_summary(console, found, summary)
    rows = islice(rows_of(found), options.rows)
    if options.html is None:
        print_rows(console, found, rows)
    else:
        page = to_html(found, summary, list(rows))
        try:
            replace_file(options.html, page)
        except OSError as error:
            raise OutputError(f"--html {options.html} cannot be written ({error.strerror}); name another.") from error
        console.print(f"wrote {options.html}")
