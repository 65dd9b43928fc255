"""`neobert preprocess` as a file of the checkout."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout before any that is installed

from megatron_neobert.__main__ import run
from megatron_neobert.errors import run_command


def main() -> int | None:
    """Run `neobert preprocess` with the words of this command line."""
    return run("preprocess", sys.argv[1:])


if __name__ == "__main__":
    run_command(main)
