"""common.pt, what a checkpoint holds besides tensors: how far the run had come, and the optimizer's groups.

A file of torch.save, so a pickle. It is read without creating anything but plain values and tensors, and what it says
about the run is checked before anybody computes with it.
"""

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from megatron_neobert.data.rows import Cursor
from megatron_neobert.errors import CheckpointError
from megatron_neobert.training.checkpoint_metadata import reason_of
from megatron_neobert.training.run import Progress

_PLACE = {field.name for field in fields(Cursor)}
_RETIRED_PLACE = {"sources", "rows"}  # of a blend by rows: the weights are good, `read_cursor` refuses the place


def read_common(folder: Path) -> dict[str, Any]:
    """What common.pt holds.

    megatron.core adds classes of its own to those that torch.load may create; they are not needed and left out here.

    Raises:
        CheckpointError: The file is missing or damaged, asks for other objects, or is not of a run of this program.
    """
    path, added = folder / "common.pt", torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        common = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing, so the checkpoint is incomplete; use another one.") from error
    except OSError:
        raise
    except Exception as error:  # a damaged byte makes torch.load raise almost anything
        raise CheckpointError(f"{path}: cannot be read safely ({reason_of(error)}); use another checkpoint.") from error
    finally:
        torch.serialization.add_safe_globals(added)
    parts = (common.get("progress"), common.get("optimizer", {})) if isinstance(common, dict) else ()  # weights alone
    if not parts or not all(isinstance(part, dict) for part in parts):
        raise CheckpointError(f"{path}: not of a run of this program (no progress and optimizer); use another one.")
    if problems := _problems_of_progress(common["progress"]):
        raise CheckpointError(f"{path}: its progress has {', '.join(problems)}; use another checkpoint.")
    return common


def _problems_of_progress(progress: dict[Any, Any]) -> list[str]:
    known = {field.name for field in fields(Progress)}
    problems = [f"no {name}" for name in ("corpus_sha256", "iteration", "cursor") if name not in progress]
    problems += [f"an unknown {name!r:.40}" for name in progress if name not in known]
    for name, value in progress.items():
        if name == "cursor":
            fits = isinstance(value, dict) and (_is_place(value) or set(value) == _RETIRED_PLACE)
        elif name == "recent_updates":
            fits = isinstance(value, (tuple, list)) and all(_is_pair_of_numbers(pair) for pair in value)
        elif name == "corpus_sha256":
            fits = isinstance(value, str)
        else:
            fits = name not in known or _is_count(value)
        if not fits:
            problems.append(f"{name} {_shown(value)}")
    return problems


def _is_place(value: dict[Any, Any]) -> bool:
    return set(value) == _PLACE and all(_is_count(count) for count in value.values())


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_pair_of_numbers(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(type(number) is float for number in value)


def _shown(value: Any) -> str:
    return f"{value!r:.40}" if isinstance(value, (int, float, str)) else f"of type {type(value).__name__}"
