"""Hostile files that do nothing but leave a mark, and the commands that are given them."""

import json
import os
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata

from megatron_neobert.files import sha256_of


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


class Result(NamedTuple):
    """How a command ended, and all that it printed."""

    code: int
    output: str

    @property
    def errors(self) -> list[str]:
        return [line for line in self.output.splitlines() if line.startswith("error")]

    def refused(self, code: int) -> bool:
        """One sentence, this exit code, no traceback."""
        return self.code == code and len(self.errors) == 1 and "Traceback" not in self.output


class Commands:
    """Runs commands through command_server.py."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @staticmethod
    def environment(repository: Path) -> dict[str, str]:
        launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        clean = {name: value for name, value in os.environ.items() if name not in launchers and "SLURM" not in name}
        return {**clean, "PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"}

    def run(self, module: str, *arguments: str | Path, environment: dict[str, str] | None = None) -> Result:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps([environment or {}, module, *map(str, arguments)]) + "\n")
        self._process.stdin.flush()
        return Result(*json.loads(self._process.stdout.readline()))


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

    def change_table(self, change: Callable[[Metadata], None]) -> None:
        table = self.read_table()
        change(table)
        self.replace(".metadata", pickle.dumps(table))

    def read_table(self) -> Metadata:
        """As torch reads it: only for tables that this test wrote."""
        with (self.folder / ".metadata").open("rb") as stream:
            table: Metadata = pickle.load(stream)
        return table

    def append(self, thing: Any) -> tuple[str, int, int]:
        """Stores something as torch stores a tensor: the file, its offset and its length."""
        path = sorted(self.folder.glob("*.distcp"))[0]
        with path.open("ab") as stream:
            offset = stream.tell()
            torch.save(thing, stream)
            length = stream.tell() - offset
        self.seal()
        return path.name, offset, length

    def seal(self) -> None:
        """Writes the manifest of whatever files are there."""
        manifest = self.folder / "MANIFEST.json"
        files = [path for path in self.folder.rglob("*") if path.is_file() and path != manifest]
        listed = {
            str(path.relative_to(self.folder)): {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
            for path in files
        }
        manifest.write_text(json.dumps({"format": 1, "files": listed}))
