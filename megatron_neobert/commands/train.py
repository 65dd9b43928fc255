"""The command `neobert train`: start pretrain.py on the GPUs of this node, or on its CPU."""

import sys
from pathlib import Path

from megatron_neobert import launch


def train() -> int:
    """Run `neobert train [flags]`: start pretrain.py, and return the exit code. See `launch.main`."""
    sys.argv.insert(1, str(Path(launch.__file__).with_name("pretrain.py")))
    return launch.main()
