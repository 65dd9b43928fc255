"""Run `neobert convert` in a checkout: `python checkpoint_conversion/convert.py megatron-to-hf --load SAVE ...`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, not an installed package

from megatron_neobert import __main__ as neobert
from megatron_neobert.errors import run_command


def main() -> int | None:
    """Run `neobert convert` with the arguments of this command line."""
    sys.argv.insert(1, "convert")
    return neobert.main()


if __name__ == "__main__":
    run_command(main)
