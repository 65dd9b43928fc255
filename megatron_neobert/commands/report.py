"""The command `neobert report`: write one page with the results of all evaluations."""

from dataclasses import dataclass
from pathlib import Path

from megatron_neobert.cli import option
from megatron_neobert.runtime.atomic_files import require_folder
from megatron_neobert.text import counted


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    results: tuple[Path, ...] = option(help="--output folders of evaluations", metavar="DIR")
    output: Path = option(help="folder to write to; may exist", metavar="DIR")


def report(options: ReportOptions) -> None:
    """Write one page with all results, next to the paper's numbers.

    Write OUTPUT/report.md and its figures.
    """
    for folder in options.results:
        require_folder("--results", folder, remedy="name the --output of an evaluation")
    from megatron_neobert.evaluation.report import write_report

    records = write_report(options.results, options.output)
    print(f"wrote {options.output / 'report.md'} from {counted(len(records), 'record')}")
