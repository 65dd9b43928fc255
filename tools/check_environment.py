"""Command: can this machine train, with what, and what stands in the way?

    python tools/check_environment.py [--save runs/first] [--gpu-test] [--json]

Looks at Python, packages, GPUs, driver, limits, disks and environment variables, and knows which versions do not go
together; each line is ok, a warning with its remedy, or a problem with its remedy. Exit code 0: training can start
(there may be warnings); 69: it cannot, or it would not use the GPUs that are here. Runs where nothing is installed yet,
with any Python from 3.8 on: no package is imported into this process, and of the project its errors alone.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout before any that is installed

from megatron_neobert.errors import EXIT_UNAVAILABLE, CommandParser, run_command


def main() -> int:
    """Looks, judges, prints; returns the exit code."""
    arguments = _parse()
    from environment_checks.collect import collect
    from environment_checks.facts import PROBLEM
    from environment_checks.report import GPU_TEST, judge, terminal, to_json, to_text, worst

    variables = dict(os.environ)
    facts = collect(arguments.save, variables)
    sections = judge(facts)
    if arguments.gpu_test:
        from environment_checks.kernel_test import try_devices

        sections[GPU_TEST] = try_devices(facts)
    if arguments.json:
        print(to_json(facts, sections))
    else:
        colour, width = terminal(variables)
        print(to_text(sections, colour=colour, width=width))
    return EXIT_UNAVAILABLE if worst(sections) == PROBLEM else 0


def _parse() -> Namespace:
    parser = CommandParser(__doc__)
    add = parser.add_argument
    add("--save", type=Path, metavar="DIR", help="folder that a run will write to: is it writable, is there room?")
    add("--gpu-test", action="store_true", help="also compute on every GPU, and between them")
    add("--json", action="store_true", help="print everything that was found as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    run_command(main)
