"""Hostile files that do nothing but leave a mark."""

import json
import os
from pathlib import Path
from typing import Any

from megatron_neobert.runtime.atomic_files import sha256_of


class Canary:
    """Creates the file `mark` when it is unpickled by somebody who trusts it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.mark),))

    @property
    def has_run(self) -> bool:
        return self.mark.exists()

    @property
    def source(self) -> str:
        """Python that leaves the same mark."""
        return f"import os\nos.makedirs({str(self.mark)!r}, exist_ok=True)\n"


class Checkpoint:
    """A copy of a real checkpoint, to be spoilt by somebody who also writes its manifest."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def save(self) -> Path:
        return self.folder.parent

    def replace(self, name: str, content: bytes) -> None:
        (self.folder / name).write_bytes(content)
        self.seal()

    def seal(self) -> None:
        """Writes the manifest of whatever files are there."""
        manifest = self.folder / "MANIFEST.json"
        files = [path for path in self.folder.rglob("*") if path.is_file() and path != manifest]
        listed = {
            str(path.relative_to(self.folder)): {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
            for path in files
        }
        manifest.write_text(json.dumps({"format": 1, "files": listed}))
