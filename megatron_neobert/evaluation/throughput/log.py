"""The steps that have been measured, one line of JSON per length and batch size, and under which settings.

A run that was ended goes on where it stopped. A last line that was not finished is measured again; a file of other
settings is refused, because its rows could not stand beside the new ones.
"""

import json
import os
from pathlib import Path
from typing import Any

from megatron_neobert.errors import ConfigError, DataError


class StepLog:
    """A file of rows, open to further lengths and batch sizes."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        """Opens or creates the file.

        Raises:
            ConfigError: The file holds measurements under other settings.
            DataError: The file is no such log.
        """
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self._groups: set[tuple[int, int]] = set()
        lines = _whole_lines(path)
        if not lines:
            self._write(json.dumps(settings, sort_keys=True), mode="w")
            return
        _refuse_other_settings(path, _parse(path, lines[0]), settings)
        for group in (_parse(path, line) for line in lines[1:]):
            self._remember(group["length"], group["batch_size"], group["rows"])

    def holds(self, length: int, batch_size: int) -> bool:
        """Whether this group has been measured."""
        return (length, batch_size) in self._groups

    def append(self, length: int, batch_size: int, rows: list[dict[str, Any]]) -> None:
        """Adds a group; on disk when this returns."""
        self._write(json.dumps({"length": length, "batch_size": batch_size, "rows": rows}), mode="a")
        self._remember(length, batch_size, rows)

    def _remember(self, length: int, batch_size: int, rows: list[dict[str, Any]]) -> None:
        self._groups.add((length, batch_size))
        self.rows += rows

    def _write(self, line: str, *, mode: str) -> None:
        with self.path.open(mode, encoding="utf-8") as stream:
            stream.write(line + "\n")
            stream.flush()
            os.fsync(stream.fileno())


def _whole_lines(path: Path) -> list[str]:
    """The lines that were finished; what follows them is cut off."""
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(path, len(whole))
    return whole.decode("utf-8").splitlines()


def _parse(path: Path, line: str) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path}: a line is not JSON ({error}); remove the file and measure again.") from None
    if not isinstance(content, dict):
        raise DataError(f"{path}: a line is no object; remove the file and measure again.")
    return content


def _refuse_other_settings(path: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    new = json.loads(json.dumps(new))  # as it would have been read
    changed = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
    if changed:
        name = changed[0]
        raise ConfigError(
            f"{path} was measured with other settings ({', '.join(changed)}; {name} was {old.get(name)!r} and is now "
            f"{new.get(name)!r}). Measure with the old ones, or choose another --output."
        )
