"""Where the launcher says that this process stands. Standard library only; needs no process group."""

import os


def world_size() -> int:
    """Number of ranks that the launcher announced; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_rank_zero() -> bool:
    """True on the rank that speaks for all."""
    return int(os.environ.get("RANK", "0")) == 0
