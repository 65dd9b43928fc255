"""A folder that appears at once and complete, or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_neobert.errors import OutputError
from megatron_neobert.files import sync_to_disk


def refuse_existing(output: Path) -> None:
    """Refuses a target that holds something.

    Raises:
        OutputError: It is a file, a link, or a folder that is not empty.
    """
    if output.is_symlink():
        raise OutputError(f"--output {output} is a link, which a folder cannot take the place of; name a new folder.")
    if output.is_file() or (output.is_dir() and any(output.iterdir())):
        raise OutputError(f"--output {output} exists already and is not empty; name a new folder or remove this one.")


@contextmanager
def build_folder(output: Path) -> Iterator[Path]:
    """A temporary folder beside `output`, which takes its place when the block ends well and vanishes when it does not.

    Raises:
        OutputError: The target exists, or the folder cannot be created.
    """
    refuse_existing(output)
    temporary = output.with_name(f"{output.name}.tmp.{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise OutputError(f"--output {output}: {temporary} cannot be created ({error.strerror}).") from error
    try:
        yield temporary
        for path in (*temporary.rglob("*"), temporary):
            sync_to_disk(path)
        temporary.rename(output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # gone already if all went well
    sync_to_disk(output.parent)
