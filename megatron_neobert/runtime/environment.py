"""Where the launcher says that this process stands. Standard library only; needs no process group."""

import os

from megatron_neobert.errors import LauncherError

_WHO_SETS = "torchrun and examples/pretrain_neobert.sh set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
_MOST_RANKS = 2**31 - 1  # int32 in every backend


def world_size() -> int:
    """Number of ranks that the launcher announced; 1 without a launcher.

    Raises:
        LauncherError: The variables of a launcher contradict each other, are incomplete, or are not numbers.
    """
    given = [name for name in ("RANK", "WORLD_SIZE") if name in os.environ]
    if not given:
        return 1
    if len(given) == 1:
        other = "WORLD_SIZE" if given == ["RANK"] else "RANK"
        raise LauncherError(
            f"the environment variable {given[0]} is {os.environ[given[0]]!r}, but {other} is not set; {_WHO_SETS}, so "
            f"start with one of them, or unset {given[0]} for one process."
        )
    ranks = _whole_number("WORLD_SIZE", minimum=1)
    rank = _whole_number("RANK", minimum=0)
    if rank >= ranks:
        raise LauncherError(
            f"the environment variable RANK is {rank}, but WORLD_SIZE is {ranks}; ranks are numbered 0 to {ranks - 1}. "
            "Start all ranks with the same WORLD_SIZE."
        )
    local_rank()
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise LauncherError(
            f"RANK is {rank} of WORLD_SIZE {ranks}, but {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} "
            f"not set, so the ranks cannot meet; {_WHO_SETS}."
        )
    if _whole_number("MASTER_PORT", minimum=1) > 65535:
        raise LauncherError(f"the environment variable MASTER_PORT is {os.environ['MASTER_PORT']}; ports end at 65535.")
    return ranks


def local_rank() -> int:
    """Number of this rank among those of its node, by which it takes its GPU; 0 without a launcher.

    Raises:
        LauncherError: It is not a number.
    """
    return _whole_number("LOCAL_RANK", minimum=0) if "LOCAL_RANK" in os.environ else 0


def is_rank_zero() -> bool:
    """True on the rank that speaks for all."""
    return int(os.environ.get("RANK", "0")) == 0


def _whole_number(name: str, *, minimum: int) -> int:
    text = os.environ[name]
    if not (text.isascii() and text.isdigit() and len(text) <= 10) or not minimum <= int(text) <= _MOST_RANKS:
        raise LauncherError(
            f"the environment variable {name} is {text[:80]!r}; it must be a whole number from {minimum} on, and "
            f"{_WHO_SETS}."
        )
    return int(text)
