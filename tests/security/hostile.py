"""Build changes that turn valid files into hostile ones; hostile code does nothing but leave a mark."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_neobert.runtime.atomic_files import sha256_of


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
    manifest = folder / "MANIFEST.json"
    files = [path for path in folder.rglob("*") if path.is_file() and path != manifest]
    found = {str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in files}
    manifest.write_text(json.dumps({"format": 1, "files": found}))


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


def edit_json(pattern: str, change: Callable[[dict[str, Any]], object]) -> Spoil:
    def edit(path: Path, canary: Canary) -> None:
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return each(pattern, change=edit)


def change_json(pattern: str, **changes: object) -> Spoil:
    return edit_json(pattern, lambda content: content.update(changes))


def pipe_in_place_of(*names: str) -> Spoil:
    def spoil(folder: Path, canary: Canary) -> None:
        for name in names:
            for path in sorted(folder.glob(name)) or [folder / name]:
                path.unlink(missing_ok=True)
                os.mkfifo(path)

    return spoil
