"""Command: all results on one page, beside the paper's numbers.

    neobert report --results DIR [DIR...] --output DIR

Reads the records below the folders (the --output of the evaluations) and writes OUTPUT/report.md with its figures, and
OUTPUT/report.html, which holds them. Reported numbers are marked and enter no average; what is missing is named.
"""

from pathlib import Path

from megatron_neobert.errors import CommandParser
from megatron_neobert.runtime.atomic_files import require_folder
from megatron_neobert.text import visible


def main() -> None:
    """Reads the arguments, writes the report and prints what is missing."""
    parser = CommandParser(__doc__)
    parser.add_argument("--results", required=True, nargs="+", type=Path, metavar="DIR", help="--output of evaluations")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder to write to; may exist")
    arguments = parser.parse_args()
    for folder in arguments.results:
        require_folder("--results", folder, remedy="name the --output of an evaluation")

    from megatron_neobert.evaluation.report import missing, write_report

    runs = write_report(arguments.results, arguments.output)
    for model, kinds in missing(runs).items():
        if kinds:
            print(f"{visible(model)}: no record of {', '.join(kinds)}")
    print(f"wrote {arguments.output / 'report.html'} and report.md from {len(runs)} records")
