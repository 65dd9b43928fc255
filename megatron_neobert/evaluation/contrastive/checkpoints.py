"""Checkpoints of contrastive fine-tuning: which one a run may go on from, and with which settings.

The trainer writes a checkpoint file by file, `trainer_state.json` last: without a readable one it was cut off.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from megatron_neobert.errors import ConfigError, OutputError
from megatron_neobert.runtime.atomic_files import replace_file

_SETTINGS = "settings.json"


def newest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint with the most steps."""
    complete = {_steps(path): path for path in folder.glob("checkpoint-*") if _steps(path)}
    return complete[max(complete)] if complete else None


def _steps(checkpoint: Path) -> int:
    """How far it got; 0 if it was cut off."""
    try:
        state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return 0
    return int(state["global_step"])


def prepare_folder(folder: Path, settings: dict[str, Any], *, resume: bool) -> None:
    """Leaves a folder to train in, without checkpoints that were cut off.

    Raises:
        OutputError: It holds checkpoints and `resume` is not set.
        ConfigError: They were made with other settings.
    """
    noted = folder / _SETTINGS
    content = json.loads(json.dumps(settings))  # as it will be read
    if newest_checkpoint(folder) is not None:
        if not resume:
            raise OutputError(f"{folder} holds checkpoints; go on with --resume, or name another --output.")
        before = json.loads(noted.read_text(encoding="utf-8"))
        if changed := _differences(before, content):
            raise ConfigError(
                f"--resume: {folder} was started with other settings ({'; '.join(changed)}); use those, or name "
                "another --output."
            )
    for path in folder.glob("checkpoint-*"):
        if not _steps(path):
            shutil.rmtree(path)
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(noted, json.dumps(content, indent=2) + "\n")


def _differences(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """What changed, entry by entry also within sections."""
    found = []
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            found += _differences(old, new, f"{prefix}{name}.")
        elif old != new:
            found.append(f"{prefix}{name} was {old!r} and is {new!r}")
    return found
