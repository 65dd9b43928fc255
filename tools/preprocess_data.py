"""Run `neobert preprocess` under the file name that Megatron-LM users know."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, not an installed package

from megatron_neobert.__main__ import run
from megatron_neobert.errors import run_command


def main() -> int | None:
    """Run `neobert preprocess` with this command line's arguments, and return the exit code, or None for 0."""
    return run("preprocess", sys.argv[1:])


if __name__ == "__main__":
    run_command(main)
