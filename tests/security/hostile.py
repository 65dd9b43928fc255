"""Build changes that turn valid files into hostile ones; hostile code does nothing but leave a mark."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from json_files import edit_json

from megatron_neobert.checkpoint.folder import write_manifest


class Canary:
    """An object that creates the folder `mark` when a reader unpickles it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.mark),))

    @property
    def has_run(self) -> bool:
        return self.mark.exists()

    @property
    def source(self) -> str:
        """Python code that creates the same folder."""
        return f"import os\nos.makedirs({str(self.mark)!r}, exist_ok=True)\n"


Spoil = Callable[[Path, Canary], object]


def seal(folder: Path) -> None:
    """Write a manifest that matches the files of a checkpoint's folder, as an attacker would."""
    (folder / "MANIFEST.json").unlink(missing_ok=True)
    write_manifest(folder, {})


def each(*patterns: str, change: Callable[[Path, Canary], object]) -> Spoil:
    """Return a change of all files that match the patterns; checkpoints get a matching manifest."""

    def spoil(folder: Path, canary: Canary) -> None:
        paths = [path for pattern in patterns for path in sorted(folder.glob(pattern))]
        assert paths, patterns
        for path in paths:
            change(path, canary)
        for path in folder.glob("iter_*"):
            seal(path)

    return spoil


def in_place_of(*patterns: str, content: Callable[[Canary], bytes]) -> Spoil:
    return each(*patterns, change=lambda path, canary: path.write_bytes(content(canary)))


def change_json(name: str, **changes: object) -> Spoil:
    return each(name, change=lambda path, canary: edit_json(path, **changes))


def pipe_in_place_of(*names: str) -> Spoil:
    def spoil(folder: Path, canary: Canary) -> None:
        for name in names:
            for path in sorted(folder.glob(name)) or [folder / name]:
                path.unlink(missing_ok=True)
                os.mkfifo(path)

    return spoil
