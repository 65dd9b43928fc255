"""`neobert fetch contrastive` as a file of the checkout."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout before any that is installed

from megatron_neobert.commands.fetch_contrastive import main
from megatron_neobert.errors import run_command

if __name__ == "__main__":
    run_command(main)
