"""Command: what the model sees in one iteration: rows, documents, and which tokens it has to predict.

    neobert inspect batch --load SAVE --iteration 812
    neobert inspect batch --config FILE --data-path P --tokenizer-model PATH --iteration 1 --html batch.html
    neobert inspect batch --load SAVE --iteration 812 --rank 5 --world-size 8

Builds the batch by the code that builds it in training; no model is needed and nothing is changed. With --load it
starts from the run's checkpoint before that iteration, and takes its settings unless --config names a file; all other
flags are those of a run (neobert train --help). Without --rank it shows the batch of all ranks, which
does not depend on how many there are.
"""

import argparse
import io
import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_neobert.config.schema import Settings
from megatron_neobert.errors import CommandParser, ConfigError, OutputError

if TYPE_CHECKING:
    from megatron_neobert.inspection.found_batch import FoundBatch


_ONE_RANK = ["--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1", "--context-parallel-size", "1"]


def main() -> None:
    """Finds the batch, prints it, and writes the page."""
    arguments, flags = _parse()
    _check(arguments)
    place, settings = _choose(arguments, flags)

    from megatron_neobert.inspection.found_batch import find_batch, share_of_rank

    share = None
    if arguments.rank is not None:
        share = share_of_rank(settings, rank=arguments.rank, world_size=arguments.world_size)
    _show(find_batch(settings, arguments.iteration, place=place, share=share), arguments)


def _parse() -> tuple[argparse.Namespace, list[str]]:
    from megatron_neobert.config.cli import run_flags

    doc = __doc__ or ""
    parser = CommandParser(__doc__, also=run_flags(), epilog=" ".join(doc.split("\n\n")[-1].split()))
    add = parser.add_argument
    add("--iteration", type=int, required=True, metavar="K", help="whose batch; the first iteration is 1")
    add("--load", type=Path, metavar="SAVE", help="folder of a run, its --save")
    add("--config", metavar="FILE", help="settings as a run takes them, in place of those of --load")
    add("--rank", type=int, metavar="R", help="only what this rank trains on")
    add("--world-size", type=int, metavar="N", help="ranks of the run; with --rank")
    add("--rows", type=int, default=4, metavar="N", help="how many rows to show as text (default: %(default)s)")
    add("--html", type=Path, metavar="FILE", help="write the rows as a page, and print the numbers alone")
    return parser.parse_known_args()


def _check(arguments: argparse.Namespace) -> None:
    """
    Raises:
        ConfigError, OutputError: Before anything slow.
    """
    from megatron_neobert.inspection.found_batch import check_iteration

    check_iteration(arguments.iteration)
    if arguments.rows < 0:
        raise ConfigError(f"--rows {arguments.rows} is below 0; 0 shows the numbers alone.")
    if (arguments.rank is None) != (arguments.world_size is None):
        raise ConfigError("--rank and --world-size belong together: which rank of how many; give both or neither.")
    if arguments.world_size is not None and arguments.world_size < 1:
        raise ConfigError(f"--world-size {arguments.world_size} is below 1; give the number of ranks of the run.")
    if arguments.html is not None and not arguments.html.parent.is_dir():
        raise OutputError(f"--html {arguments.html}: there is no folder {arguments.html.parent}; create it first.")
    if arguments.html is not None and arguments.html.is_dir():
        raise OutputError(f"--html {arguments.html} is a folder; name a file in it.")


def _choose(arguments: argparse.Namespace, flags: list[str]) -> tuple[Path | None, Settings]:
    """The checkpoint to start from, and the settings of the run, checked."""
    from megatron_neobert.checkpoint.folder import list_checkpoints
    from megatron_neobert.config.cli import parse_command_line
    from megatron_neobert.inspection import found_batch

    ranks = arguments.world_size or 1
    if arguments.rank is None:
        flags = [*flags, *_ONE_RANK]  # behind the user's flags: they replace a layout that one rank cannot have
    load, place = arguments.load, None
    if load is not None and (list_checkpoints(load) or arguments.config is None):
        place = found_batch.checkpoint_before(load, arguments.iteration)
    if arguments.config is not None or load is None:
        config = ["--config", arguments.config] if arguments.config is not None else []
        return place, parse_command_line([*config, *flags], world_size=ranks).settings
    saved = found_batch.without_outputs(found_batch.settings_of_iteration(load, arguments.iteration))
    return place, found_batch.replace_by_flags(saved, flags, world_size=ranks)


def _show(found: "FoundBatch", arguments: argparse.Namespace) -> None:
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
    rows = islice(rows_of(found), arguments.rows)
    if arguments.html is None:
        print_rows(console, found, rows)
    else:
        page = to_html(found, summary, list(rows))
        try:
            replace_file(arguments.html, page)
        except OSError as error:
            raise OutputError(f"--html {arguments.html} cannot be written ({error.strerror}); name another.") from error
        console.print(f"wrote {arguments.html}")
