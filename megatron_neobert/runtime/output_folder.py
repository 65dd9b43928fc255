"""A folder that appears at once and complete, or not at all."""

import errno
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_neobert.errors import OutputError, SaveError
from megatron_neobert.runtime.atomic_files import own_name, sync_to_disk


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

    SIGTERM ends the block as Ctrl-C does. What a killed process left at this output is named; a running one may be
    writing it on another machine.

    Raises:
        OutputError: The target exists, or the folder cannot be created.
        SaveError: A file cannot be written, as on a full disk.
    """
    from safetensors import SafetensorError  # commands import this module before they know their environment

    refuse_existing(output)
    for leftover in output.parent.glob(f"{output.name}.unfinished.*"):
        print(f"note: {leftover} may be left of a process that was killed; remove it if none is running")
    temporary = own_name(output.with_name(f"{output.name}.unfinished"))
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise OutputError(f"--output {output}: {temporary} cannot be created ({error.strerror}).") from error
    is_main = threading.current_thread() is threading.main_thread()  # no other may set a handler
    usual = signal.signal(signal.SIGTERM, signal.default_int_handler) if is_main else None
    try:
        yield temporary
        for path in (*temporary.rglob("*"), temporary):
            sync_to_disk(path)
        temporary.rename(output)
    except (OSError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise OutputError(f"--output {output} was created by another program meanwhile; name a new one.") from error
        raise SaveError(
            f"--output {output} cannot be written ({error}); nothing is left of it. Free some space, or name a folder "
            "on another disk."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # gone already if all went well
        if is_main:
            signal.signal(signal.SIGTERM, usual)
    sync_to_disk(output.parent)
