"""train_state.json: how far a run had come, and its optimizer's groups; what a checkpoint holds besides tensors.

Its progress is checked before anything is computed with it: the file may come from another machine, or another person.
"""

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from megatron_neobert.data.batches.rows import Cursor
from megatron_neobert.errors import CheckpointError, short_reason
from megatron_neobert.state import Progress

TRAIN_STATE = "train_state.json"
_PLACE = {field.name for field in fields(Cursor)}
_RETIRED_PLACE = {"sources", "rows"}  # of a blend by rows: the weights are good, `read_cursor` refuses the place


def write_train_state(folder: Path, progress: Progress, optimizer: dict[str, Any] | None = None) -> None:
    """Writes the file.

    Args:
        optimizer: Plain values of megatron.core's optimizer state; none for weights alone.
    """
    state = {"progress": asdict(progress)} | ({} if optimizer is None else {"optimizer": optimizer})
    (folder / TRAIN_STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")


def read_train_state(folder: Path) -> dict[str, Any]:
    """What the file holds: `progress`, and `optimizer` unless the checkpoint is of weights alone.

    Raises:
        CheckpointError: The file is missing or damaged, or is not of a run of this program.
    """
    path = folder / TRAIN_STATE
    try:
        state = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing, so the checkpoint is incomplete; use another one.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read ({short_reason(error)}); use another checkpoint.") from error
    parts = (state.get("progress"), state.get("optimizer", {})) if isinstance(state, dict) else ()
    if not parts or not all(isinstance(part, dict) for part in parts):
        raise CheckpointError(f"{path}: not of a run of this program (no progress and optimizer); use another one.")
    if problems := _problems_of_progress(state["progress"]):
        raise CheckpointError(f"{path}: its progress has {', '.join(problems)}; use another checkpoint.")
    state["progress"]["recent_updates"] = tuple(map(tuple, state["progress"].get("recent_updates", ())))
    return state


def _problems_of_progress(progress: dict[str, Any]) -> list[str]:
    known = {field.name for field in fields(Progress)}
    problems = [f"no {name}" for name in ("corpus_sha256", "iteration", "cursor") if name not in progress]
    problems += [f"an unknown {name!r:.40}" for name in progress if name not in known]
    for name, value in progress.items():
        if name == "cursor":
            fits = isinstance(value, dict) and (
                set(value) == _RETIRED_PLACE or (set(value) == _PLACE and all(map(_is_count, value.values())))
            )
        elif name == "recent_updates":
            fits = isinstance(value, list) and all(
                isinstance(pair, list) and len(pair) == 2 and all(type(number) is float for number in pair)
                for pair in value
            )
        elif name == "corpus_sha256":
            fits = isinstance(value, str)
        else:
            fits = name not in known or _is_count(value)
        if not fits:
            shown = f"{value!r:.40}" if isinstance(value, (int, float, str)) else f"of type {type(value).__name__}"
            problems.append(f"{name} {shown}")
    return problems


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
