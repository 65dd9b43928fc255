"""The command `neobert inspect batch`: what the model sees in one iteration, and which tokens it has to predict.

neobert inspect batch --load SAVE --iteration 812
neobert inspect batch --config FILE --data-path P --tokenizer-model PATH --iteration 1 --html batch.html

The numbers are printed, then some rows with their documents as text, brackets around each predicted token; or the rows
become one page that needs nothing beside it and runs nothing (batch_page.html). On the page the pointer over a token
shows its id, its place and what is predicted; a row of 1,024 tokens takes some 100 KB.
"""

import io
import shutil
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_neobert.cli import option
from megatron_neobert.config.schema import Settings
from megatron_neobert.errors import OutputError
from megatron_neobert.text import visible

if TYPE_CHECKING:  # --help answers without importing torch
    from megatron_neobert.inspection.batch_rows import BatchRow, TokenView
    from megatron_neobert.inspection.found_batch import FoundBatch

# The batch of all ranks does not depend on the layout, and this process is one rank.
_ONE_RANK = ["--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1", "--context-parallel-size", "1"]


@dataclass(frozen=True, kw_only=True)
class InspectBatchOptions:
    """The command line of `neobert inspect batch`, beside the flags of `neobert train`."""

    iteration: int = option(help="whose batch; the first iteration is 1", metavar="K", minimum=1)
    load: Path | None = option(None, "folder of a run, its --save", metavar="SAVE")
    config: str | None = option(None, "settings as a run takes them, in place of those of --load", metavar="FILE")
    rows: int = option(4, "how many rows to show as text; 0 shows the numbers alone", minimum=0)
    html: Path | None = option(None, "write the rows as a page, and print the numbers alone", metavar="FILE")


def inspect_batch(options: InspectBatchOptions, flags: list[str]) -> None:
    """Show the rows, documents and predicted tokens of one iteration's batch; all other flags are those of a run.

    The code that builds it in training builds it here; no model is needed and nothing is changed. With --load it starts
    from the run's checkpoint before that iteration, and takes its settings unless --config names a file. The batch is
    that of all ranks, which does not depend on how many there are.

    Raises:
        ConfigError: Settings that a run would not take.
        OutputError: The page cannot be written.
    """
    if options.html is not None and options.html.is_dir():
        raise OutputError(f"--html {options.html} is a folder; name a file in it.")
    place, settings = choose_origin(options, [*flags, *_ONE_RANK])

    from megatron_neobert.inspection.batch_rows import describe, rows_of
    from megatron_neobert.inspection.found_batch import find_batch

    found = find_batch(settings, options.iteration, place=place)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without UTF-8 shows escapes
    print(f"batch {found.iteration:,}")
    for name, line in describe(found).items():
        print(f"  {name:<12}{line}")
    rows = islice(rows_of(found), options.rows)
    if options.html is None:
        print_rows(found, rows)
        return
    from megatron_neobert.runtime.atomic_files import replace_file

    try:
        replace_file(options.html, to_html(found, list(rows)))
    except OSError as error:
        raise OutputError(f"--html {options.html} cannot be written ({error.strerror}); name another.") from error
    print(f"wrote {options.html}")


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


def print_rows(found: "FoundBatch", rows: "Iterable[BatchRow]") -> None:
    """Print the legend, and these rows."""
    from megatron_neobert.inspection.batch_rows import EXAMPLES, MEANINGS, TokenViews

    views, columns = TokenViews(found.tokenizer), shutil.get_terminal_size((120, 24)).columns
    print("", *(f"  {mark(EXAMPLES[kind]):15}{meaning}" for kind, meaning in MEANINGS.items()), sep="\n")
    for row in rows:
        slots = found.settings.data.seq_length
        print(f"\nrow {row.number:,} of micro-batch {row.micro_batch:,}: {row.used_slots:,} of {slots:,} slots")
        for piece in row.pieces:
            print(f"  {piece.title}{f' of {visible(piece.corpus)}' if len(found.sources) > 1 else ''}")
            text = "".join(token.space + mark(token) for token in views.of(piece))
            print(textwrap.fill(text, columns, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False))


def mark(token: "TokenView") -> str:
    """Return the text of a token, in brackets if it is predicted: what the model sees, then what it has to predict."""
    if token.kind in ("plain", "special"):
        return token.text
    return f"[={token.text}]" if token.kind == "kept" else f"[{token.seen.strip('[]')}->{token.text}]"


def to_html(found: "FoundBatch", rows: "list[BatchRow]") -> str:
    """Return a page with the numbers of the batch, a legend, and these rows."""
    from jinja2 import Environment

    from megatron_neobert.inspection.batch_rows import EXAMPLES, MEANINGS, TokenViews, describe

    environment = Environment(autoescape=True, finalize=_without_control_characters, keep_trailing_newline=True)
    environment.filters["n"] = "{:,}".format
    template = environment.from_string(Path(__file__).with_name("batch_page.html").read_text(encoding="utf-8"))
    return template.render(
        iteration=found.iteration,
        lines=describe(found),
        legend=[(EXAMPLES[kind], meaning) for kind, meaning in MEANINGS.items()],
        rows=rows,
        slots=found.settings.data.seq_length,
        several=len(found.sources) > 1,
        views=TokenViews(found.tokenizer),
    )


def _without_control_characters(value: Any) -> Any:
    """Escape what documents and names of files hold, so that it cannot turn a page around; jinja2 escapes the rest."""
    is_markup = hasattr(value, "__html__")  # what a macro of the template has made, its values escaped already
    return visible(value) if isinstance(value, str) and not is_markup else value
