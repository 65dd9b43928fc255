"""The train state of a run, and train_state.json, which stores it in a checkpoint. This module needs no torch."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from megatron_neobert.checkpoint.folder import TRAIN_STATE
from megatron_neobert.config.resume_rules import ReadCorpus
from megatron_neobert.data.batches.windows import Count, Cursor
from megatron_neobert.errors import CheckpointError, short_reason
from megatron_neobert.runtime.atomic_files import read_text
from megatron_neobert.text import parse_json


@dataclass(frozen=True)
class TrainState:
    """Progress of a run. A run resumes from its train state, weights and optimizer state."""

    corpus_sha256: str  # identity of the corpus or blend at the last iteration, into which `cursor` points
    iteration: Count = 0  # last trained or skipped iteration
    cursor: Cursor = field(default_factory=Cursor)  # next packed sequence to read
    consumed_samples: Count = 0  # packed sequences
    consumed_tokens: Count = 0  # document tokens; unused token capacity is not counted
    skipped_iterations: Count = 0  # iterations without an update, see skip_reason in training/step.py
    skipped_in_a_row: Count = 0  # skipped iterations since the last update
    validated_iteration: Count = 0  # iteration of the last complete validation
    # Identity of the corpus or blend of the first phase, whose held-out documents validate.
    first_corpus_sha256: str = ""
    read_corpora: tuple[ReadCorpus, ...] = ()  # by this run and the runs before it


class SavedState(msgspec.Struct, frozen=True):
    """Content of train_state.json."""

    state: TrainState = msgspec.field(name="progress")
    optimizer_steps: Count | None  # updates that Adam has made; None in a checkpoint without optimizer state


def write_train_state(folder: Path, state: TrainState, *, optimizer_steps: int | None = None) -> None:
    """Write train_state.json. The arguments are the fields of SavedState."""
    content = msgspec.to_builtins(SavedState(state, optimizer_steps))
    (folder / TRAIN_STATE).write_text(json.dumps(content, indent=1), encoding="utf-8")


def read_train_state(folder: Path) -> SavedState:
    """Read train_state.json and check every value. Raise CheckpointError if the file is missing or not valid."""
    path = folder / TRAIN_STATE
    try:
        return msgspec.convert(parse_json(read_text(path)), SavedState)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing, so the checkpoint is incomplete; use another checkpoint.") from error
    except (msgspec.ValidationError, ValueError) as error:
        raise CheckpointError(
            f"{path}: not written by neobert ({short_reason(error)}); use another checkpoint."
        ) from error
