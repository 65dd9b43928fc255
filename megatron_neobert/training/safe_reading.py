"""The one door to the files of a checkpoint: inside it, nothing that a file holds is executed.

megatron.core reads a checkpoint's table of contents and its common.pt by its own rules; `safe_reading` puts ours
before them. `--trust-checkpoint` leaves megatron.core's as they are.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException

from megatron_neobert.errors import CheckpointError, ConfigError
from megatron_neobert.training.checkpoint_metadata import SafeReader, reason_of
from megatron_neobert.training.common_file import read_common

_VARIABLE = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def refuse_unsafe_environment(trust: bool) -> None:
    """Refuses a start with torch's variable that makes every torch.load unpickle whatever a file holds.

    Raises:
        ConfigError: It is set, and checkpoints are not trusted.
    """
    value = os.environ.get(_VARIABLE, "")
    if not trust and value.lower() in ("1", "y", "yes", "true"):  # the values that torch understands
        raise ConfigError(
            f"{_VARIABLE}={value} lets checkpoints run code; unset it or, if you trust whoever wrote every file that "
            "will be read, add --trust-checkpoint."
        )


def open_reader(folder: Path, *, trust: bool) -> FileSystemReader:
    """What reads the tensors of a checkpoint, its table of contents checked already.

    Raises:
        CheckpointError: The table wants to run code, or does not describe this folder.
    """
    if trust:
        return FileSystemReader(folder)
    reader = SafeReader(folder)
    reader.read_metadata()  # here, and not within the collectives of a load, where torch goes on to try other files
    return reader


@contextmanager
def safe_reading(*, trust: bool) -> Iterator[None]:
    """While it is open, megatron.core's `dist_checkpointing.load` reads by our rules, unless the files are trusted.

    Raises:
        CheckpointError: A file holds something else than a checkpoint of this program. The torch.distributed exception
            that a failed load ends with is turned into it.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.strategies import torch as sharded

    load = dist_checkpointing.load

    def load_checked(state: Any, folder: str, *arguments: Any, **options: Any) -> Any:
        check_format(Path(folder))
        read_common(Path(folder))
        return load(state, folder, *arguments, **options)

    ours: list[tuple[Any, str, Any]] = [
        (dist_checkpointing, "load", load_checked),
        (sharded, "_get_filesystem_reader", lambda folder, *_, **__: open_reader(Path(folder), trust=False)),
    ]
    theirs = [(owner, name, getattr(owner, name)) for owner, name, _ in ours]
    for owner, name, replacement in [] if trust else ours:
        setattr(owner, name, replacement)
    try:
        with one_sentence():
            yield
    except CheckpointingException as error:
        raise CheckpointError(f"megatron.core cannot load the checkpoint: {reason_of(error)}") from error
    finally:
        for owner, name, original in theirs:
            setattr(owner, name, original)


@contextmanager
def one_sentence() -> Iterator[None]:
    """Turns the exception in which torch.distributed wraps those of all ranks back into the first of them."""
    try:
        yield
    except CheckpointException as wrapped:
        rank, (error, _) = next(iter(wrapped.failures.items()))
        if isinstance(error, (CheckpointError, OSError)):
            raise error from None
        raise CheckpointError(f"rank {rank} cannot load the checkpoint: {reason_of(error)}") from error


def check_format(folder: Path) -> None:
    """Refuses a checkpoint of another format, before megatron.core looks for a reader by the name that it gives.

    Raises:
        CheckpointError: metadata.json is missing or damaged, or names other formats.
    """
    path = folder / "metadata.json"
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing, so the checkpoint is incomplete; use another one.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON ({reason_of(error)}); use another checkpoint.") from error
    if found != FORMAT:
        raise CheckpointError(f"{path}: {found!s:.200} is not the format of this program, {FORMAT}.")
