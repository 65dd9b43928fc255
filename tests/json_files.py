"""Write and change small JSON files."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """Write rows as JSON lines, and create the folder of the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def edit_json(path: Path, **changes: Any) -> None:
    """Replace values of the JSON object in a file; `...` removes a key."""
    content = read_json(path) | changes
    kept = {key: value for key, value in content.items() if value is not ...}
    path.write_text(json.dumps(kept), encoding="utf-8")
